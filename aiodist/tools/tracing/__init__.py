"""Tracing: the whole timeline of runs in one file, and what reads it."""
