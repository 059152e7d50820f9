"""A script on its ranks, in a fork of this process, under schedule after schedule until one fails.

Each rank runs the script as ``__main__``, in a thread of its own. In a fork no earlier run has left anything, and a
crash inside torch ends the fork alone, which writes the place to standard error. Standard output and error belong to
the script.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import json
import os
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
from pathlib import Path
from typing import IO, Any

from aiodist._checking.check import SECONDS
from aiodist._checking.explore import minimise
from aiodist._checking.schedule import Change, Order, Schedule, default_order, other_orders, replayed
from aiodist._core.errors import CollectiveError
from aiodist._core.text import count, ids, replicas_called
from aiodist._torch.cpu import CudaAsCpu
from aiodist._torch.group import install
from aiodist._torch.job import Job
from aiodist._torch.places import is_plumbing
from aiodist._torch.private import torch
from aiodist._torch.process import Process, exits, replace_functions

if not hasattr(os, "fork"):
    raise ImportError("check --ranks needs an operating system with fork, such as Linux or macOS")

_OWN = str(Path(__file__).parent)
_PATIENCE_SECONDS = 15.0
_LOOK_SECONDS = 0.005
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Request:
    """What to run, and how: under schedules that the seed gives, or under the one to replay."""

    script: str
    arguments: tuple[str, ...] = ()
    ranks: int = 2
    seed: int = 0
    replay: Schedule | None = None
    seconds: float = SECONDS
    cpu: bool = False  # use the CPU in place of CUDA devices


@dataclass(slots=True)
class Outcome:
    """How a run of a script ended; the fields are those of the JSON."""

    kind: str  # agreed, disagreed, failed (by an exception), exited (with a code other than 0), timeout, or crashed
    text: str = ""  # for the user
    report: dict[str, Any] | None = None  # if ranks disagreed
    collectives: int = 0  # how many were completed
    points: int = 0  # at how many another rank could have continued
    schedule: str = "0/"  # repeats it
    notes: list[str] = field(default_factory=list)  # what else the user should know

    @property
    def failure(self) -> tuple[object, ...]:
        """What makes two failures the same: the kind, the reason of a report, and the error."""
        reason = None if self.report is None else self.report["reason"]
        return self.kind, reason, self.kind == "disagreed" or self.text.partition("\nOn rank")[0]


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check: the outcome of the default order, or of the failing one with the fewest changes."""

    request: Request
    outcome: Outcome
    schedules: int

    @property
    def text(self) -> str:
        """The result for the user."""
        outcome, request = self.outcome, self.request
        if outcome.kind == "agreed":
            order = "the given schedule" if request.replay is not None else count(self.schedules, "schedule")
            agreed = f"{count(request.ranks, 'rank')} agreed in {count(outcome.collectives, 'collective')}, in {order}."
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
        if request.seconds != SECONDS:
            words += ["--timeout", f"{request.seconds:g}"]
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
    to the fewest changes that still fail. The first run prints to the output, by default this process's.
    """
    if request.replay is not None:
        return Checked(request, _run(request, replayed(request.replay.changes), output), 1)
    outcome = _run(request, default_order, output)
    if outcome.kind != "agreed" or not outcome.points:
        return Checked(request, outcome, 1)
    for number, order in zip(range(2, schedules + 1), other_orders(request.seed, outcome.points), strict=False):
        failed = _run(request, order, silent=True)
        if failed.kind != "agreed":
            return Checked(request, _reduced(request, failed), number)
    return Checked(request, outcome, schedules)


def _reduced(request: Request, failed: Outcome) -> Outcome:
    """Return the outcome with the fewest changes that is the same failure."""

    def failure_of(changes: Sequence[Change]) -> Outcome | None:
        found = _run(request, replayed(changes), silent=True)
        return found if found.failure == failed.failure else None

    return minimise(Schedule.parse(failed.schedule).changes, failure_of) or failed


# A fork for each run.


def _run(request: Request, order: Order, output: IO[str] | None = None, *, silent: bool = False) -> Outcome:
    """Run a script once, in a fork of this process; it prints to the output, or nowhere."""
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
                os.killpg(child, signal.SIGKILL)  # with the processes that the script has left
            if not ended:
                os.waitpid(child, 0)
        if not ended:
            return Outcome("timeout", f"the process of the ranks has not answered for {seconds:g} s")
        answer.seek(0)
        found = answer.read()
        if found:
            return Outcome(**json.loads(found))
        code = os.waitstatus_to_exitcode(status)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Outcome("crashed", f"the process of the ranks {how}")


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _run_here(request: Request, order: Order, output: IO[str] | None, answer: IO[bytes]) -> None:
    """Run a script in this fork, and end it."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed parent cannot end it
    faulthandler.enable(all_threads=False)
    warnings.filterwarnings("ignore", "Attempted to get default timeout for nccl")
    if output is not None:
        os.dup2(output.fileno(), 1)
    try:
        outcome = _run_ranks(request, order)
        atexit._run_exitfuncs()  # noqa: SLF001  (os._exit runs none: the script's, and a trace's)
        _flush()
        answer.write(json.dumps(asdict(outcome)).encode())
        answer.flush()
        os._exit(0)
    except BaseException:  # noqa: BLE001  (a bug of ours; nothing may leave a fork)
        traceback.print_exc()
        os._exit(70)


