"""One collective: who asked for what and from where, the meeting, the result or the verdict (floor 2)."""
