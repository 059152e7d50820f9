"""What strategies, variables and datasets refuse: with which error, and in which words."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from aiodist import (
    DeviceNotFoundError,
    IndexedSlices,
    MirroredStrategy,
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
CLUSTER = {"worker": ["a:1", "b:1"]}


def both(*components: Any) -> PerReplica[Any]:
    return PerReplica(components)


def reduced(op: Any, value: Any, axis: Any = None) -> Any:
    return lambda s: s.reduce(op, value, axis)


def gathered(value: Any, axis: Any = 0) -> Any:
    return lambda s: s.gather(value, axis)


def reduced_to(destinations: Any, value: Any = ONE) -> Any:
    return lambda s: s.extended.reduce_to("sum", value, destinations)


def paired(pairs: Any) -> Any:
    return lambda s: s.extended.batch_reduce_to("sum", pairs)


def updated(fn: Any, *arguments: Any, variable: Any = None) -> Any:
    return lambda s: s.extended.update(under(s, 1.0, name="w") if variable is None else variable, fn, *arguments)


def variable(initial_value: Any = 0.0, **settings: Any) -> Any:
    return lambda s: under(s, initial_value, **settings)


def assigned(initial: Any, value: Any, method: str = "assign") -> Any:
    return lambda s: getattr(under(s, initial, name="w"), method)(value)


def configured(*settings: Any) -> Any:
    return lambda s: s.configure(None, *settings)


def made(method: str, *arguments: Any) -> Any:
    return lambda s: getattr(s, method)(*arguments)


def numpy(arrays: Any) -> Any:
    return lambda s: s.experimental_make_numpy_dataset(arrays)


async def later(_: Any) -> Any: ...


BAD: list[tuple[Any, type[Exception], str]] = [
    # reduce
    (reduced("AVG", ONE), ValueError, "expected a reduce op"),
    (reduced("SUM", both(1, 2, 3)), ValueError, "expected 2 components, one for each replica, got 3"),
    (
        reduced("SUM", both(np.ones(2), np.ones(3))),
        ValueError,
        r"same type, dtype and shape.*give the axis.*replica 0's is float64\[2\], replica 1's is float64\[3\]",
    ),
    (reduced("SUM", both(np.ones(2), np.ones(2, "f4"))), ValueError, "must have the same type, dtype and shape"),
    (reduced("SUM", both(np.ones(()), np.float64(1))), ValueError, r"is float64\[\], replica 1's is np.float64"),
    (reduced("SUM", both(True, False)), TypeError, "SUM of bool"),
    (reduced("MAX", both(1j, 2j)), TypeError, "MAX of complex"),
    (reduced("SUM", both("a", "b")), TypeError, "got an object of type"),
    (reduced("MEAN", both(*[np.array(["a"])] * 2)), TypeError, "numbers, got strings"),
    (reduced("SUM", TWO, 2), ValueError, "axis must be from -2 to 1"),
    (reduced("SUM", ONE, 0), ValueError, "at least one axis"),
    (reduced("SUM", TWO, (0, -2)), ValueError, "must name each axis once"),
    (reduced("SUM", TWO, 0.5), TypeError, "axis must be an int"),
    (reduced("SUM", both(A, A[:, :2]), 0), ValueError, "may differ along axis 0 only"),
    (reduced("MAX", both(np.zeros(0), np.zeros(0)), 0), ValueError, "MAX along axis .* at least one element"),
    (reduced("SUM", both(np.ones(2), MASKED)), TypeError, "MaskedArray"),
    # gather
    (gathered(TWO, 2), ValueError, "axis must be from -2 to 1"),
    (gathered(ONE), ValueError, r"got a scalar; pass np\.array"),
    (gathered(both(A, A[:, :1])), ValueError, "may differ along axis 0 only"),
    (gathered(both(A, A.astype("f4"))), ValueError, "float64.*float32"),
    (gathered(TWO, None), TypeError, "axis must be an int"),
    (gathered(both(np.ones(2), MASKED)), TypeError, "MaskedArray"),
    # destinations
    (reduced_to("TPU:0"), ValueError, "unknown kind of device"),
    (reduced_to([]), ValueError, "at least one"),
    (reduced_to(both(1, 2, 3)), ValueError, "expected as destination a value with 2 components, got"),
    (reduced_to(Variable(0.0)), ValueError, "expected as destination a value with 2 components, got"),
    (reduced_to("GPU:99"), DeviceNotFoundError, "GPU:99"),
    (reduced_to(None), TypeError, "destinations must be"),
    (reduced_to([7]), TypeError, "7"),
    (lambda s: s.extended.broadcast_to(MASKED, "CPU:0"), TypeError, "MaskedArray"),
    (lambda s: s.extended.broadcast_to(ONE, "CPU:0"), TypeError, "one value for all, got a PerReplica"),
    *((paired(bad), TypeError, r"must be pairs \(value, destinations\), got") for bad in (5, [ONE], [(ONE,)], "ab")),
    # updates
    (updated(print, variable=Variable(1.0)), ReplicaContextError, "was not created under"),
    (updated(print, variable=np.zeros(2)), TypeError, r"expected an aiodist\.Variable"),
    (updated("fn"), TypeError, "expects a function"),
    (updated(print, 1), TypeError, "args must be"),
    (updated(print, (both(1, 2, 3),)), ValueError, "with 2 components"),
    (
        updated(lambda c, x: c.assign(x), (both(1.0, 3.0),)),
        ValueError,
        "mirrored variable 'w' would get different values",
    ),
    (lambda s: s.extended.variable_created_in_scope(3), TypeError, r"expected an aiodist\.Variable"),
    (lambda s: s.colocate_vars_with(Variable(1.0)), ReplicaContextError, "was not created under"),
    # settings
    (lambda _: ReductionToOneDevice(accumulation_fn=len), ValueError, "accumulation_fn must be None"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    (lambda _: MirroredStrategy(1, "nccl"), TypeError, "must be CrossDeviceOps or None, got 'nccl'"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    (lambda _: Strategy(3), TypeError, r"expected a StrategyExtended.*MirroredStrategy"),  # type: ignore[arg-type]
    (lambda s: Strategy(s.extended), ValueError, "already"),
    (lambda _: StrategyExtended(("CPU:0", "cpu:0")), ValueError, "twice"),
    (lambda _: StrategyExtended(("CPU:0",), 3), TypeError, "communication_options must be"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    (lambda _: MirroredStrategy(1, order_check="never"), ValueError, "order_check must be one of"),
    (lambda _: StrategyExtended(("CPU:0",)).reduce_to("sum", 1, "CPU:0"), ValueError, "needs a strategy"),
    (lambda _: experimental_set_strategy(MirroredStrategy), TypeError, "expected a strategy or None"),  # type: ignore[arg-type]
    (configured(CLUSTER, None, None), ValueError, "given together"),
    (configured(CLUSTER, "chief", 0), ValueError, "must name a task of"),
    (configured(CLUSTER, "worker", 2), ValueError, "must name a task of"),
    (configured(["a:1"], "worker", 0), TypeError, "cluster_spec must map"),
    (configured(CLUSTER, "worker", 1), ValueError, "for one process; MultiWorkerMirroredStrategy is for"),
    (lambda s: s.update_config_proto(None), TypeError, "expects a mapping"),
    (lambda s: s.warmup(["text"]), TypeError, "got an object of type builtins.str"),
    (lambda s: s.warmup(np.ones(2, bool)), TypeError, "bool"),
    # variables
    (variable(1.5, dtype=np.int32), TypeError, "fit int32, got float64"),
    (variable(aggregation="median"), ValueError, "VariableAggregation must be one of 'none', 'sum'"),
    (variable(synchronization="none"), ValueError, "synchronization NONE"),
    (variable(0, aggregation="mean"), ValueError, "MEAN needs a variable of floating-point"),
    (variable(False, aggregation="sum"), TypeError, "SUM of bool"),
    (variable(name=""), ValueError, "name must"),
    (variable(MASKED), TypeError, "a MaskedArray for a variable"),
    (assigned(np.zeros(2), MASKED, "assign_add"), TypeError, "a MaskedArray for a variable"),
    (assigned(np.zeros(2), 1.0), ValueError, "nothing is broadcast"),
    (assigned(np.zeros(2), np.zeros((1, 2))), ValueError, "nothing is broadcast"),
    (assigned(np.zeros(2, np.float32), [1j, 0]), TypeError, "fit float32, got complex128"),
    (assigned(np.uint8(0), 256), OverflowError, "256"),
    (assigned(np.int8(0), 2**63), OverflowError, "too large"),
    (assigned(np.uint8(0), 1.0), TypeError, "fit uint8, got float64"),
    (assigned(np.uint8(0), np.int64(1)), TypeError, "fit uint8, got int64"),
    (
        assigned(0.0, both(1.0, 2.0)),
        ValueError,
        "mirrored variable 'w' would get different values: replica 1's is not replica 0's",
    ),
    (assigned(0.0, PerReplica([1.0] * 3)), ValueError, "2 components, one for each replica, got a PerReplica with 3"),
    (lambda s: under(s, 1.0, synchronization="on_read").read_value(), ValueError, "aggregation NONE"),
    *(
        (give, TypeError, rf"{what} expects an array of numbers, or a number, got")
        for no_number in (None, "ab", object(), ["a", "b"], np.array(["2026"], "datetime64[Y]"))
        for give, what in [(variable(no_number), "a variable"), (assigned(np.zeros(2), no_number), "the variable 'w'")]
    ),
    # data
    (made("experimental_distribute_dataset", None), TypeError, "expected an iterable or async iterable of batches"),
    (made("experimental_distribute_dataset", [], "fast"), TypeError, "options must be None"),
    (made("distribute_datasets_from_function", lambda _: None), TypeError, "expected an iterable or async iterable"),
    (made("distribute_datasets_from_function", []), TypeError, "dataset_fn must be a function of one InputContext"),
    (made("distribute_datasets_from_function", later), TypeError, "dataset_fn must be a plain function, got the corou"),
    (made("experimental_distribute_values_from_function", later), TypeError, "value_fn must be a plain function"),
    (made("experimental_make_numpy_dataset", np.zeros(2), "s"), TypeError, "session must be None"),
    (numpy((np.zeros(2), np.zeros(3))), ValueError, r"numpy_input\[0\] has 2, numpy_input\[1\] has 3"),
    (numpy(np.zeros(())), ValueError, "numpy_input must have a first axis"),
    (numpy({"x": [1, 2]}), TypeError, r"numpy_input\['x'\]\[0\] must be an array"),
    (numpy({}), ValueError, "must hold arrays.* there are none"),
    (lambda _: NumpyDataset(np.zeros(2)).shuffle(-1), ValueError, "seed must be at least 0, got -1"),
    (lambda _: NumpyDataset(np.zeros(2)).shuffle(None), TypeError, "interpreted as an integer"),  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    (lambda _: NumpyDataset(np.zeros(2)).repeat().batch(2).shuffle(0), ValueError, r"shuffle\(seed\) before \.repeat"),
    (lambda _: NumpyDataset(np.zeros(2)).batch(0), ValueError, "n must be at least 1, got 0"),
    (lambda _: NumpyDataset(np.zeros(2)).repeat(-1), ValueError, "k must be at least 0, got -1"),
    (lambda _: NumpyDataset(np.zeros(2)).prefetch(0), ValueError, "k must be at least 1, got 0"),
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
