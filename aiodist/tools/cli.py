"""The command line: `aiodist`, and `python -m aiodist`."""

from __future__ import annotations

import io
import os
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress

import aiodist
from aiodist._arrays.environment import fix_hashes
from aiodist._demos.interruption import INTERRUPTIONS, InterruptedRun
from aiodist.tools.check_commands import add_check
from aiodist.tools.demo_commands import add_demo
from aiodist.tools.doctor import add_doctor
from aiodist.tools.exits import Exit
from aiodist.tools.launch import add_run
from aiodist.tools.trace_commands import add_trace
from aiodist.tools.usage import UsageError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0, 1 if what it checks does not hold, 2 for bad usage, 130 after Ctrl-C.

    Of `check`, 3 says that the program raised an exception of its own.

    Args:
        argv: the arguments; None: those of the process.

    Raises:
        SystemExit: from argparse: code 2 with a line on what is wrong, or 0 after `--help` and `--version`.
    """
    _print_anything()
    parser = build_parser()
    words, own = _split(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(words, Namespace(own=own))
    if own and "hash_seed" not in arguments:
        parser.error(f"unexpected arguments: -- {' '.join(own)}")
    if argv is None and "hash_seed" in arguments:
        fix_hashes(arguments.hash_seed(arguments))
    if argv is None and "patient" in arguments:
        INTERRUPTIONS.install()
    code = _run(arguments)
    if argv is None and "hash_seed" in arguments:
        _leave_threads(code)
    return code


def _run(arguments: Namespace) -> int:
    try:
        return int(arguments.command(arguments))
    except UsageError as error:
        return _end(f"aiodist: error: {error}", Exit.USAGE)
    except InterruptedRun as interruption:
        return _end_interrupted(str(interruption))
    except KeyboardInterrupt:
        return _end_interrupted("interrupted")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit has somewhere to go
        return Exit.BROKEN_PIPE


def _end_interrupted(text: str) -> int:
    """End with our own exit code.

    Python notes a KeyboardInterrupt that leaves an executed string, such as the methods of a new dataclass, and ends
    the process by SIGINT for it, though it was caught. The next string begins with a clean sheet.
    """
    exec("")  # noqa: S102
    return _end(text, Exit.INTERRUPTED)


def build_parser() -> ArgumentParser:
    """Return the parser of all commands."""
    parser = ArgumentParser(
        prog="aiodist",
        description="Synchronous data-parallel replicas as coroutines on one event loop, with every collective's order "
        "checked.",
    )
    parser.add_argument("--version", action="version", version=f"aiodist {aiodist.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_check(commands)
    add_demo(commands)
    add_doctor(commands)
    add_run(commands)
    add_trace(commands)
    return parser


def _leave_threads(code: int) -> None:
    """End the process at once where the program checked has left a thread that may never end."""
    if all(thread.daemon or thread is threading.main_thread() for thread in threading.enumerate()):
        return
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Part our own arguments from those of a program that is to be run, which stand behind ``--``."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _end(line: str, code: Exit) -> Exit:
    print(line, file=sys.stderr)
    return code


def _print_anything() -> None:
    """Let characters that the terminal's encoding lacks become question marks, not errors."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
