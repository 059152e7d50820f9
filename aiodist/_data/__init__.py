"""Datasets, and how each replica gets its part of a batch (floor 7).

Modules, in order; each imports only from those above it and from lower floors:

- `distributed`: `DistributedDataset`: how a global batch is cut, and how batches are grouped to a step.
- `prefetch`: a thread that makes elements ahead of time.
- `dataset`: `NumpyDataset`: arrays in memory, shuffled, batched, repeated, prefetched.
"""
