"""Replicas on an event loop (floor 5).

Modules, in order; each imports only from those above it and from lower floors:

- `waits`: what a task waits for, as a value.
"""
