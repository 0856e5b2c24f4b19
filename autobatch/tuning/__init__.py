"""Which candidate trains fastest within the memory limit, by trials."""
