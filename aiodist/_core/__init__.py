"""The order check: pure, with the standard library alone (floor 1)."""
