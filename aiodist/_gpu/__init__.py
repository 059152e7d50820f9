"""Work on GPUs: launches and copies as data, their order, and the only module that calls the driver (floor 3).

Modules, in order; each imports only from those above it and from lower floors:

- `steps`: launches and copies as data.
- `cuda_core`: the driver, through cuda.core, and page-locked memory of the host.
- `enqueue`: steps for numbered arrays, completed by addresses; enqueues them on streams, and waits for these; makes a
  replica's GPU and stream current in a thread.
"""
