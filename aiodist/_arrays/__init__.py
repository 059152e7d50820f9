"""What a leaf is, and what a user may say about devices and options (floor 2).

Modules, in order; each imports only from those above it and from lower floors:

- `environment`: environment variables.
- `options`: options of collectives and of the order check.
- `devices`: the GPUs that the driver finds, logical devices, and the names of all.
- `nests`: nests of leaves, by optree.
- `host`: arrays in host memory, other frameworks' included, and what reads as an array.
- `values`: `PerReplica`, `Mirrored` and `IndexedSlices`.
- `device`: arrays in a GPU's memory: what PyTorch, CuPy, Numba and JAX differ in.
- `leaves`: the description of a leaf and of a value: shapes, dtypes, kinds.
"""
