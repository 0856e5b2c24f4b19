"""A candidate becomes a trial: real training steps in a child process."""
