"""A script on its ranks, in a fork of this process, under schedule after schedule until one fails.

Each rank runs the script as ``__main__``, in a thread of its own. A fork finds a process that nothing has used before
it, and a crash inside torch ends the fork alone; where that was stands on standard error. Standard output and error are
the script's.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import random
import shlex
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType
from typing import IO, Any

from aiodist._checking.explore import minimise
from aiodist._checking.schedule import Change, Order, Schedule, at_random, default_order, last_first, replayed
from aiodist._core.errors import CollectiveError
from aiodist._core.terms import ReplicaState
from aiodist._core.text import count, ids, replicas_called
from aiodist._torch.cpu import CudaAsCpu
from aiodist._torch.group import install
from aiodist._torch.job import Job, is_plumbing
from aiodist._torch.private import torch
from aiodist._torch.ranks import Process, exits, replace_functions

if not hasattr(os, "fork"):
    raise ImportError("check --ranks needs an operating system with fork, such as Linux or macOS")

_OWN = str(Path(__file__).parent)
_PATIENCE_SECONDS = 15.0
_LOOK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be run, and how: schedules are those that the seed gives, or the one to replay."""

    script: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    seed: int = 0
    replay: Schedule | None = None
    seconds: float = 300.0
    cpu: bool = False  # CUDA devices are taken for the CPU


