"""The version: the build reads it here, and workers compare it."""

__version__ = "0.1.0"
