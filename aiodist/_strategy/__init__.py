"""Strategies (floor 8): a program's replicas, their devices, and operations across them.

Modules, in order; each imports only from those above it and from lower floors:

- `scope`: a strategy's cross-replica context, and the checks for it.
- `variable`: `Variable`: its components, the assignments that change them, and how replicas create one together.
- `reductions`: reductions, gathers and copies outside of replicas.
- `extended`: `StrategyExtended`, and hints by TensorFlow's names.
- `strategy`: `Strategy`, `MirroredStrategy`, the default strategy, and the one in force.
- `multi_worker`: `MultiWorkerMirroredStrategy`, and what its workers do together outside of replicas.
"""