@dataclass(slots=True)
class Outcome:
    """How a run of a script ended; everything in it is what JSON has."""

    kind: str  # agreed, disagreed, failed (by an exception), exited (with a code other than 0), timeout, or crashed
    text: str = ""  # what a person is to read of it
    report: dict[str, Any] | None = None  # of ranks that disagreed
    collectives: int = 0  # how many were completed
    points: int = 0  # at how many another rank could have gone on
    schedule: str = "0/"  # how to repeat it
    notes: list[str] = field(default_factory=list)  # what else a person should know

    @property
    def like(self) -> tuple[object, ...]:
        """What makes two failures the same: the kind, the reason of a report, and the error."""
        reason = None if self.report is None else self.report["reason"]
        return self.kind, reason, self.kind == "disagreed" or self.text.partition("\nOn rank")[0]


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of a check: how its last schedule ended, or the one with the fewest changes that ended like it."""

    request: Request
    outcome: Outcome
    schedules: int

    @property
    def text(self) -> str:
        """What a person is to read."""
        outcome, request = self.outcome, self.request
        if outcome.kind == "agreed":
            order = "the given schedule" if request.replay is not None else count(self.schedules, "schedule")
            agreed = f"{request.ranks} ranks agreed in {count(outcome.collectives, 'collective')}, in {order}."
            return "\n".join([agreed, *outcome.notes])
        found = []
        if self.schedules > 1:
            changes = count(len(Schedule.parse(outcome.schedule).changes), "change")
            order = f"with {changes} to the default order, in which nothing fails"
            found = [f"Found in schedule {self.schedules}, {order}."]
        return "\n".join([outcome.text, *outcome.notes, "", *found, f"Again:  {self.command()}"])

    def command(self) -> str:
        """Return the command that runs the same schedule again."""
        request = self.request
        words = ["aiodist", "check", "--ranks", str(request.ranks), request.script, *["--cpu"] * request.cpu]
        words += ["--replay", self.outcome.schedule, *(["--", *request.arguments] if request.arguments else [])]
        return shlex.join(words)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        found = {**asdict(self.request), **asdict(self.outcome), "schedules": self.schedules, "text": self.text}
        replay = found.pop("replay")
        return {**found, "changes": None if replay is None else str(self.request.replay)}


def check(request: Request, schedules: int, output: IO[str] | None = None) -> Checked:
    """Run a script under some schedules until one fails; a script that leaves no choice has one.

    The first schedule is the default order, the second its reverse, and the others are random. A failing one is reduced
    to the fewest changes that still fail. What the first prints goes to the output, by default this process's.
    """
    if request.replay is not None:
        return Checked(request, _run(request, replayed(request.replay.changes), output), 1)
    outcome, number = _run(request, default_order, output), 0
    points = outcome.points
    while outcome.kind == "agreed" and points and number < schedules - 1:
        number += 1
        chance = random.Random(f"{request.seed} {number}")  # noqa: S311  (a schedule is no secret)
        outcome = _run(request, last_first if number == 1 else at_random(chance, points), silent=True)
    if number and outcome.kind != "agreed":

        def failure_of(changes: Sequence[Change]) -> Outcome | None:
            found = _run(request, replayed(changes), silent=True)
            return found if found.like == outcome.like else None

        outcome = minimise(Schedule.parse(outcome.schedule).changes, failure_of) or outcome
    return Checked(request, outcome, number + 1)


# A fork for each run.


def _run(request: Request, order: Order, output: IO[str] | None = None, *, silent: bool = False) -> Outcome:
    """Run a script once, in a fork of this process; what it prints goes to an output, or nowhere."""
    _flush()
    seconds = request.seconds + _PATIENCE_SECONDS
    with tempfile.TemporaryFile() as answer, Path(os.devnull).open("w") as nowhere:
        child = os.fork()
        if not child:
            _run_here(request, order, nowhere if silent else output, answer)
        ended, status, until = 0, 0, time.monotonic() + seconds
        try:
            while not ended and time.monotonic() < until:
                time.sleep(_LOOK_SECONDS)
                ended, status = os.waitpid(child, os.WNOHANG)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # and what the script has started and left
            if not ended:
                os.waitpid(child, 0)
        if not ended:
            return Outcome("timeout", f"the process of the ranks has not answered for {seconds:g} s")
        answer.seek(0)
        found = answer.read()
        return Outcome(**json.loads(found)) if found else Outcome("crashed", _crash_text(status))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _run_here(request: Request, order: Order, output: IO[str] | None, answer: IO[bytes]) -> None:
    """Run a script in this fork, and end it."""
    os.setsid()
    faulthandler.enable(all_threads=False)
    warnings.filterwarnings("ignore", "Attempted to get default timeout for nccl")
    if output is not None:
        os.dup2(output.fileno(), 1)
    try:
        outcome = _ScriptRun(request, order).run()
        atexit._run_exitfuncs()  # noqa: SLF001  (a fork that leaves would run none: the script's, and a trace's)
        _flush()
        answer.write(json.dumps(asdict(outcome)).encode())
        answer.flush()
        os._exit(0)
    except BaseException:  # noqa: BLE001  (a fault of ours; nothing may leave a fork)
        traceback.print_exc()
        os._exit(70)


def _crash_text(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"the process of the ranks {how}"


# In the fork.


class _ScriptRun:
    """One run of a script on its ranks; the process is of no other use afterwards."""

    def __init__(self, request: Request, order: Order) -> None:
        self._request = request
        self._seed = request.seed if request.replay is None else request.replay.seed
        self._errors: dict[int, BaseException] = {}
        self._cuda_as_cpu: CudaAsCpu | None = None
        argv = [request.script, *request.arguments]
        self._process = Process(request.ranks, argv, self._environment, self._seed)
        self._job = Job(request.ranks, Path(request.script).name, order, self._process.switch)
        replace_functions(self._job.ranks)

    def run(self) -> Outcome:
        """Run it."""
        script, request, ranks = Path(self._request.script), self._request, self._job.ranks
        try:
            code = compile(script.read_bytes(), str(script), "exec")
        except (SyntaxError, ValueError) as error:
            return Outcome("failed", "".join(traceback.format_exception_only(error)).rstrip())
        install(self._job)
        self._cuda_as_cpu = CudaAsCpu(request.ranks, self._job.rank) if request.cpu else None
        sys.path[:] = [str(script.resolve().parent), *(path for path in sys.path if path)]
        if ranks.run(partial(self._main, code), request.seconds):
            self._job.finish()
            outcome = self._outcome()
        else:
            outcome = Outcome("timeout", self._where())
        outcome.collectives, outcome.points = self._job.collectives, ranks.points
        outcome.notes = self._cuda_as_cpu.notes() if self._cuda_as_cpu is not None else []
        outcome.schedule = str(Schedule(self._seed, tuple(ranks.changes)))
        return outcome

    def _environment(self, rank: int) -> dict[str, str]:
        """Return what `torchrun` sets for a rank."""
        size = str(self._request.ranks)
        return {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
        }  # fmt: skip

    def _main(self, code: CodeType, rank: int) -> None:
        """Be one rank."""
        main = self._process.main_of(rank).__dict__
        main.update(__file__=self._request.script, __builtins__=__builtins__)
        torch.autograd.set_multithreading_enabled(False)
        self._job.begin(rank)
        try:
            with self._cuda_as_cpu or nullcontext(), exits():
                exec(code, main)  # noqa: S102  (it is what the person wants run)
            self._job.settle(rank)
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is how the rank ended)
            self._errors[rank] = error
        state = ReplicaState.FAILED if rank in self._errors else ReplicaState.EXITED
        self._job.end(rank, state, self._errors.get(rank))

    @replicas_called("rank")
    def _outcome(self) -> Outcome:
        """Return how it ended: the script's first own error in full, the others in a line each, then who waited."""
        error = self._job.error
        report = None if error is None else error.report.to_dict()
        own = {rank: each for rank, each in sorted(self._errors.items()) if not isinstance(each, CollectiveError)}
        if not own:
            refused = self._job.ranks.refused
            if refused:
                return Outcome("failed", f"NotImplementedError: {refused}")
            return (
                Outcome("agreed")
                if error is None
                else Outcome("disagreed", f"{type(error).__name__}: {error.report}", report)
            )
        first = next(iter(own.values()))
        exits = isinstance(first, SystemExit)
        text = f"exit code {first.code}" if exits else "".join(_program_traceback(first)).rstrip()  # type: ignore[attr-defined]
        alike = [rank for rank, each in own.items() if (type(each), str(each)) == (type(first), str(first))]
        lines = [text, f"On {ids(alike)} of {self._request.ranks}."]
        lines += [f"rank {rank}: {type(each).__name__}: {each}" for rank, each in own.items() if rank not in alike]
        if any(word in text for word in ("CUDA", "NVIDIA", "accelerator")) and not self._request.cpu:
            lines.append("With --cpu, CUDA devices are taken for the CPU.")
        lines += [error.report.text] if error is not None else []
        return Outcome("exited" if exits else "failed", "\n".join(lines), report)

    def _where(self) -> str:
        """Say where each rank is, when a run takes too long."""
        lines = [f"the ranks had not ended after {self._request.seconds:g} s:"]
        for facts in self._job.facts():
            at = facts.stack[-1] if facts.stack else None
            where = "has ended" if facts.end is not None else f"at {at.file}:{at.line}" if at is not None else "running"
            runs = "> " if facts.replica_id == self._job.ranks.holder else "  "
            lines.append(f"{runs}rank {facts.replica_id}  {where}")
        return "\n".join(lines)


def _program_traceback(error: BaseException) -> Iterator[str]:
    """Yield a traceback without our own frames, and without others' at its beginning."""
    found = traceback.TracebackException.from_exception(error)
    found.stack[:] = (frame for frame in found.stack if not frame.filename.startswith(_OWN))
    while found.stack and is_plumbing(found.stack[0].filename):
        del found.stack[0]
    return found.format()
