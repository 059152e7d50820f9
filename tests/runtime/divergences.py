"""Pairs of calls that are not the same collective, and the reason that a report must give for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from aiodist import CollectiveHandle, Reason, ReduceOp, ReplicaContext

Call = Callable[[ReplicaContext], CollectiveHandle[Any]]
SUM, MAX = ReduceOp.SUM, ReduceOp.MAX


class Divergence(NamedTuple):
    """What most replicas call, what the odd one calls, what differs first, and words that the account must contain."""

    reason: Reason
    usual: Call
    odd: Call
    words: str = ""


def zeros(*shape: int, dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype)


def first_merge(strategy: Any, *values: Any) -> None:
    pass


def second_merge(strategy: Any, *values: Any) -> None:
    pass


DIVERGENCES = {
    "kind": Divergence(Reason.KIND, lambda c: c.all_reduce(SUM, zeros(3)), lambda c: c.barrier(), "barrier()"),
    "kind with equal arguments": Divergence(
        Reason.KIND, lambda c: c.all_gather(zeros(6), 0), lambda c: c.all_to_all(zeros(6)), "all_gather(float32[*]"
    ),
    "kind before all else": Divergence(
        Reason.KIND,
        lambda c: c.all_reduce(SUM, zeros(3), name="a"),
        lambda c: c.broadcast({"x": zeros(2, dtype=np.int8)}, name="b"),
    ),
    "reduce op": Divergence(
        Reason.REDUCE_OP, lambda c: c.all_reduce(SUM, zeros(3)), lambda c: c.all_reduce(MAX, zeros(3)), "MAX"
    ),
    "reduce op of a scatter": Divergence(
        Reason.REDUCE_OP,
        lambda c: c.reduce_scatter(SUM, zeros(0, 960)),
        lambda c: c.reduce_scatter("max", zeros(0, 960)),
    ),
    "axis of a scatter": Divergence(
        Reason.AXIS,
        lambda c: c.reduce_scatter(SUM, zeros(960, 960)),
        lambda c: c.reduce_scatter(SUM, zeros(960, 960), axis=-1),
    ),
    "split axis": Divergence(
        Reason.AXIS,
        lambda c: c.all_to_all(zeros(960, 960)),
        lambda c: c.all_to_all(zeros(960, 960), split_axis=1),
        "split_axis=1",
    ),
    "concat axis": Divergence(
        Reason.AXIS,
        lambda c: c.all_to_all(zeros(960, 1)),
        lambda c: c.all_to_all(zeros(960, 1), concat_axis=1),
        "concat_axis=1",
    ),
    "list and tuple": Divergence(
        Reason.STRUCTURE, lambda c: c.all_reduce(SUM, [zeros(3)]), lambda c: c.all_reduce(SUM, (zeros(3),)), "value"
    ),
    "value and nest": Divergence(
        Reason.STRUCTURE,
        lambda c: c.all_reduce(SUM, zeros(3)),
        lambda c: c.all_reduce(SUM, [zeros(3)]),
        "a nest on replica 1",
    ),
    "another key": Divergence(
        Reason.STRUCTURE,
        lambda c: c.all_reduce(SUM, {"w": zeros(3)}),
        lambda c: c.all_reduce(SUM, {"v": zeros(3)}),
        "value['v'] is on replica 1 only",
    ),
    "a key more": Divergence(
        Reason.STRUCTURE,
        lambda c: c.all_reduce(SUM, {"w": zeros(3)}),
        lambda c: c.all_reduce(SUM, {"w": zeros(3), "b": {"x": zeros(1)}}),
        "value['b']['x'] is on replica 1 only",
    ),
    "arguments of a merge": Divergence(
        Reason.STRUCTURE,
        lambda c: c.merge_call(first_merge, (1,)),
        lambda c: c.merge_call(first_merge, (1, 2)),
        "1 positional argument on replicas 0 and 2, 2 on replica 1",
    ),
    "size": Divergence(
        Reason.SHAPE,
        lambda c: c.all_reduce(SUM, zeros(3)),
        lambda c: c.all_reduce(SUM, zeros(4)),
        "float32[4]",
    ),
    "rank": Divergence(Reason.SHAPE, lambda c: c.all_reduce(SUM, zeros(3)), lambda c: c.all_reduce(SUM, zeros(1, 3))),
    "size across the axis of a gather": Divergence(
        Reason.SHAPE, lambda c: c.all_gather(zeros(2, 3), 0), lambda c: c.all_gather(zeros(2, 4), 0), "float32[*, 4]"
    ),
    "rank of a gather along the last axis": Divergence(
        Reason.SHAPE, lambda c: c.all_gather(zeros(2, 3), -1), lambda c: c.all_gather(zeros(3), -1)
    ),
    "size inside a nest": Divergence(
        Reason.SHAPE,
        lambda c: c.all_reduce(SUM, {"w": [zeros(2), zeros(3)]}),
        lambda c: c.all_reduce(SUM, {"w": [zeros(2), zeros(5)]}),
        "at value['w'][1]: float32[3] on",
    ),
    "signedness": Divergence(
        Reason.DTYPE,
        lambda c: c.broadcast([zeros(3, dtype=np.int32)]),
        lambda c: c.broadcast([zeros(3, dtype=np.uint32)]),
        "uint32[3]",
    ),
    "type of a Python number": Divergence(
        Reason.DTYPE, lambda c: c.all_reduce(SUM, 1), lambda c: c.all_reduce(SUM, 1.0), "float"
    ),
    "NumPy's and Python's number": Divergence(
        Reason.DEVICE, lambda c: c.all_reduce(SUM, np.float64(0)), lambda c: c.all_reduce(SUM, 0.0)
    ),
    "name and none": Divergence(
        Reason.NAME, lambda c: c.all_reduce(SUM, zeros(3)), lambda c: c.all_reduce(SUM, zeros(3), name="sum")
    ),
    "merge functions of one name": Divergence(
        Reason.MERGE_FN,
        lambda c: c.merge_call(lambda strategy: None),
        lambda c: c.merge_call(lambda strategy: 1),
        "divergences.py:",
    ),
    "call site": Divergence(
        Reason.CALL_SITE,
        lambda c: c.all_reduce(SUM, zeros(3)),
        lambda c: c.all_reduce(SUM, zeros(3)),
        "give both calls the same name=",
    ),
    "call site of a barrier": Divergence(Reason.CALL_SITE, lambda c: c.barrier(), lambda c: c.barrier()),
}
