"""Workers in a plain loop: what each of them exchanges is moved between arrays, in ranges of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiodist._collectives.workers import Members, Rows, Transfer, WorkerPlan

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
        values: by position, what each contributes.
        dice: how transfers are cut.
        **options: of `WorkerPlan`.
    """
    members = [Members(rank, tuple(map(tuple, ids))) for rank in range(len(ids))]
    plans = [WorkerPlan(collective, each, **options) for each in members]
    transfers = [Transfer(plan, [values[i] for i in own]) for plan, own in zip(plans, ids, strict=True)]
    move(transfers, dice)
    results: dict[int, Any] = {}
    for plan, transfer, own in zip(plans, transfers, ids, strict=True):
        result = plan.hand_out(transfer.result())
        results.update(zip(own, [result] * len(own) if plan.shared else result, strict=True))
    return [results[i] for i in range(len(values))]


def move(transfers: Sequence[Transfer], dice: random.Random) -> None:
    """Move what workers have to exchange."""
    for rows in zip(*(transfer.rows for transfer in transfers), strict=True):
        reduce(rows, dice)
    if transfers[0].plan.pieces:
        for transfer, data in zip(transfers, exchange(transfers), strict=True):
            transfer.take_parts(data)
    for rank, transfer in enumerate(transfers):
        everyone = [[list(map(_copy, row)) for row in each.given] for each in transfers]
        if dice.random() < 0.5:
            everyone[rank] = transfer.given  # its own, where they lie
        if transfer.plan.on_one_machine is not None:
            transfer.take_gathered(transfer.plan.on_one_machine.run_into(transfer.all_values(everyone)))


def _copy(value: Any) -> Any:
    """Return a value as it comes from another worker: arrays in this machine's byte order."""
    return np.array(value, value.dtype.newbyteorder("="), order="C") if isinstance(value, np.ndarray) else value


def exchange(transfers: Sequence[Transfer]) -> list[np.ndarray]:
    """Return what each worker receives."""
    sent = [np.split(each.parts(), np.cumsum(each.plan.counts)[:-1]) for each in transfers]
    assert max(len(part) for parts in sent for part in parts) <= transfers[0].plan.most
    found = []
    for rank, each in enumerate(transfers):
        received = [parts[rank] for parts in sent]
        assert [len(part) for part in received] == each.plan.counts
        found.append(np.concatenate(received))
    return found


def reduce(everyone: Sequence[Rows], dice: random.Random) -> None:
    """Reduce range by range: from where rows lie, or folded; into the room for totals, or elsewhere."""
    reduction = everyone[0].reduction
    size = reduction.size
    step = dice.choice([1, 7, max(1, size)])
    for begin in range(0, size, step):
        end = min(begin + step, size)
        found: list[np.ndarray] = []
        for rank, rows in enumerate(everyone):
            count = reduction.rows_of(rank)
            own = rows.own(begin, end) if count == 1 else None
            if own is None or dice.random() < 0.3:
                own = np.empty(count * (end - begin), reduction.dtype)
                rows.fold(begin, end, own)
            found.extend(own.copy().reshape(count, -1))
        total = reduction.combine(found).copy()
        for rows in everyone:
            room = rows.room(begin, end)
            room[...] = total
            rows.finish(begin, end, room)