def _run_ranks(request: Request, order: Order) -> Outcome:
    """Run a script on its ranks; the process is of no other use afterwards."""
    script = Path(request.script)
    try:
        code = compile(script.read_bytes(), str(script), "exec")
    except (SyntaxError, ValueError) as error:
        return Outcome("failed", "".join(traceback.format_exception_only(error)).rstrip())
    seed = request.seed if request.replay is None else request.replay.seed
    process = Process(request.ranks, [request.script, *request.arguments], seed)
    job = Job(request.ranks, script.name, order, process.switch)
    replace_functions(job.ranks)
    install(job)
    cuda_as_cpu = CudaAsCpu(request.ranks, job.rank) if request.cpu else None
    sys.path[:] = [str(script.resolve().parent), *(path for path in sys.path if path)]

    def main(rank: int) -> None:
        variables = process.main_of(rank).__dict__
        variables.update(__file__=request.script, __builtins__=__builtins__)
        torch.autograd.set_multithreading_enabled(False)
        with cuda_as_cpu or nullcontext(), exits():
            exec(code, variables)  # noqa: S102  (it is what the user wants run)

    outcome = _outcome(request, job) if job.run(main, request.seconds) else _timeout(request, job)
    outcome.collectives, outcome.points = job.collectives, job.ranks.points
    outcome.notes = [] if cuda_as_cpu is None else cuda_as_cpu.notes()
    outcome.schedule = str(Schedule(seed, tuple(job.ranks.changes)))
    return outcome


@replicas_called("rank")
def _outcome(request: Request, job: Job) -> Outcome:
    """Return how the ranks ended: the script's first own error in full, the others in a line each, then the report."""
    error = job.error
    report = None if error is None else error.report.to_dict()
    own = {rank: each for rank, each in sorted(job.errors.items()) if not isinstance(each, CollectiveError)}
    if not own:
        if job.ranks.refused:
            return Outcome("failed", f"NotImplementedError: {job.ranks.refused}")
        if error is None:
            return Outcome("agreed")
        return Outcome("disagreed", f"{type(error).__name__}: {error.report}", report)
    first = next(iter(own.values()))
    if isinstance(first, SystemExit):
        kind, text = "exited", f"exit code {first.code}" if isinstance(first.code, int) else f"SystemExit: {first.code}"
    else:
        kind, text = "failed", "".join(_program_traceback(first)).rstrip()
    alike = [rank for rank, each in own.items() if (type(each), str(each)) == (type(first), str(first))]
    lines = [text, f"On {ids(alike)} of {request.ranks}."]
    lines += [f"rank {rank}: {type(each).__name__}: {each}" for rank, each in own.items() if rank not in alike]
    if any(word in text for word in ("CUDA", "NVIDIA", "accelerator")) and not request.cpu:
        lines.append("With --cpu, the CPU is used in place of CUDA devices.")
    if error is not None:
        lines.append(error.report.text)
    return Outcome(kind, "\n".join(lines), report)


def _timeout(request: Request, job: Job) -> Outcome:
    """Return where each rank is, when a run takes too long."""
    lines = [f"the ranks had not ended after {request.seconds:g} s:"]
    for facts in job.facts():
        at = facts.stack[-1] if facts.stack else None
        where = "has ended" if facts.end is not None else f"at {at.file}:{at.line}" if at is not None else "running"
        mark = "> " if facts.replica_id == job.ranks.holder else "  "
        error = job.errors.get(facts.replica_id)
        why = "" if error is None else f" with {type(error).__name__}: {error}"
        lines.append(f"{mark}rank {facts.replica_id}  {where}{why}")
    return Outcome("timeout", "\n".join(lines))


def _program_traceback(error: BaseException) -> Iterator[str]:
    """Yield a traceback without frames of aiodist, and without others' at its beginning."""
    found = traceback.TracebackException.from_exception(error)
    found.stack[:] = (frame for frame in found.stack if not frame.filename.startswith(_OWN))
    while found.stack and is_plumbing(found.stack[0].filename):
        del found.stack[0]
    return found.format()
