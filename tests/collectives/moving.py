"""Workers in a plain loop: what each of them exchanges is moved between arrays, in ranges of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist._collectives.transfers import Exchange, Gathering, Members, Reduction
from aiodist._collectives.workers import WorkerPlan

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from aiodist._collectives.kinds import Collective


def over_workers(
    collective: Collective, ids: Sequence[Sequence[int]], values: Sequence[Any], dice: random.Random, **options: Any
) -> list[Any]:
    """Return what every replica gets, by position.

    Args:
        collective: what they ask for.
        ids: by worker, the positions of its replicas.
        values: by position, what each brings.
        dice: how transfers are cut.
        **options: of `WorkerPlan`.
    """
    members = [Members(rank, tuple(map(tuple, ids))) for rank in range(len(ids))]
    plans = [WorkerPlan(collective, each, **options) for each in members]
    crossings = [plan.begin([values[i] for i in own]) for plan, own in zip(plans, ids, strict=True)]
    for transfers in zip(*(crossing.transfers for crossing in crossings), strict=True):
        move(transfers, dice)
    for transfers in zip(*(crossing.further for crossing in crossings), strict=True):
        move(transfers, dice)
    results: dict[int, Any] = {}
    for plan, crossing, own in zip(plans, crossings, ids, strict=True):
        result = plan.hand_out(crossing.result())
        results.update(zip(own, [result] * len(own) if plan.shared else result, strict=True))
    return [results[i] for i in range(len(values))]


def move(transfers: Sequence[Any], dice: random.Random) -> None:
    first = transfers[0]
    assert len({type(transfer) for transfer in transfers}) == 1
    if isinstance(first, Reduction):
        reduce(transfers, dice)
    elif isinstance(first, Gathering):
        lengths = [transfer.lengths for transfer in transfers]
        assert [len(each) for each in lengths] == list(first.length_counts)
        parts = [transfer.data() for transfer in transfers]
        assert [len(part) for part in parts] == first.sizes(lengths)
        for rank, transfer in enumerate(transfers):
            whole, at = np.concatenate(parts), 0
            own = []
            for part in parts:
                own.append(whole[at : at + len(part)])
                at += len(part)
            if dice.random() < 0.5:
                own[rank] = parts[rank]  # its own bytes, where they lie
            elif dice.random() < 0.5:
                own = [part.copy() for part in parts]
            transfer.take(lengths, own)
    elif isinstance(first, Exchange):
        sent = [np.split(t.data(), np.cumsum(t.send_counts)[:-1]) for t in transfers]
        assert max(len(part) for parts in sent for part in parts) <= first.most
        for rank, transfer in enumerate(transfers):
            received = [parts[rank] for parts in sent]
            assert [len(part) for part in received] == list(transfer.receive_counts)
            transfer.take(np.concatenate(received))


def reduce(transfers: Sequence[Reduction], dice: random.Random) -> None:
    """Reduce range by range: from where rows lie, or folded; into the room for totals, or elsewhere."""
    size = transfers[0].size
    step = dice.choice([1, 7, max(1, size)])
    for begin in range(0, size, step):
        end = min(begin + step, size)
        rows: list[np.ndarray] = []
        for rank, transfer in enumerate(transfers):
            count = transfer.rows[rank]
            own = transfer.own(begin, end) if count == 1 else None
            if own is None or dice.random() < 0.3:
                own = np.empty(count * (end - begin), transfer.dtype)
                transfer.fold(begin, end, own)
            rows.extend(own.copy().reshape(count, -1))
        total = transfers[0].combine(rows).copy()
        for transfer in transfers:
            room = transfer.room(begin, end)
            if room is None or dice.random() < 0.3:
                room = np.empty_like(total)
            room[...] = total
            transfer.finish(begin, end, room)
