"""From token ids to gradients: the one engine that probes, verifies, trains."""
