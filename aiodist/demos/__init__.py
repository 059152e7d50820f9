"""Programs that the command line runs: real training, and an error on purpose (floor 5)."""
