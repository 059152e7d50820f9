"""What each collective computes: one definition per kind, and its executors (floor 4).

Modules, in order; each imports only from those above it and from lower floors:

- `work`: results computed by worker threads or devices.
- `kinds`: the table of collectives: what each accepts, and its plan: how each result is made from the inputs.
- `out`: callers' own buffers for results, and which memory may be written while other memory is read.
- `host`: the executor over host memory.
- `device`: the executor over GPUs: device plans, and copies between GPUs and the host.
- `execution`: the choice of the executor.
- `workers`: plans over workers: what they exchange, and how results are made from it.
"""
