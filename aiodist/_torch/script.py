"""A script on its ranks: each runs it as ``__main__``, in a thread of its own, and what came of it."""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

from aiodist._checking.schedule import LastFirst, Order, Random, Replayed, Schedule
from aiodist._core.errors import CollectiveError
from aiodist._core.report import ReplicaState
from aiodist._core.text import ids
from aiodist._torch import private, store
from aiodist._torch.cpu import Door
from aiodist._torch.private import torch
from aiodist._torch.process import Process, folder_of
from aiodist._torch.ranks import Ranks
from aiodist._torch.wording import in_ranks
from aiodist._torch.wording import ranks as ranks_text
from aiodist._torch.world import Job, is_plumbing


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be run, and how.

    Attributes:
        script: the file.
        arguments: its own, as on its command line.
        ranks: on how many ranks.
        seed: of the schedule.
        number: which of the schedules that the seed gives.
        changes: the schedule itself instead, as text; None for the numbered one.
        seconds: how long it may take.
        cpu: whether CUDA devices are taken for the CPU.
    """

    script: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    seed: int = 0
    number: int = 0
    changes: str | None = None
    seconds: float = 300.0
    cpu: bool = False

    def order(self) -> Order:
        """Return who goes on at each point: by default the first, then the last, then at random."""
        if self.changes is not None:
            return Replayed(Schedule.parse(self.changes).changes)
        if self.number < 2:
            return LastFirst() if self.number else Order()
        return Random(random.Random(f"{self.seed} {self.number}"))  # noqa: S311  (a schedule is no secret)


@dataclass(slots=True)
class Outcome:
    """How a run of a script ended; everything in it is what JSON has.

    Attributes:
        kind: ``agreed``, ``disagreed``, ``failed`` (an exception of the script's own), ``exited`` (with another code
            than 0), ``timeout`` or ``crashed``.
        text: what a person is to read of it.
        report: the report of ranks that disagreed, as a dict; None where there is none.
        collectives: how many were completed.
        points: how many there were at which another rank could have gone on.
        schedule: how to repeat it.
        notes: what was taken for what, and what else a person should know.
    """

    kind: str
    text: str = ""
    report: dict[str, Any] | None = None
    collectives: int = 0
    points: int = 0
    schedule: str = "0/"
    notes: list[str] = field(default_factory=list)


class _Ended(BaseException):
    """A rank has ended its process."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class _Run:
    """One run of a script."""

    def __init__(self, request: Request, on_switch: Callable[[int], object]) -> None:
        self.request = request
        self.script = Path(request.script)
        self.job = Job(request.ranks, self.script.name)
        self.errors: dict[int, BaseException] = {}
        self.process = Process(
            request.ranks, [request.script, *request.arguments], self._environment, self._current, self._sleep
        )  # fmt: skip

        def switch(leaves: int | None, enters: int) -> None:
            self.process.switch(leaves, enters)
            on_switch(enters)

        self.ranks = self.job.ranks = Ranks(request.ranks, request.order(), switch, self.job.stuck)
        self.code: CodeType
        self.door: Door | None = None

    def _current(self) -> int | None:
        return self.ranks.current()

    def _sleep(self, seconds: float) -> None:
        self.ranks.sleep(seconds)

    def run(self) -> Outcome:
        """Run it."""
        try:
            self.code = compile(self.script.read_bytes(), str(self.script), "exec")
        except (SyntaxError, ValueError) as error:
            return Outcome("failed", "".join(traceback.format_exception_only(error)).rstrip())
        private.isolate_threads()
        store.install(lambda: self.job)
        self._take_over()
        if self.request.cpu:
            self.door = Door(self.request.ranks, self.job.rank)
        sys.path.insert(0, folder_of(self.script))
        in_time = self.ranks.run(self._main, self.request.seconds)
        if in_time:
            self.job.finish()
        outcome = self._outcome() if in_time else Outcome("timeout", self._where())
        outcome.collectives, outcome.points = self.job.collectives, self.ranks.points
        outcome.notes = self.door.notes() if self.door is not None else []
        outcome.schedule = str(Schedule(self.request.seed, tuple(self.ranks.changes)))
        return outcome

    def _environment(self, rank: int) -> dict[str, str]:
        size = str(self.request.ranks)
        own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
        return {
            **own, **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), size), "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        }  # fmt: skip

    def _take_over(self) -> None:
        """Take what a script does to its process as done by a rank."""
        leave = os._exit

        def exit_here(code: int) -> None:
            if self.ranks.owns_thread():
                raise _Ended(code)
            leave(code)

        os._exit = exit_here  # type: ignore[assignment]
        torch.multiprocessing.spawn = torch.multiprocessing.start_processes = self._spawn

    def _spawn(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, *_: Any, **__: Any) -> None:
        """Let each rank be the process that its own script would start for it."""
        if nprocs != self.request.ranks:
            raise RuntimeError(f"the script starts {nprocs} processes: run aiodist check with --ranks {nprocs}")
        fn(self.job.rank(), *args)

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
            except (SystemExit, _Ended) as end:
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
        error = self.job.error
        if own:
            return self._failed(own)
        if self.ranks.refused:
            return Outcome("failed", f"NotImplementedError: {self.ranks.refused}")
        if error is not None:
            report = in_ranks(error.report)
            return Outcome("disagreed", f"{type(error).__name__}: {report}", report.to_dict())
        return Outcome("agreed")

    def _failed(self, errors: dict[int, BaseException]) -> Outcome:
        """Tell the first error of the script's own whole, the others in a line each, and then who waited."""
        error = next(iter(errors.values()))
        exits = isinstance(error, (SystemExit, _Ended))
        text = f"exit code {error.code}" if exits else "".join(_program_traceback(error)).rstrip()  # type: ignore[attr-defined]
        alike = [each for each, other in errors.items() if (type(other), str(other)) == (type(error), str(error))]
        who = f"This was {ranks_text(ids(alike))} of {self.request.ranks}."
        lines = [text, who]
        lines += [
            f"rank {each}: {type(other).__name__}: {other}" for each, other in errors.items() if each not in alike
        ]
        report = None
        if ("CUDA" in text or "accelerator" in text) and not self.request.cpu:
            lines.append("With --cpu, CUDA devices are taken for the CPU.")
        if self.job.error is not None:
            found = in_ranks(self.job.error.report)
            lines.append(found.text)
            report = found.to_dict()
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
    """Yield a traceback without our own frames at its beginning."""
    found = traceback.TracebackException.from_exception(error)
    while found.stack and is_plumbing(found.stack[0].filename):
        del found.stack[0]
    return found.format()


def run_script(request: Request, on_switch: Callable[[int], object] = lambda _: None) -> Outcome:
    """Run a script on its ranks, in this process, which is of no other use then.

    Args:
        request: what is to be run.
        on_switch: is called with the rank that goes on, whenever another one does.
    """
    return _Run(request, on_switch).run()
