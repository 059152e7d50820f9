"""Handing out: the result of a collective, for each replica in arrays of the kind that it brought."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from aiodist._arrays.host import HostType
from aiodist._arrays.leaves import LeafMark
from aiodist.collective.signature import KIND, STRUCTURE, TYPES, Signature


def hand_out(signature: Signature, result: Any, takers: Sequence[int]) -> dict[int, Any]:
    """Return each taker's result, by replica id: a leaf, or a list of leaves for a nest.

    Args:
        signature: what the replicas asked for, with foreign arrays among the leaves.
        result: what the kind of collective computed. Its arrays belong to the takers afterwards.
        takers: the ids of the replicas that take one.
    """
    single = signature[STRUCTURE] is None
    marks: Sequence[LeafMark] = [signature[TYPES]] if single else signature[TYPES]
    rows: Iterable[Sequence[Any]]
    if signature[KIND].shared:
        leaves = [result] if single else result
        rows = zip(*(each(mark, leaf, len(takers)) for mark, leaf in zip(marks, leaves, strict=True)), strict=True)
    else:
        own = [[result[taker]] if single else result[taker] for taker in takers]
        rows = [[each(mark, leaf, 1)[0] for mark, leaf in zip(marks, leaves, strict=True)] for leaves in own]
    return {taker: row[0] if single else list(row) for taker, row in zip(takers, rows, strict=True)}


def each(mark: LeafMark, leaf: Any, count: int) -> list[Any]:
    """Return a leaf of a shared result for so many replicas."""
    return mark.give_each(leaf, count) if isinstance(mark, HostType) else [leaf] * count
