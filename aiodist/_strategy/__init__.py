"""Strategies: which replicas there are, on which devices, and what is done across them (floor 4)."""
