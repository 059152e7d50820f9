"""Plans over workers, for a while: everything is gathered everywhere, and computed as on one machine."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from aiodist._collectives.execution import executor
from aiodist._collectives.kinds import Collective


class Members(NamedTuple):
    rank: int
    ids: tuple[tuple[int, ...], ...]


class Reduction: ...


class Broadcast: ...


class Exchange: ...


class Gathering:
    def __init__(self, crossing: Any, values: Any, members: Members) -> None:
        self._crossing = crossing
        self._data = np.frombuffer(pickle.dumps(values, 5), np.uint8)
        self.lengths = np.array([len(self._data)], np.int64)
        self.length_counts = [1] * len(members.ids)

    def sizes(self, lengths: Any) -> list[int]:
        return [int(each[0]) for each in lengths]

    def data(self) -> Any:
        return self._data

    def take(self, lengths: Any, parts: Any) -> None:
        self._crossing.told = [pickle.loads(part) for part in parts]


Transfer = Reduction | Broadcast | Exchange | Gathering


class Crossing:
    def __init__(self, plan: WorkerPlan, values: Sequence[Any]) -> None:
        self._plan = plan
        members = plan.members
        self.told: Any = None
        self.transfers = [Gathering(self, dict(zip(members.ids[members.rank], values)), members)]

    def result(self) -> Any:
        plan = self._plan
        by_id = {i: v for told in self.told for i, v in told.items()}
        ids = sorted(by_id)
        made = executor(plan.collective, len(ids), (), plan.accumulate)
        result = made.run([by_id[i] for i in ids])
        if hasattr(result, "carry_out"):
            result = result.carry_out()
        if made.shared:
            return result
        own = plan.members.ids[plan.members.rank]
        return [result[ids.index(i)] for i in own]


class WorkerPlan:
    def __init__(self, collective: Collective, members: Members, accumulate: Any) -> None:
        self.collective, self.members, self.accumulate = collective, members, accumulate
        self.shared = collective.kind.shared
        self.folded = False

    def begin(self, values: Sequence[Any]) -> Crossing:
        return Crossing(self, values)

    def hand_out(self, result: Any) -> Any:
        return result


@lru_cache(maxsize=1024)
def worker_plan(
    collective: Collective, members: Members, accumulate: Any = "native", ordered: bool = False
) -> WorkerPlan:
    return WorkerPlan(collective, members, accumulate)
