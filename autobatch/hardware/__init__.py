"""Facts of the machine: its memory limit, its cores, its installed versions."""
