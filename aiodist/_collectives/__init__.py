"""What each collective computes: one definition a kind, and what carries it out (floor 4).

In the order of imports: `work` is a result that worker threads make. `plan` says of which inputs, folded, cut or put
together, each result is made, for any shapes. `kinds` is the table of collectives: what each accepts, and its plan.
`out` checks and compares callers' buffers. `host` carries plans out over host memory. `execution` chooses.
"""
