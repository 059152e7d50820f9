"""The version: the build reads it here, and workers compare it."""

__version__ = "0.2.0"
