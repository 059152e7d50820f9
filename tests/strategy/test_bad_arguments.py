"""Errors for bad arguments of strategies, variables and datasets: their types and texts."""

from __future__ import annotations

import copy
import inspect
import pickle
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiodist import (
    CommunicationOptions,
    DeviceNotFoundError,
    IndexedSlices,
    InputContext,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    NumpyDataset,
    PerReplica,
    ReductionToOneDevice,
    ReplicaContextError,
    Strategy,
    StrategyExtended,
    Variable,
    experimental_set_strategy,
)
from tests.runtime.programs import mirrored
from tests.strategy.test_variables import under

pytestmark = pytest.mark.anyio

A, B = np.arange(6.0).reshape(2, 3), np.arange(6.0).reshape(2, 3) + 10
ONE, TWO, MASKED = PerReplica([1, 2]), PerReplica([A, B]), np.ma.masked_array([1.0, 2.0], [False, True])
NUMBERS: Any = NumpyDataset(np.zeros(2))
COMMUNICATOR: Any = SimpleNamespace(Get_rank=lambda: 0)
CLUSTER = {"worker": ["a:1", "b:1"]}
VALUES, DATASET = "experimental_distribute_values_from_function", "experimental_distribute_dataset"
FROM_FUNCTION, NUMPY_DATASET = "distribute_datasets_from_function", "experimental_make_numpy_dataset"


def both(*components: Any) -> PerReplica[Any]:
    return PerReplica(components)


def on(method: str, *arguments: Any) -> Any:
    """Return the call of a strategy's method."""
    return lambda s: attrgetter(method)(s)(*arguments)


def reduced(op: Any, value: Any, axis: Any = None) -> Any:
    return on("reduce", op, value, axis)


def updated(fn: Any, *arguments: Any) -> Any:
    return lambda s: s.extended.update(under(s, 1.0, name="w"), fn, *arguments)


def variable(initial_value: Any = 0.0, **settings: Any) -> Any:
    return lambda s: under(s, initial_value, **settings)


def assigned(initial: Any, value: Any) -> Any:
    return lambda s: under(s, initial, name="w").assign(value)


def options(**values: Any) -> Any:
    return lambda _: CommunicationOptions(**values)


def mirroring(devices: Any = None, **settings: Any) -> Any:
    return lambda _: MirroredStrategy(devices, **settings)


async def later(_: Any) -> Any: ...


async def generator(_: Any) -> Any:
    yield


