"""Pairs of calls that are not the same collective, and the reason that a report must give for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from aiodist import CollectiveHandle, Reason, ReplicaContext

Call = Callable[[ReplicaContext], CollectiveHandle[Any]]
zeros = partial(np.zeros, dtype="f4")
X = zeros(3)
WIDE = zeros((960, 960))


class Divergence(NamedTuple):
    """What most replicas call, what the odd one calls, what differs first, and words that the account must contain."""

    reason: Reason
    usual: Call
    odd: Call
    words: str = ""


DIVERGENCES = {
    "kind": Divergence(
        Reason.KIND, lambda c: c.all_gather(WIDE, 0), lambda c: c.all_to_all(WIDE), "all_gather(float32[*, 960]"
    ),
    "kind before all else": Divergence(
        Reason.KIND, lambda c: c.all_reduce("SUM", X, name="a"), lambda c: c.broadcast({"x": zeros(2)}, name="b")
    ),
    "reduce op": Divergence(
        Reason.REDUCE_OP, lambda c: c.reduce_scatter("SUM", WIDE), lambda c: c.reduce_scatter("max", WIDE), "MAX"
    ),
    "axis of a scatter": Divergence(
        Reason.AXIS, lambda c: c.reduce_scatter("SUM", WIDE), lambda c: c.reduce_scatter("SUM", WIDE, axis=-1)
    ),
    "split axis": Divergence(
        Reason.AXIS, lambda c: c.all_to_all(WIDE), lambda c: c.all_to_all(WIDE, split_axis=1), "split_axis=1"
    ),
    "concat axis": Divergence(
        Reason.AXIS, lambda c: c.all_to_all(WIDE), lambda c: c.all_to_all(WIDE, concat_axis=1), "concat_axis=1"
    ),
    "list and tuple": Divergence(
        Reason.STRUCTURE, lambda c: c.all_reduce("SUM", [X]), lambda c: c.all_reduce("SUM", (X,)), "value"
    ),
    "value and nest": Divergence(
        Reason.STRUCTURE, lambda c: c.all_reduce("SUM", X), lambda c: c.all_reduce("SUM", [X]), "a nest on replica 1"
    ),
    "another key": Divergence(
        Reason.STRUCTURE, lambda c: c.all_reduce("SUM", {"w": X}), lambda c: c.all_reduce("SUM", {"v": X}), "value['v']"
    ),
    "a key more": Divergence(
        Reason.STRUCTURE,
        lambda c: c.all_reduce("SUM", {"w": X}),
        lambda c: c.all_reduce("SUM", {"w": X, "b": {"x": X}}),
        "value['b']['x'] is on replica 1 only",
    ),
    "size": Divergence(
        Reason.SHAPE, lambda c: c.all_reduce("SUM", X), lambda c: c.all_reduce("SUM", zeros(4)), "float32[4]"
    ),
    "rank": Divergence(Reason.SHAPE, lambda c: c.all_reduce("SUM", X), lambda c: c.all_reduce("SUM", X[None])),
    "size across the axis of a gather": Divergence(
        Reason.SHAPE, lambda c: c.all_gather(zeros((2, 3)), 0), lambda c: c.all_gather(zeros((2, 4)), 0), "[*, 4]"
    ),
    "rank of a gather along the last axis": Divergence(
        Reason.SHAPE, lambda c: c.all_gather(zeros((2, 3)), -1), lambda c: c.all_gather(X, -1)
    ),
    "signedness": Divergence(
        Reason.DTYPE, lambda c: c.broadcast([X.view("i4")]), lambda c: c.broadcast([X.view("u4")]), "uint32[3]"
    ),
    "type of a Python number": Divergence(
        Reason.DTYPE, lambda c: c.all_reduce("SUM", 1), lambda c: c.all_reduce("SUM", 1.0), "float"
    ),
    "NumPy's and Python's number": Divergence(
        Reason.DEVICE, lambda c: c.all_reduce("SUM", np.float64(0)), lambda c: c.all_reduce("SUM", 0.0)
    ),
    "name and none": Divergence(
        Reason.NAME, lambda c: c.all_reduce("SUM", X), lambda c: c.all_reduce("SUM", X, name="sum")
    ),
    "merge functions of one name": Divergence(
        Reason.MERGE_FN,
        lambda c: c.merge_call(lambda strategy: None),
        lambda c: c.merge_call(lambda strategy: 1),
        "divergences.py:",
    ),
    "call site": Divergence(
        Reason.CALL_SITE, lambda c: c.barrier(), lambda c: c.barrier(), "give both calls the same name="
    ),
}
"""The ways beside those that are among the programs of test_golden."""
