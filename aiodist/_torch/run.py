"""Running a script's ranks in a process of their own, under schedule after schedule until one fails."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from select import select
from typing import IO, Any, Self

from aiodist._core.text import count

_START_SECONDS = 120.0
_PATIENCE_SECONDS = 15.0
_LAST_SECONDS = 1.0


class ServerError(Exception):
    """The ranks cannot be run at all; the text is for a person."""


class Server:
    """The process that ranks live in, as long as the block lasts.

    Args:
        output: where what scripts print goes; None: where it would go.

    Raises:
        ServerError: it cannot start, for example because torch is absent.
    """

    def __init__(self, output: IO[Any] | int | None = None) -> None:
        self._output = output

    def __enter__(self) -> Self:
        if not hasattr(os, "fork"):
            raise ServerError("check --ranks needs an operating system with fork, such as Linux or macOS")
        requests, self._requests = os.pipe()
        self._outcomes, outcomes = os.pipe()
        self._process = subprocess.Popen(  # noqa: S603  (our own program)
            [sys.executable, "-P", "-c", _START.format(_path(), requests, outcomes)],
            pass_fds=(requests, outcomes), start_new_session=True, env=_environment(), stdout=self._output,
        )  # fmt: skip
        os.close(requests)
        os.close(outcomes)
        self._buffer = b""
        answer = self._answer(_START_SECONDS)
        if answer is None or "error" in answer:
            self.__exit__()
            raise ServerError("the process of the ranks could not start" if answer is None else answer["error"])
        return self

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a script once.

        Args:
            request: the fields of a `script.Request`.

        Returns:
            The fields of a `script.Outcome`.
        """
        os.write(self._requests, f"{json.dumps(request)}\n".encode())
        answer = self._answer(request["seconds"] + _PATIENCE_SECONDS)
        if answer is None:
            where = f"nothing was heard of the ranks for {request['seconds'] + _PATIENCE_SECONDS:g} s"
            answer = {"kind": "timeout", "text": where, "report": None, "collectives": 0, "points": 0,
                      "schedule": "0/", "notes": []}  # fmt: skip
        return answer

    def _answer(self, seconds: float) -> dict[str, Any] | None:
        while b"\n" not in self._buffer:
            ready, _, _ = select([self._outcomes], [], [], seconds)
            part = os.read(self._outcomes, 1 << 16) if ready else b""
            if not part:
                return None
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def __exit__(self, *_: object) -> None:
        os.close(self._requests)
        os.close(self._outcomes)
        with suppress(subprocess.TimeoutExpired):  # it ends by itself, unless its ranks hang
            self._process.wait(_LAST_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


_START = "import sys; sys.path[:] = {}; from aiodist._torch.server import main; main({}, {})"


def _path() -> list[str]:
    """Return where modules are looked for: not in the working directory, whose files have any name."""
    here = Path.cwd()
    return [each for each in sys.path if each and (Path(each) != here or (here / "aiodist").is_dir())]


def _environment() -> dict[str, str]:
    """Return the environment of the ranks: one thread each in torch's own work, unless the person says otherwise."""
    return {"OMP_NUM_THREADS": "1", **os.environ}


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of a check.

    Attributes:
        request: what was run.
        outcome: how the last run ended, as the fields of a `script.Outcome`.
        schedules: how many schedules were run.
    """

    request: dict[str, Any]
    outcome: dict[str, Any]
    schedules: int

    @property
    def text(self) -> str:
        """What a person is to read."""
        outcome, ranks = self.outcome, self.request["ranks"]
        if outcome["kind"] == "agreed":
            order = "the given schedule" if self.request["changes"] is not None else count(self.schedules, "schedule")
            agreed = f"{ranks} ranks agreed in {count(outcome['collectives'], 'collective')}, in {order}."
            return "\n".join([agreed, *outcome["notes"]])
        return "\n".join([outcome["text"], *outcome["notes"], "", f"Again:  {self.command()}"])

    def command(self) -> str:
        """Return the command that runs the same schedule again."""
        request = self.request
        words = ["aiodist", "check", "--ranks", str(request["ranks"]), request["script"]]
        words += ["--cpu"] if request["cpu"] else []
        words += ["--replay", self.outcome["schedule"]]
        return shlex.join([*words, "--", *request["arguments"]] if request["arguments"] else words)

    def to_dict(self) -> dict[str, Any]:
        """Return the same as JSON has it."""
        return {**self.request, **self.outcome, "schedules": self.schedules, "text": self.text}


def check(
    request: dict[str, Any],
    schedules: int,
    before: Callable[[int], object] = lambda _: None,
    output: IO[Any] | None = None,
) -> Checked:
    """Run a script under some schedules until one fails; a script that leaves no choice has one.

    Args:
        request: the fields of a `script.Request`.
        schedules: how many schedules there are.
        before: called with the number of each schedule before it is run.
        output: where what the script prints goes; None: where it would go.

    Raises:
        ServerError: it cannot be run.
    """
    with Server(output) as server:
        outcome: dict[str, Any] = {}
        done = 0
        for number in range(1 if request["changes"] is not None else schedules):
            before(number)
            outcome = server.run({**request, "number": number})
            done += 1
            if outcome["kind"] != "agreed" or not outcome["points"]:
                break
        return Checked(request, outcome, done)
