"""What the changes of a schedule do, told while it runs: which task goes before which, and where each of them is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiodist._core.text import shown
from aiodist._runtime.context import ReplicaContext
from aiodist._runtime.current import current
from aiodist._runtime.stacks import await_chain
from aiodist.checking.tasks import member_of

if TYPE_CHECKING:
    from aiodist.checking.loop import Step

_MOST = 8


class Narrator:
    """Tells the story of a schedule's changes."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def __call__(self, _: int, first: Step, instead: Step | None, /) -> None:
        """Note what is done otherwise at a point, if anything is."""
        if instead is None:
            return
        if instead is first:
            self._lines.append(f"{_who(first)} steps aside until nothing else can run, {_where(first)}")
        else:
            self._lines.append(f"{_who(instead)}, {_where(instead)}, goes before {_who(first)}, {_where(first)}")

    def story(self) -> tuple[str, ...]:
        """Return a line for each change; of many, the first."""
        more = len(self._lines) - _MOST
        return (*self._lines[:_MOST], *([f"… and {more} more"] if more > 0 else []))


def _who(step: Step) -> str:
    member = member_of(step.task)
    if member is not None:
        return f"replica {member.replica_id}"
    context = step._context.get(current)  # type: ignore[attr-defined]
    if isinstance(context, ReplicaContext):
        return f"a task of replica {context.replica_id_in_sync_group}"
    return "a task"


def _where(step: Step) -> str:
    places = await_chain(step.task.get_coro())
    return f"at {shown(places[-1])}" if places else "at its start"
