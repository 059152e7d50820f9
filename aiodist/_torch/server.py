"""The process that ranks live in: it imports torch once, and runs each request in a fork of itself.

So a run finds a process that nothing has used before it, and a crash inside torch ends that one alone: its signal, and
the line that the rank was at, become the outcome. Requests come in on one pipe and outcomes go out on another, a line
of JSON each; standard output and error are the script's.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import re
import signal
import sys
import tempfile
import traceback
import warnings
from dataclasses import asdict
from typing import IO, Any

_HOLDER_BYTES = 8
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


def main(requests: int, outcomes: int) -> None:
    """Serve requests until there are no more.

    Args:
        requests: the file descriptor that they come from.
        outcomes: the one that outcomes go to.
    """
    with os.fdopen(requests) as lines, os.fdopen(outcomes, "w") as answers:
        try:
            from aiodist._torch import script  # imports torch
        except Exception as error:
            if type(error).__name__ != "TorchError":
                raise
            _send(answers, {"error": str(error)})
            return
        _send(answers, {})
        for line in lines:
            request = json.loads(line)
            request["arguments"] = tuple(request["arguments"])
            with tempfile.TemporaryFile() as crash:
                child = os.fork()
                if not child:
                    _run(script, request, answers, crash)
                _, status = os.waitpid(child, 0)
                if status:
                    _send(answers, asdict(script.Outcome("crashed", _crash_text(script, status, crash))))


def _run(script: Any, request: dict[str, Any], answers: IO[str], crash: IO[bytes]) -> None:
    """Run a request in this fork, and end it."""
    leave = os._exit
    crash.write(b" " * _HOLDER_BYTES)
    crash.flush()
    faulthandler.enable(crash, all_threads=False)
    warnings.filterwarnings("ignore", "Attempted to get default timeout for nccl")
    holder = crash.fileno()
    if request["number"]:  # the first schedule has printed all that
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        outcome = script.run_script(script.Request(**request), lambda rank: os.pwrite(holder, b"%-8d" % rank, 0))
        atexit._run_exitfuncs()  # noqa: SLF001  (a fork that leaves would run none: the script's, and a trace's)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _send(answers, asdict(outcome))
        leave(0)
    except KeyboardInterrupt:
        leave(130)
    except BaseException:  # noqa: BLE001  (a fault of ours; nothing may leave a fork)
        traceback.print_exc()
        leave(70)


def _send(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(f"{json.dumps(answer)}\n")
    answers.flush()


def _crash_text(script: Any, status: int, crash: IO[bytes]) -> str:
    code = os.waitstatus_to_exitcode(status)
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    crash.seek(0)
    holder, _, rest = crash.read().decode(errors="replace").partition("\n")
    rank = holder[:_HOLDER_BYTES].strip()
    frames = [match for match in map(_FRAME.fullmatch, rest.splitlines()) if match]
    own = next((frame for frame in frames if not script.is_plumbing(frame["file"])), None)
    lines = [f"the process of the ranks {how}" + (f" while rank {rank} ran" if rank else "")]
    if own is not None:
        lines.append(f"  at {own['file']}:{own['line']} in {own['function']}")
    if frames and frames[0] is not own:
        lines.append(f"  inside {frames[0]['file']}:{frames[0]['line']} in {frames[0]['function']}")
    return "\n".join(lines)
