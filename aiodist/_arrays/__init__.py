"""Leaves: what they can be, and users' devices and options (floor 2).

Modules, in order; each imports only from those above it and from lower floors:

- `environment`: environment variables.
- `options`: options of collectives and of the order check.
- `devices`: the GPUs that the driver finds, logical devices, and device names.
- `nests`: nests of leaves, by optree.
- `host`: arrays in host memory, including other frameworks', and objects that read as arrays.
- `values`: `PerReplica`, `Mirrored` and `IndexedSlices`.
- `device`: arrays in a GPU's memory: the differences of PyTorch, CuPy, Numba and JAX.
- `leaves`: the description of a leaf and of a value: shapes, dtypes, kinds.
"""
