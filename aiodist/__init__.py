"""Cooperative replicas on one event loop, after ``tf.distribute``, with collectives whose order is always checked."""

import typing

from aiodist._arrays.environment import journal_folder as _journal_folder
from aiodist._arrays.options import CommunicationOptions
from aiodist._arrays.values import DistributedValues, IndexedSlices, Mirrored, PerReplica
from aiodist._core.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeadlockError,
    DeviceNotFoundError,
    IncompleteCollectiveError,
    ReplicaContextError,
    StallWarning,
    WorkerLostError,
)
from aiodist._runtime.context import ReplicaContext
from aiodist._runtime.handle import CollectiveHandle
from aiodist._tools.trace import trace
from aiodist._version import __version__ as __version__
from aiodist_kernels import ReduceOp

if _journal_folder():  # this is a worker of `aiodist run`
    from aiodist._workers.ending import note_the_end

    note_the_end()

if typing.TYPE_CHECKING:
    from aiodist._arrays.devices import set_logical_devices
    from aiodist._core.recorder import RecordedCall, Recorder, RunRecord
    from aiodist._core.report import CallRecord, CollectiveReport, Divergence, DivergenceKind, Partition, ReplicaReport
    from aiodist._core.terms import Location, Reason, ReplicaState
    from aiodist._data.dataset import NumpyDataset
    from aiodist._data.distributed import DistributedDataset, DistributedIterator, InputContext, ValueContext
    from aiodist._strategy.extended import (
        CollectiveHints,
        CrossDeviceOps,
        HierarchicalCopyAllReduce,
        NcclAllReduce,
        ReductionToOneDevice,
        StrategyExtended,
    )
    from aiodist._strategy.multi_worker import MultiWorkerMirroredStrategy
    from aiodist._strategy.strategy import (
        MirroredStrategy,
        Strategy,
        experimental_set_strategy,
        get_replica_context,
        get_strategy,
        has_strategy,
        in_cross_replica_context,
    )
    from aiodist._strategy.variable import Variable, VariableAggregation, VariableSynchronization
else:
    _LAZY = {
        name: module
        for module, names in {
            "_arrays.devices": "set_logical_devices",
            "_core.recorder": "RecordedCall Recorder RunRecord",
            "_core.report": "CallRecord CollectiveReport Divergence DivergenceKind Partition ReplicaReport",
            "_core.terms": "Location Reason ReplicaState",
            "_data.dataset": "NumpyDataset",
            "_data.distributed": "DistributedDataset DistributedIterator InputContext ValueContext",
            "_strategy.extended": "CollectiveHints CrossDeviceOps HierarchicalCopyAllReduce NcclAllReduce "
            "ReductionToOneDevice StrategyExtended",
            "_strategy.multi_worker": "MultiWorkerMirroredStrategy",
            "_strategy.strategy": "MirroredStrategy Strategy experimental_set_strategy get_replica_context "
            "get_strategy has_strategy in_cross_replica_context",
            "_strategy.variable": "Variable VariableAggregation VariableSynchronization",
        }.items()
        for name in names.split()
    }

    def __getattr__(name: str) -> object:
        """Load a public name that `import aiodist` does not load: strategies, reports and datasets."""
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(f"aiodist.{_LAZY[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    # Strategies: sets of replicas that run functions.
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "Strategy",
    "StrategyExtended",
    "set_logical_devices",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "experimental_set_strategy",
    # Inside a replica: its context and its collectives.
    "ReplicaContext",
    "get_replica_context",
    "CollectiveHandle",
    "ReduceOp",
    "CommunicationOptions",
    "CollectiveHints",
    "CrossDeviceOps",
    "ReductionToOneDevice",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    # Values with one component for each replica.
    "DistributedValues",
    "PerReplica",
    "Mirrored",
    "IndexedSlices",
    # State, with one component for each replica.
    "Variable",
    "VariableSynchronization",
    "VariableAggregation",
    # Datasets, and the replicas' parts of their batches.
    "DistributedDataset",
    "DistributedIterator",
    "NumpyDataset",
    "InputContext",
    "ValueContext",
    # Errors and their reports.
    "CollectiveError",
    "CollectiveMismatchError",
    "IncompleteCollectiveError",
    "CollectiveTimeoutError",
    "WorkerLostError",
    "DeadlockError",
    "ReplicaContextError",
    "DeviceNotFoundError",
    "StallWarning",
    "CollectiveReport",
    "ReplicaReport",
    "ReplicaState",
    "Reason",
    "CallRecord",
    "Partition",
    "Divergence",
    "DivergenceKind",
    "Location",
    # Records and traces of runs.
    "Recorder",
    "RunRecord",
    "RecordedCall",
    "trace",
]
