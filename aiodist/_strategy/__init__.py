"""Strategies (floor 8): a program's replicas, their devices, and operations outside of replicas.

Modules, in order; each imports only from those above it and from lower floors:

- `scope`: a strategy's replicas and its cross-replica context, with checks that a call is in it.
- `variable`: `Variable`, whose components replicas create together and assign to.
- `reductions`: reductions, gathers and copies of values outside of replicas.
- `extended`: `StrategyExtended`, and hints with TensorFlow's names.
- `strategy`: `Strategy`, `MirroredStrategy`, the default strategy and the strategy in force.
- `multi_worker`: `MultiWorkerMirroredStrategy`, and operations over its workers outside of replicas.
"""
