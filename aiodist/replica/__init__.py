"""One replica: its context, its task, its device's worker, and the scheduler that drives it (floor 3)."""
