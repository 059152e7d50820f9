"""Opening a run with all workers: which lane it takes, and whether it has the use of NCCL.

Both are agreed on in the record that opens it, in which each worker says what it has free. A lane that is new to them,
and a link of NCCL's, are made behind it, before anybody else has a turn at lane 0: so all make them in one order.
"""

from __future__ import annotations

from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Final, TypeVar

from anyio import CancelScope

from aiodist.collective.signature import Signature
from aiodist.collective.spanned import SpannedGroup
from aiodist.replica.awaiting import InterruptedStep, complete
from aiodist.replica.crossing import Crossing
from aiodist.vocabulary.options import CommunicationOptions
from aiodist.workers.communicator import Communicator
from aiodist.workers.lane import Lane
from aiodist.workers.record import ALL_FREE
from aiodist.workers.transfers import Steps

if TYPE_CHECKING:
    from aiodist.replica.team import Team
    from aiodist.workers.nccl_plane import Use

T = TypeVar("T")

_MOST_RUNS: Final = 63
_NCCL: Final = 1 << 0
"""Among free lanes: NCCL is free. Lane 0 is for what is called outside of replicas, and never free."""


async def open_run(
    team: Team,
    signature: Signature,
    code: CodeType,
    offset: int,
    group: SpannedGroup,
    options: CommunicationOptions | None,
) -> Crossing:
    """Begin a run with all workers; return its crossing.

    Raises:
        CollectiveError: the workers do not meet in it.
        RuntimeError: too many runs at a time; NCCL is demanded, and cannot link the workers.
    """
    async with team._turn(signature, code, offset):
        meeting = team.begin(signature, code, offset, None)
        use = None if team._plane is None else team._plane.hold()
        try:
            common = await team._carry(meeting, options, partial(_free, team, use))
            lane = await _lane(team, common & ~_NCCL)
            linked = bool(common & _NCCL) and await _linked(team)
        except BaseException:
            _release(use)
            raise
        team._runs += 1
        lane.begin(team._runs)
        team._in_use.add(lane.index)
        crossing = Crossing(team, lane, group)
        if linked:
            crossing.use = use
        else:
            _release(use)
        return crossing


def _free(team: Team, use: Use | None) -> int:
    """Return what this worker has free: lanes, and NCCL in the place of lane 0."""
    lanes = ALL_FREE & ~sum(1 << index for index in team._in_use)
    return lanes if use is None else lanes | _NCCL


async def _lane(team: Team, free: int) -> Lane:
    """Return the first of the free lanes."""
    if not free:
        raise RuntimeError(f"a strategy on several workers has at most {_MOST_RUNS} runs at a time")
    index = (free & -free).bit_length() - 1
    if index not in team._lanes:
        team._lanes[index] = Lane(await _made(team, _duplicate(team.communicator)), index)
    return team._lanes[index]


def _duplicate(communicator: Communicator) -> Steps[Communicator]:
    duplication = communicator.idup()
    yield duplication
    return duplication.result()


async def _linked(team: Team) -> bool:
    """Return whether NCCL links the workers, after linking them where it does not."""
    assert team._plane is not None
    return await _made(team, team._plane.meet(team.communicator))  # where a worker is lost, the link is ended with it


async def _made(team: Team, steps: Steps[T]) -> T:
    """Carry out steps that all workers make now; return what they return.

    Raises:
        CollectiveError: a worker is lost.
    """
    root = team._root_crossing()
    found: list[T] = []
    try:
        with CancelScope(shield=True):
            found.append(await complete(steps, root._values))
    except InterruptedStep:
        await root.judged.wait()
        team._root_crossing()  # which raises that a worker is lost
        raise
    return found[0]


def _release(use: Use | None) -> None:
    if use is not None:
        use.release()
