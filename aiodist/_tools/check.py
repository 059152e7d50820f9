"""`aiodist check`, which runs a program under many schedules, and `aiodist explain`, which reads the dumps of a job."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiodist._tools.usage import Commands, Exit, UsageError, natural, positive, seconds

if TYPE_CHECKING:
    from aiodist._checking.schedule import Schedule

_CHECK = """\
Run a function on an event loop with virtual time, which chooses the order in which ready tasks run: asyncio's own order
first, then others, until one fails. The report ends with the command that repeats the failure with as few changes to
asyncio's order as possible. With --replicas, TARGET is a replica function and runs on a MirroredStrategy of that many
CPU devices. Without it, TARGET makes its own strategies: it is a coroutine function, or a function that calls
asyncio.run. With --ranks, TARGET is an unmodified torch.distributed script; its ranks are threads of one process that
run one at a time.
"""
_CHECK_CODES = """\
ARGS are passed to TARGET: they are in sys.argv, and a function with parameters is called with them, name=value by
keyword.
Exit codes: 0 if all replicas agreed, 1 if they did not or would wait for each other forever, 2 for bad usage, 3 if the
program raised an exception of its own, 130 after Ctrl-C.
"""
_EXPLAIN = """\
Read the dumps that PyTorch's flight recorder has written, one per rank, and say which rank is at which collective of
which process group, and where they differ. A dump is a pickle or JSON, and its name ends in the rank, as in
nccl_trace_rank_3 and 3.json. PyTorch is not needed, and nothing in a dump is run. Exit codes: 0 if the ranks agree and
none waits, 1 if they do not or some wait, 2 for bad usage or a file that is not a dump.
"""

_CODES = {"agreed": Exit.DONE, "disagreed": Exit.FAILED, "timeout": Exit.FAILED}


def add_check(commands: Commands) -> None:
    """Add the `check` command."""
    check = commands.add_parser(
        "check", help="run a program under many schedules and report where its replicas disagree",
        description=_CHECK, epilog=_CHECK_CODES, usage="aiodist check TARGET [options] [-- ARGS]",
    )  # fmt: skip
    option = check.add_argument
    option("target", metavar="TARGET", help="FILE.py:FUNCTION or PACKAGE.MODULE:FUNCTION; with --ranks, FILE.py")
    option("-n", "--replicas", type=positive, metavar="N", help="run TARGET, a replica function, on N replicas")
    option("--ranks", type=positive, metavar="N", help="run TARGET, a torch.distributed script, with N ranks")
    option("--cpu", action="store_true", help="with --ranks, use the CPU in place of CUDA devices")
    most = "how many orders to run (default: 20, fewer above 100 replicas; 1 with --ranks)"
    option("--schedules", type=positive, metavar="K", help=most)
    seed = "seed of schedules, random numbers and string hashes (default: %(default)s)"
    option("--seed", type=natural, metavar="N", default=0, help=seed)
    option("--replay", type=_schedule, metavar="SCHEDULE", help="run only this order, as a failing check prints it")
    limit = "limit of each run, in real time (default: %(default)g)"
    option("--timeout", type=seconds, metavar="SECONDS", default=300.0, help=limit)
    option("--json", action="store_true", help="print the result as JSON; what TARGET prints goes to stderr")
    check.set_defaults(command=_run_check, hash_seed=_hash_seed)


def add_explain(commands: Commands) -> None:
    """Add the `explain` command."""
    explain = commands.add_parser(
        "explain", help="say why a torch.distributed job hangs, from its flight recorder dumps", description=_EXPLAIN
    )
    explain.add_argument("dumps", metavar="DUMP", nargs="+", type=Path, help="a rank's dump")
    explain.add_argument("--json", action="store_true", help="print the result as JSON")
    explain.set_defaults(command=_run_explain)


def _schedule(text: str) -> Schedule:
    from aiodist._checking.schedule import Schedule

    try:
        return Schedule.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def _hash_seed(arguments: Namespace) -> int:
    """Return the seed of string hashes, which makes the order of sets repeatable."""
    return int(arguments.seed if arguments.replay is None else arguments.replay.seed) % (1 << 32)


def _run_check(arguments: Namespace) -> Exit:
    if arguments.ranks is not None:
        return _run_ranks(arguments)
    if arguments.cpu:
        raise UsageError("--cpu needs --ranks")
    from aiodist._checking.check import Request, check
    from aiodist._checking.target import TargetError

    request = Request(
        arguments.target, arguments.replicas, arguments.schedules, arguments.seed, arguments.replay,
        arguments.timeout, tuple(arguments.own),
    )  # fmt: skip
    try:
        checked = check(request, output=sys.stderr if arguments.json else None)
    except TargetError as error:
        raise UsageError(str(error)) from error
    agreed = checked.result.error is None
    _print(checked.text, checked.to_dict(), as_json=arguments.json, is_report=not agreed)
    if agreed and not arguments.json:
        from aiodist._tools.output import open_console, print_table

        print_table(open_console(), *checked.table())
        for line in checked.held_up:
            print(f"\n{line}")
    return _CODES.get(checked.outcome, Exit.RAISED)


def _run_ranks(arguments: Namespace) -> Exit:
    if arguments.replicas is not None:
        raise UsageError("give --ranks or --replicas, not both")
    if not Path(arguments.target).is_file():
        raise UsageError(f"there is no file {arguments.target!r}")
    try:
        from aiodist._torch.script import Request, check
    except ImportError as error:
        raise UsageError(str(error)) from error
    request = Request(
        script=arguments.target, arguments=tuple(arguments.own), ranks=arguments.ranks, seed=arguments.seed,
        replay=arguments.replay, seconds=arguments.timeout, cpu=arguments.cpu,
    )  # fmt: skip
    checked = check(request, arguments.schedules or 1, output=sys.stderr if arguments.json else None)
    kind = checked.outcome.kind
    _print(checked.text, checked.to_dict(), as_json=arguments.json, is_report=kind != "agreed")
    return _CODES.get(kind, Exit.RAISED)


def _run_explain(arguments: Namespace) -> Exit:
    from aiodist._torch.dumps import DumpError, read_all
    from aiodist._torch.explain import explain

    try:
        found = explain(read_all(arguments.dumps))
    except DumpError as error:
        raise UsageError(str(error)) from error
    _print(found.text, found.to_dict(), as_json=arguments.json, is_report=found.report is not None)
    return Exit.DONE if found.report is None else Exit.FAILED


def _print(text: str, fields: dict[str, Any], *, as_json: bool, is_report: bool) -> None:
    from aiodist._tools.output import open_console, print_report

    if as_json:
        print(json.dumps(fields, indent=2))
    elif is_report:
        print_report(open_console(), text)
    else:
        print(text)
