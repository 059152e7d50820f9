"""Data: datasets, and how a strategy gives each replica its part of every batch (floor 4)."""
