"""Reductions on GPUs: what to launch where, in which order, and the one room that talks to the driver."""
