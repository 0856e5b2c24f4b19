"""From a config to a finished run: the processes that torchrun starts."""
