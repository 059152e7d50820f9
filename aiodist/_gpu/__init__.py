"""Work on GPUs: launches and copies as data, their order, and the only module that calls the driver (floor 3).

Modules, in order; each imports only from those above it and from lower floors:

- `steps`: which launches and copies reduce arrays, or move parts of them, as data.
- `cuda_core`: the driver, through cuda.core, and page-locked host memory.
- `enqueue`: schedules of steps for numbered arrays, which are given addresses, enqueued on streams and waited for.
- `current`: a replica's GPU and stream, as the current ones of a thread.
"""
