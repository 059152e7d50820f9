"""What each collective computes: one definition a kind, and three executors that carry it out (floor 4).

Modules, in order; each imports only from those above it and from lower floors:

- `work`: results that worker threads or devices make.
- `kinds`: the table of collectives: what each accepts, and its plan: of which inputs each result is made, and how.
- `out`: callers' own buffers for results.
- `host`: the executor over host memory.
- `device`: the executor over GPUs: what a plan comes to there, and the way between them and the host.
- `execution`: which executor carries out what.
- `workers`: the executor over workers: what they exchange.
"""
