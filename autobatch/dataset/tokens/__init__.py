"""Rows to token ids with label masks, on all cores, kept in a cache."""
