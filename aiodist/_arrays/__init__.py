"""What a leaf is, and what a user may say about devices and options (floor 2).

Modules, in order; each imports only from those above it and from lower floors:

- `environment`: environment variables.
- `options`: options of collectives and of the order check.
- `gpus`: the GPUs that the driver finds, and logical devices made of them.
- `devices`: device names.
- `nests`: nests of leaves, by optree.
- `host`: arrays in host memory, other frameworks' included, and what reads as an array.
- `slices`: `IndexedSlices`.
- `device`: arrays in a GPU's memory, and handing such memory over by DLPack.
- `frameworks`: what PyTorch, CuPy, Numba and JAX differ in.
- `leaves`: the description of a leaf and of a value: shapes, dtypes, kinds.
- `values`: `PerReplica` and `Mirrored`.
"""
