"""From files of rows to token ids with label masks."""
