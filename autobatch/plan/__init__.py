"""Which rows go into which micro-batch of which rank at which step: pure integers."""
