"""Tools on top of the library: the command line (floor 5)."""