BAD: list[tuple[Any, type[Exception], str]] = [
    # reduce
    (reduced("AVG", ONE), ValueError, "expected a reduce op"),
    (reduced("SUM", both(1, 2, 3)), ValueError, "with 2 components, one for each replica, got a PerReplica with 3"),
    (
        reduced("SUM", both(np.ones(2), np.ones(3))),
        ValueError,
        r"same type, dtype and shape.*give the axis.*replica 0's is float64\[2\], replica 1's is float64\[3\]",
    ),
    (reduced("SUM", both(np.ones(()), np.float64(1))), ValueError, r"is float64\[\], replica 1's is np.float64"),
    (reduced("SUM", both(True, False)), TypeError, "SUM of bool"),
    (reduced("SUM", both("a", "b")), TypeError, "got an object of type"),
    (reduced("SUM", both({"a": 1}, {"a": 2})), TypeError, r"components .*, got \{'a': 1\}; pass a nest of distributed"),
    (reduced("SUM", TWO, 2), ValueError, "axis must be from -2 to 1"),
    (reduced("SUM", TWO, (0, -2)), ValueError, "must name each axis once"),
    (reduced("SUM", TWO, 0.5), TypeError, "axis must be an int"),
    (reduced("SUM", TWO, np.arange(2)), TypeError, r"axis must be an int, got array\(\[0, 1\]\)"),
    (reduced("SUM", both(A, A[:, :2]), 0), ValueError, "may differ along axis 0 only"),
    (reduced("MAX", both(np.zeros(0), np.zeros(0)), 0), ValueError, "MAX along axis .* at least one element"),
    (reduced("SUM", both(np.ones(2), MASKED)), TypeError, "MaskedArray"),
    # gather
    (on("gather", ONE, 0), ValueError, r"got a scalar; pass np\.array"),
    (on("gather", both(A, A.astype("f4")), 0), ValueError, "float64.*float32"),
    (on("gather", both(A.astype(object), A.astype(object)), 0), TypeError, "got dtype object"),
    (on("gather", both(*[np.array(["a"], np.dtypes.StringDType())] * 2), 0), TypeError, r"got dtype StringDType\(\)"),
    # destinations
    *(
        (on("extended.reduce_to", "sum", ONE, bad), error, text)
        for bad, error, text in [
            (both(1, 2, 3), ValueError, "expected as destination a value with 2 components, got"),
            ("GPU:99", DeviceNotFoundError, "GPU:99"),
            (None, TypeError, "destinations must be"),
        ]
    ),
    (on("extended.broadcast_to", MASKED, "CPU:0"), TypeError, "MaskedArray"),
    (on("extended.broadcast_to", ONE, "CPU:0"), TypeError, "one value for all, got a PerReplica"),
    *(
        (on("extended.batch_reduce_to", "sum", bad), TypeError, r"must be a pair \(value, destinations\), got")
        for bad in (5, [ONE], [(ONE,)], "ab")
    ),
    # updates
    (on("extended.update", Variable(1.0), print), ReplicaContextError, "was not created under"),
    (on("extended.update", np.zeros(2), print), TypeError, r"expected an aiodist\.Variable"),
    (updated("fn"), TypeError, "expects a function"),
    (updated(generator), TypeError, r"extended\.update got the async generator function"),
    (updated(lambda c: [later(c)]), TypeError, r"result\[0\] is <coroutine .*`await` missing"),
    (updated(print, 1), TypeError, "args must be"),
    (updated(print, (both(1, 2, 3),)), ValueError, "with 2 components"),
    (
        updated(lambda c, x: c.assign(x), (both(1.0, 3.0),)),
        ValueError,
        "mirrored variable 'w' would get different values",
    ),
    (on("colocate_vars_with", Variable(1.0)), ReplicaContextError, "was not created under"),
    # strategies
    *(
        (copied, TypeError, "a MirroredStrategy cannot be copied or pickled")
        for copied in (copy.copy, copy.deepcopy, pickle.dumps)
    ),
    (lambda _: MultiWorkerMirroredStrategy(COMMUNICATOR), TypeError, r"devices are the first.*\(communicator=comm\)"),
    (lambda _: ReductionToOneDevice(accumulation_fn=len), ValueError, "accumulation_fn must be None"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    (lambda _: Strategy(3), TypeError, r"expected a StrategyExtended.*MirroredStrategy"),  # type: ignore[arg-type]
    (lambda s: Strategy(s.extended), ValueError, "already"),
    (lambda _: StrategyExtended(("CPU:0",), 3), TypeError, "communication_options must be"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    (lambda _: StrategyExtended(("CPU:0",)).reduce_to("sum", 1, "CPU:0"), ValueError, "needs a strategy"),
    (lambda _: experimental_set_strategy(MirroredStrategy), TypeError, "expected a strategy or None"),  # type: ignore[arg-type]
    (on("configure", None, CLUSTER), ValueError, "given together"),
    (on("configure", None, CLUSTER, "worker", 2), ValueError, "must name a task of"),
    (on("configure", None, ["a:1"], "worker", 0), TypeError, "cluster_spec must map"),
    (on("configure", None, CLUSTER, "worker", 1), ValueError, "for one process; MultiWorkerMirroredStrategy is for"),
    (on("update_config_proto", None), TypeError, "expects a mapping"),
    (on("warmup", ["text"]), TypeError, "got an object of type builtins.str"),
    (on("warmup", np.ones(2, bool)), TypeError, "bool"),
    # devices and options
    (mirroring(["CPU:0", "TPU:0"]), ValueError, "unknown kind of device 'TPU' in 'TPU:0'; the kinds are CPU and GPU"),
    (mirroring([None]), TypeError, "a device is named by a string"),
    (mirroring("CPU:0"), TypeError, r"a sequence of strings, such as \['CPU:0'\]"),
    *((mirroring(bad), TypeError, "a sequence of strings") for bad in ({"CPU:0", "CPU:1"}, object())),
    (mirroring([]), ValueError, "at least one device"),
    (mirroring(["CPU:1", "CPU:0", "/cpu:1"]), ValueError, r"needs a device of its own, got 'CPU:\d' twice"),
    (mirroring(["CPU:0", "cuda:63"]), DeviceNotFoundError, r"no device 'GPU:63' here; .*CPU:k for every k"),
    (mirroring(["/job:worker/replica:0/task:1/device:CPU:0"]), DeviceNotFoundError, "is a device of another task"),
    *((mirroring(n), ValueError, "must be a number of replicas, at least 1") for n in (0, -1, True, 2.5, np.half(2))),
    (mirroring(order_check="callsite"), ValueError, "must be one of 'call_site', 'call_path', 'signature', got"),
    (mirroring(cross_device_ops="nccl"), TypeError, "cross_device_ops must be CrossDeviceOps or None"),
    (options(bytes_per_pack=-1), ValueError, "bytes_per_pack must be at least 0, got -1"),
    (options(bytes_per_pack=2.5), TypeError, "bytes_per_pack must be an int, got 2.5"),
    (options(timeout_seconds=0), ValueError, "timeout_seconds must be more than 0, or None to wait, got 0"),
    (options(timeout_seconds=np.nan), ValueError, "timeout_seconds must be more than 0"),
    (options(timeout_seconds="3"), TypeError, "timeout_seconds must be a number of seconds, or None to wait, got '3'"),
    (options(timeout_seconds=True), TypeError, "must be a number of seconds, or None to wait, got True"),
    (options(implementation="gloo"), ValueError, "implementation must be one of 'auto', 'ring', 'nccl', got 'gloo'"),
    (options(accumulate=64), ValueError, "accumulate must be one of 'native', 'float64', got 64"),
    (lambda _: CommunicationOptions().merge(3), TypeError, "merge expects CommunicationOptions or None, got"),  # type: ignore[arg-type]
    # variables
    (variable(1.5, dtype=np.int32), TypeError, "fit int32, got float64"),
    (variable(aggregation="median"), ValueError, "VariableAggregation must be one of 'none', 'sum'"),
    (variable(synchronization="none"), ValueError, "synchronization NONE"),
    (variable(0, aggregation="mean"), ValueError, "MEAN needs a variable of floating-point"),
    (variable(False, aggregation="sum"), TypeError, "SUM of bool"),
    (variable(name=""), ValueError, "name must"),
    (variable(MASKED), TypeError, "a MaskedArray for a variable"),
    (assigned(np.zeros(2), 1.0), ValueError, "nothing is broadcast"),
    (assigned(np.zeros(2, np.float32), [1j, 0]), TypeError, "fit float32, got complex128"),
    (assigned(np.uint8(0), 256), OverflowError, "256"),
    (assigned(np.int8(0), 2**63), OverflowError, "too large"),
    (assigned(np.int8(0), 2**64), OverflowError, "at most 64 bits"),
    (assigned(np.uint8(0), np.int64(1)), TypeError, "fit uint8, got int64"),
    (assigned(0.0, both(1.0, 2.0)), ValueError, "'w' would get different values: replica 1's is not replica 0's"),
    (lambda s: under(s, 1.0, synchronization="on_read").read_value(), ValueError, "aggregation NONE"),
    (variable(None), TypeError, "a variable expects an array of numbers, or a number, got"),
    (assigned(np.zeros(2), ["a", "b"]), TypeError, "the variable 'w' expects an array of numbers, or a number, got"),
    # data
    (on(DATASET, None), TypeError, "expected an iterable or async iterable of batches"),
    (on(DATASET, [], "fast"), TypeError, "options must be None"),
    (on(FROM_FUNCTION, lambda _: None), TypeError, "expected an iterable or async iterable"),
    (on(FROM_FUNCTION, []), TypeError, "dataset_fn must be a function of one InputContext"),
    (on(FROM_FUNCTION, later), TypeError, "dataset_fn must be a plain function, got the corou"),
    (on(VALUES, later), TypeError, "value_fn must be a plain function"),
    (on(NUMPY_DATASET, np.zeros(2), "s"), TypeError, "session must be None"),
    (on(NUMPY_DATASET, (np.zeros(2), np.zeros(3))), ValueError, r"numpy_input\[0\] has 2, numpy_input\[1\] has 3"),
    (on(NUMPY_DATASET, {"x": [1, 2]}), TypeError, r"numpy_input\['x'\]\[0\] must be an array"),
    (on(NUMPY_DATASET, {}), ValueError, "must hold arrays.* there are none"),
    (lambda _: InputContext().get_per_replica_batch_size(8.0), TypeError, "global_batch_size must be an int, got 8.0"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    (lambda _: NUMBERS.shuffle(-1), ValueError, "seed must be at least 0, got -1"),
    (lambda _: NUMBERS.shuffle(None), TypeError, "seed must be an int, got None"),
    (lambda _: NUMBERS.repeat().batch(2).shuffle(0), ValueError, r"shuffle\(seed\) before \.repeat"),
    (lambda _: NUMBERS.batch(0), ValueError, "n must be at least 1, got 0"),
    (lambda _: NUMBERS.batch(True), TypeError, "n must be an int, got True"),
    (lambda _: NUMBERS.repeat(-1), ValueError, "k must be at least 0, got -1"),
    (lambda _: NUMBERS.prefetch(0), ValueError, "k must be at least 1, got 0"),
    (lambda _: IndexedSlices(MASKED, [0, 1]), TypeError, "a MaskedArray as the values of IndexedSlices"),
]


async def outcome(call: Any) -> Any:
    result = call(mirrored(2))
    return await result if inspect.isawaitable(result) else result


@pytest.mark.parametrize(("call", "error", "text"), BAD)
async def test_bad_arguments(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        await outcome(call)
    assert type(caught.value) is error


OUTSIDE: dict[str, tuple[Any, ...]] = {
    "run": (int,),
    "reduce": ("SUM", ONE, None),
    "gather": (TWO, 0),
    "scope": (),
    "extended.reduce_to": ("sum", ONE, "CPU:0"),
    "extended.batch_reduce_to": ("sum", []),
    "extended.broadcast_to": (1, "CPU:0"),
    "extended.update": (Variable(0.0), print),
    "extended.call_for_each_replica": (int,),
    DATASET: ([],),
    FROM_FUNCTION: (lambda _: [],),
    VALUES: (print,),
    NUMPY_DATASET: (A,),
}


@pytest.mark.parametrize("method", OUTSIDE)
async def test_method_called_in_a_replica_or_under_another_strategy_is_refused(method: str) -> None:
    async def call(strategy: Any) -> Any:
        made = attrgetter(method)(strategy)(*OUTSIDE[method])
        return made.__enter__() if method == "scope" else await made

    strategy, other = mirrored(2), mirrored(3)
    with pytest.raises(ReplicaContextError, match=rf"{method}(\(\))? was called inside replica 0; it belongs outside"):
        await strategy.run(call, (strategy,))
    refused = pytest.raises(ReplicaContextError, match=r"under another strategy, <MirroredStrategy: 3 .* do not nest")
    with other.scope(), refused:
        await call(strategy)
    with refused:
        await other.run(call, (strategy,))
