"""`aiodist check`: run a program under many schedules, and report where its replicas disagree."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from aiodist._tools.usage import Exit, UsageError, natural, positive

if TYPE_CHECKING:
    from argparse import _SubParsersAction
    from collections.abc import Callable

    from rich.console import Console

    from aiodist._checking.check import Checked
    from aiodist._checking.schedule import Schedule

_DESCRIPTION = """\
Run a function on an event loop with virtual time that chooses the order of ready tasks: first the default order, then
others, until one fails. The failure is reported with the command that repeats it, in as few changes to that order as
possible. With --replicas, TARGET is a replica function, run on a MirroredStrategy of that many CPU devices; without, a
function that makes its own strategies: a coroutine function, or one that calls asyncio.run. With --ranks, TARGET is a
script of torch.distributed, which runs unmodified: its ranks are threads of one process, one at a time.
"""
_EPILOG = """\
ARGS are TARGET's own: they are in sys.argv, and a function with parameters gets them, name=value by keyword.
Exit codes: 0 all replicas agreed, 1 they did not (or wait for each other forever), 2 bad usage, 3 the program raised
an exception of its own, 130 after Ctrl-C.
"""

_WIDE = 200
"""The width of a table that goes to no terminal."""


def add_check(commands: _SubParsersAction[ArgumentParser]) -> None:
    """Add the `check` command."""
    check = commands.add_parser(
        "check", help="run a program under many schedules and report where its replicas disagree",
        description=_DESCRIPTION, epilog=_EPILOG, usage="aiodist check TARGET [options] [-- ARGS]",
    )  # fmt: skip
    check.add_argument(
        "target", metavar="TARGET", help="FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION; with --ranks, FILE.py"
    )
    check.add_argument("--replicas", type=_replicas, metavar="N", help="TARGET is a replica function; 1 to 10000")
    check.add_argument("--ranks", type=_replicas, metavar="N", help="TARGET is a torch.distributed script of N ranks")
    check.add_argument("--cpu", action="store_true", help="with --ranks, take CUDA devices for the CPU")
    check.add_argument(
        "--schedules", type=positive, metavar="K",
        help="how many to run (default: 20, fewer above 100 replicas; 1 with --ranks)",
    )  # fmt: skip
    check.add_argument(
        "--seed", type=natural, metavar="N", default=0,
        help="of schedules, random numbers and string hashes (default: %(default)s)",
    )  # fmt: skip
    check.add_argument("--replay", type=_schedule, metavar="SCHEDULE", help="run only this schedule")
    check.add_argument(
        "--timeout", type=_seconds, metavar="SECONDS", help="limit of one run, in real time (default: 300)"
    )
    check.add_argument(
        "--json", action="store_true", help="print the result as JSON; what TARGET prints goes to stderr"
    )
    check.set_defaults(command=_run_check, hash_seed=_hash_seed)


def _replicas(text: str) -> int:
    number = positive(text)
    if number > 10_000:
        raise ArgumentTypeError(f"expected a number of replicas from 1 to 10000, got {text!r}")
    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return seconds


def _schedule(text: str) -> Schedule:
    from aiodist._checking.schedule import Schedule

    try:
        return Schedule.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def _hash_seed(arguments: Namespace) -> int:
    """Return the seed of string hashes, so that a repeated run has the same order of sets."""
    return int(arguments.seed if arguments.replay is None else arguments.replay.seed) % (1 << 32)


def _run_check(arguments: Namespace) -> Exit:
    if arguments.ranks is not None:
        return _run_ranks(arguments)
    if arguments.cpu:
        raise UsageError("--cpu goes with --ranks")
    from aiodist._checking.check import SECONDS, Outcome, Request, check
    from aiodist._checking.target import Target, TargetError

    try:
        request = Request(
            text=arguments.target,
            target=Target.parse(arguments.target),
            replicas=arguments.replicas,
            schedules=arguments.schedules,
            seed=arguments.seed,
            replay=arguments.replay,
            seconds=arguments.timeout or SECONDS,
            arguments=tuple(arguments.own),
        )
        with _Progress(request.most_schedules()) as progress:
            checked = check(request, output=sys.stderr if arguments.json else None, before=progress.show)
    except TargetError as error:
        raise UsageError(str(error)) from error
    if arguments.json:
        from aiodist._checking.text import as_json

        print(json.dumps(as_json(checked), indent=2))
    else:
        _print(checked)
    return {Outcome.AGREED: Exit.DONE, Outcome.DISAGREED: Exit.FAILED, Outcome.FAILED: Exit.RAISED}[checked.outcome]


def _run_ranks(arguments: Namespace) -> Exit:
    from aiodist._torch.run import ServerError, check

    if arguments.replicas is not None:
        raise UsageError("give --ranks or --replicas, not both")
    if not Path(arguments.target).is_file():
        raise UsageError(f"there is no file {arguments.target!r}")
    request = {
        "script": arguments.target, "arguments": arguments.own, "ranks": arguments.ranks, "seed": arguments.seed,
        "changes": None if arguments.replay is None else str(arguments.replay), "cpu": arguments.cpu,
        "seconds": arguments.timeout or 300.0,
    }  # fmt: skip
    schedules = arguments.schedules or 1
    try:
        with _Progress(schedules) as progress:
            checked = check(request, schedules, progress.show, sys.stderr if arguments.json else None)
    except ServerError as error:
        raise UsageError(str(error)) from error
    if arguments.json:
        print(json.dumps(checked.to_dict(), indent=2))
    else:
        print(checked.text)
    codes = {"agreed": Exit.DONE, "disagreed": Exit.FAILED, "timeout": Exit.FAILED}
    return codes.get(checked.outcome["kind"], Exit.RAISED)


class _Progress:
    """In a terminal, a line with the number of the schedule that runs; no thread draws it."""

    def __init__(self, schedules: int) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._schedules = schedules
        self.show: Callable[[int], None] = self._show if self._console.is_terminal else lambda _: None

    def __enter__(self) -> Self:
        return self

    def _show(self, number: int) -> None:
        if number and (number % 10 == 0 or self._schedules <= 100):
            self._console.file.write(f"\r\x1b[Kschedule {number + 1} of {self._schedules}")
            self._console.file.flush()

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._console.file.write("\r\x1b[K")
            self._console.file.flush()


def _print(checked: Checked) -> None:
    from aiodist._checking import text
    from aiodist._demos.terminal import open_console

    console = open_console()
    console.soft_wrap = True
    if not console.is_terminal:
        console.width = _WIDE
    if checked.exploration.failure is not None:
        _print_report(console, text.failure_text(checked))
        console.print("\n".join(["", *text.schedule_lines(checked)]))
        return
    console.print(text.agreement(checked))
    _print_table(console, *text.table(checked.statistics))
    for line in text.held_up_lines(checked):
        console.print(f"\n{line}", markup=False)


def _print_report(console: Console, text: str) -> None:
    from rich.text import Text

    for number, line in enumerate(text.splitlines()):
        console.print(Text(line, "bold red" if number == 0 else "red" if line.startswith(">") else ""))


def _print_table(console: Console, headings: list[str], rows: list[list[str]], more: int) -> None:
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        number = heading in {"times", "bytes", "waited", "longest"}
        table.add_column(heading, justify="right" if number else "left", no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print()
    console.print(table)
    if more:
        console.print(f"… and {more} more places", markup=False)
