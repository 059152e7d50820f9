"""Leaves, and users' devices and options (floor 2).

Modules, in order; each imports only from those above it and from lower floors:

- `environment`: environment variables, and the cluster that `TF_CONFIG` describes.
- `options`: options of collectives.
- `devices`: the GPUs that the driver finds, logical devices, and device names.
- `nests`: nests of leaves, by optree.
- `host`: arrays in host memory, including other frameworks', and objects that act as arrays; copies, read-only views.
- `values`: `PerReplica`, `Mirrored` and `IndexedSlices`; arguments split by replica, and results regrouped.
- `device`: arrays in GPU memory: how PyTorch, CuPy, Numba and JAX differ.
- `leaves`: the description of a leaf and of a value.
"""
