"""Strategies (floor 8): which replicas there are, on which devices, and what is done across them.

Modules, in order; each imports only from those above it and from lower floors:

- `scope`: a strategy's cross-replica context, and what belongs there.
- `variable`: `Variable`: its components, the assignments that change them, and how replicas create one together.
- `reductions`: reductions, gatherings and copies outside of replicas: what takes part, and how they are carried out.
- `extended`: `StrategyExtended`, and hints by TensorFlow's names.
- `strategy`: `Strategy`, `MirroredStrategy`, the default one, and which is in force.
- `multi_worker`: `MultiWorkerMirroredStrategy`, and what its workers do together outside of replicas.
"""
