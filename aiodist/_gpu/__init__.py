"""Work on GPUs: what to launch and copy where, in which order, and the one module that talks to the driver (floor 3).

Modules, in order; each imports only from those above it and from lower floors:

- `steps`: launches and copies as data.
- `cuda_core`: the driver, through cuda.core, and page-locked memory of the host.
- `enqueue`: steps for arrays that have numbers, ready for addresses; on streams, and waiting for them; a replica's GPU
  and stream as those of a thread.
"""
