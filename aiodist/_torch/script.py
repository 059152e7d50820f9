"""A script on its ranks: each runs it as ``__main__``, in a thread of its own, and what came of it."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from aiodist._checking.schedule import Order, Schedule
from aiodist._core.errors import CollectiveError
from aiodist._core.report import ReplicaState
from aiodist._core.text import ids
from aiodist._torch.cpu import Door
from aiodist._torch.group import install
from aiodist._torch.job import Job, is_plumbing
from aiodist._torch.private import torch
from aiodist._torch.process import Ended, Process

_OWN = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be run, and how: schedules are those that the seed gives, or the one to replay.

    With `cpu`, CUDA devices are taken for the CPU.
    """

    script: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    seed: int = 0
    replay: Schedule | None = None
    seconds: float = 300.0
    cpu: bool = False


@dataclass(slots=True)
class Outcome:
    """How a run of a script ended; everything in it is what JSON has.

    Attributes:
        kind: ``agreed``, ``disagreed``, ``failed`` (an exception of the script's own), ``exited`` (with another code
            than 0), ``timeout`` or ``crashed``.
        text: what a person is to read of it.
        report: of ranks that disagreed, as a dict.
        collectives: how many were completed.
        points: how many there were at which another rank could have gone on.
        schedule: how to repeat it.
        notes: what else a person should know.
    """

    kind: str
    text: str = ""
    report: dict[str, Any] | None = None
    collectives: int = 0
    points: int = 0
    schedule: str = "0/"
    notes: list[str] = field(default_factory=list)

    @property
    def like(self) -> tuple[object, ...]:
        """What makes two failures the same: the kind, the reason of a report, and the error."""
        reason = None if self.report is None else self.report["reason"]
        return self.kind, reason, self.kind == "disagreed" or self.text.partition("\nOn rank")[0]


class ScriptRun:
    """One run of a script on its ranks, in a process that is of no other use then."""

    def __init__(self, request: Request, order: Order, on_switch: Callable[[int], object]) -> None:
        self.request = request
        self.script = Path(request.script)
        self.seed = request.seed if request.replay is None else request.replay.seed
        self.errors: dict[int, BaseException] = {}
        self.code: CodeType
        self.door: Door | None = None

        def switch(leaves: int | None, enters: int) -> None:
            self.process.switch(leaves, enters)
            on_switch(enters)

        self.job = Job(request.ranks, self.script.name, order, switch)
        self.ranks = self.job.ranks
        self.process = Process(self.ranks, [request.script, *request.arguments], self._environment, self.seed)

    def run(self) -> Outcome:
        """Run it."""
        try:
            self.code = compile(self.script.read_bytes(), str(self.script), "exec")
        except (SyntaxError, ValueError) as error:
            return Outcome("failed", "".join(traceback.format_exception_only(error)).rstrip())
        install(self.job)
        if self.request.cpu:
            self.door = Door(self.request.ranks, self.job.rank)
        sys.path[:] = [str(self.script.resolve().parent), *(path for path in sys.path if path)]
        in_time = self.ranks.run(self._main, self.request.seconds)
        if in_time:
            self.job.finish()
        outcome = self._outcome() if in_time else Outcome("timeout", self._where())
        outcome.collectives, outcome.points = self.job.collectives, self.ranks.points
        outcome.notes = self.door.notes() if self.door is not None else []
        outcome.schedule = str(Schedule(self.seed, tuple(self.ranks.changes)))
        return outcome

    def _environment(self, rank: int) -> dict[str, str]:
        """Return what `torchrun` sets for a rank."""
        size = str(self.request.ranks)
        return {
            **dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size), "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        }  # fmt: skip

    # One rank.

    def _main(self, rank: int) -> None:
        main = self.process.main_of(rank)
        main.__dict__.update(__file__=str(self.script), __builtins__=__builtins__)
        torch.autograd.set_multithreading_enabled(False)
        self.job.begin(rank)
        state = ReplicaState.EXITED
        try:
            try:
                with self.door.mode() if self.door is not None else nullcontext():
                    exec(self.code, main.__dict__)  # noqa: S102  (it is what the person wants run)
            except (SystemExit, Ended) as end:
                if end.code not in {None, 0}:
                    raise
            self.job.settle(rank)
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is how the rank ended)
            state = ReplicaState.FAILED
            self.errors[rank] = error
        self.job.end(rank, state, self.errors.get(rank))

    # How it ended.

    def _outcome(self) -> Outcome:
        own = {rank: each for rank, each in sorted(self.errors.items()) if not isinstance(each, CollectiveError)}
        if own:
            return self._failed(own)
        if self.ranks.refused:
            return Outcome("failed", f"NotImplementedError: {self.ranks.refused}")
        error = self.job.error
        if error is not None:
            return Outcome("disagreed", f"{type(error).__name__}: {error.report}", error.report.to_dict())
        return Outcome("agreed")

    def _failed(self, errors: dict[int, BaseException]) -> Outcome:
        """Tell the first error of the script's own whole, the others in a line each, and then who waited."""
        error = next(iter(errors.values()))
        exits = isinstance(error, (SystemExit, Ended))
        text = f"exit code {error.code}" if exits else "".join(_program_traceback(error)).rstrip()  # type: ignore[attr-defined]
        alike = [each for each, other in errors.items() if (type(other), str(other)) == (type(error), str(error))]
        lines = [text, f"On {ids(alike, 'rank')} of {self.request.ranks}."]
        lines += [
            f"rank {each}: {type(other).__name__}: {other}" for each, other in errors.items() if each not in alike
        ]
        report = None
        if any(word in text for word in ("CUDA", "NVIDIA", "accelerator")) and not self.request.cpu:
            lines.append("With --cpu, CUDA devices are taken for the CPU.")
        if self.job.error is not None:
            lines.append(self.job.error.report.text)
            report = self.job.error.report.to_dict()
        return Outcome("exited" if exits else "failed", "\n".join(lines), report)

    def _where(self) -> str:
        lines = [f"the ranks had not ended after {self.request.seconds:g} s:"]
        for facts in self.job.facts():
            at = facts.stack[-1] if facts.stack else None
            where = "has ended" if facts.end is not None else f"at {at.file}:{at.line}" if at is not None else "running"
            runs = "> " if facts.replica_id == self.ranks.holder else "  "
            lines.append(f"{runs}rank {facts.replica_id}  {where}")
        return "\n".join(lines)


def _program_traceback(error: BaseException) -> Iterator[str]:
    """Yield a traceback without our own frames, and without others' at its beginning."""
    found = traceback.TracebackException.from_exception(error)
    found.stack[:] = (frame for frame in found.stack if not frame.filename.startswith(_OWN))
    while found.stack and is_plumbing(found.stack[0].filename):
        del found.stack[0]
    return found.format()
