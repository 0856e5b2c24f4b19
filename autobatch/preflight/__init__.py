"""Mistakes that can be seen before anything is started."""
