"""Datasets, and the replicas' parts of their batches (floor 7).

Modules, in order; each imports only from those above it and from lower floors:

- `batches`: how a global batch is cut, and how the batches of a step are grouped.
- `distributed`: `DistributedDataset` and its iterator, which makes steps of batches.
- `prefetch`: iterators over a dataset's elements, one of which makes them ahead of time in a thread.
- `dataset`: `NumpyDataset`, arrays in memory that are shuffled, batched, repeated and prefetched.
"""
