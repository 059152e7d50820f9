"""Checking: a controlled event loop, schedules of ready tasks, and the search for one that fails (floor 5)."""
