"""Running a script's ranks, each time in a fork of this process, under schedule after schedule until one fails.

So a run finds a process that nothing has used before it, and a crash inside torch ends the fork alone: its signal, and
the line that the rank was at, become the outcome. Standard output and error are the script's.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from select import select
from typing import IO, Any

from aiodist._checking.explore import minimise
from aiodist._checking.schedule import Change, LastFirst, Order, Random, Replayed, Schedule
from aiodist._core.text import count
from aiodist._torch.job import is_plumbing
from aiodist._torch.script import Outcome, Request, ScriptRun

if not hasattr(os, "fork"):
    raise ImportError("check --ranks needs an operating system with fork, such as Linux or macOS")

_PATIENCE_SECONDS = 15.0
_LOOK_SECONDS = 1.0
_MOST_REDUCING_RUNS = 100
_HOLDER_BYTES = 8
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


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
        words = ["aiodist", "check", "--ranks", str(request.ranks), request.script]
        words += ["--cpu"] if request.cpu else []
        words += ["--replay", self.outcome.schedule]
        return shlex.join([*words, "--", *request.arguments] if request.arguments else words)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON has it."""
        found = {**asdict(self.request), **asdict(self.outcome), "schedules": self.schedules, "text": self.text}
        replay = found.pop("replay")
        return {**found, "changes": None if replay is None else str(self.request.replay)}


def check(
    request: Request,
    schedules: int,
    before: Callable[[int], object] = lambda _: None,
    output: IO[str] | None = None,
) -> Checked:
    """Run a script under some schedules until one fails; a script that leaves no choice has one.

    The first schedule is the default order, the second its reverse, and the others are random. A failing one is reduced
    to the fewest changes that still fail.
    """
    if request.replay is not None:
        return Checked(request, run(request, Replayed(request.replay.changes), output), 1)
    before(0)
    outcome, number = run(request, Order(), output), 0
    while outcome.kind == "agreed" and outcome.points and number < schedules - 1:
        number += 1
        before(number)
        chance = random.Random(f"{request.seed} {number}")  # noqa: S311  (a schedule is no secret)
        outcome = run(request, LastFirst() if number == 1 else Random(chance), silent=True)
    if number and outcome.kind != "agreed":
        outcome = _reduced(request, outcome)
    return Checked(request, outcome, number + 1)


def _reduced(request: Request, failed: Outcome) -> Outcome:
    """Return the outcome with the fewest changes to the default order that is like a failed one."""

    def failure_of(changes: Sequence[Change]) -> Outcome | None:
        outcome = run(request, Replayed(changes), silent=True)
        return outcome if outcome.like == failed.like else None

    return minimise(Schedule.parse(failed.schedule).changes, failure_of, runs=_MOST_REDUCING_RUNS) or failed


def run(request: Request, order: Order, output: IO[str] | None = None, *, silent: bool = False) -> Outcome:
    """Run a script once, in a fork of this process; what it prints goes to an output, or nowhere."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    seconds = request.seconds + _PATIENCE_SECONDS
    answers, answer = os.pipe()
    with tempfile.TemporaryFile() as crash, Path(os.devnull).open("w") as nowhere:
        child = os.fork()
        if not child:
            _run_here(request, order, nowhere if silent else output, answer, crash)
        os.close(answer)
        try:
            found = _listen(child, answers, seconds)
        finally:
            os.close(answers)
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # and what the script has started and left
            _, status = os.waitpid(child, 0)
        if found is None:
            return Outcome("timeout", f"the process of the ranks has not answered for {seconds:g} s")
        return Outcome(**json.loads(found)) if found else Outcome("crashed", _crash_text(status, crash))


def _listen(child: int, answers: int, seconds: float) -> bytes | None:
    """Return what a fork says before it ends; None where it says nothing for that long."""
    said, until = b"", time.monotonic() + seconds
    while time.monotonic() < until:
        ready, _, _ = select([answers], [], [], _LOOK_SECONDS)
        part = os.read(answers, 1 << 16) if ready else b""
        said += part
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if said.endswith(b"\n") or (ready and not part) or (not ready and ended is not None):
            return said
    return None


def _run_here(request: Request, order: Order, output: IO[str] | None, answer: int, crash: IO[bytes]) -> None:
    """Run a script in this fork, and end it."""
    leave = os._exit
    os.setsid()
    crash.write(b" " * _HOLDER_BYTES)
    crash.flush()
    faulthandler.enable(crash, all_threads=False)
    warnings.filterwarnings("ignore", "Attempted to get default timeout for nccl")
    if output is not None:
        os.dup2(output.fileno(), 1)
    try:
        outcome = ScriptRun(request, order, lambda rank: os.pwrite(crash.fileno(), b"%-8d" % rank, 0)).run()
        atexit._run_exitfuncs()  # noqa: SLF001  (a fork that leaves would run none: the script's, and a trace's)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with os.fdopen(answer, "w") as answers:
            answers.write(f"{json.dumps(asdict(outcome))}\n")
        leave(0)
    except BaseException:  # noqa: BLE001  (a fault of ours; nothing may leave a fork)
        traceback.print_exc()
        leave(70)


def _crash_text(status: int, crash: IO[bytes]) -> str:
    code = os.waitstatus_to_exitcode(status)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    crash.seek(0)
    holder, _, rest = crash.read().decode(errors="replace").partition("\n")
    rank = holder[:_HOLDER_BYTES].strip()
    frames = [match for match in map(_FRAME.fullmatch, rest.splitlines()) if match]
    own = next((frame for frame in frames if not is_plumbing(frame["file"])), None)
    lines = [f"the process of the ranks {how}" + (f" while rank {rank} ran" if rank else "")]
    if own is not None:
        lines.append(f"  at {own['file']}:{own['line']} in {own['function']}")
    if frames and frames[0] is not own:
        lines.append(f"  inside {frames[0]['file']}:{frames[0]['line']} in {frames[0]['function']}")
    return "\n".join(lines)
