"""From files of rows to token ids with label masks, and what their lengths tell."""
