"""The command line: `aiodist`, and `python -m aiodist`."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import aiodist
from aiodist._arrays.environment import completes_words, fix_hashes
from aiodist._demos.interruption import InterruptedRun
from aiodist._tools.check import add_check, add_explain
from aiodist._tools.demo import add_demo
from aiodist._tools.doctor import add_doctor
from aiodist._tools.launch.run import add_run
from aiodist._tools.trace.command import add_trace
from aiodist._tools.usage import Exit, UsageError, print_help


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0, 1 if what it checks does not hold, 2 for bad usage, 130 after Ctrl-C.

    `check` returns 3 if the program raised an exception of its own.

    Args:
        argv: the arguments; None: those of the process.

    Raises:
        SystemExit: from argparse: code 2 with a line on what is wrong, or 0 after `--help` and `--version`.
    """
    _print_anything()
    parser = build_parser()
    if completes_words():
        _complete(parser)
    words = list(sys.argv[1:] if argv is None else argv)
    at = words.index("--") if "--" in words else len(words)
    own = words[at + 1 :]  # the arguments of a program that is to be checked
    arguments = parser.parse_args(words[:at], Namespace(own=own))
    checks = "hash_seed" in arguments
    if own and not checks:
        parser.error(f"unexpected arguments: -- {' '.join(own)}")
    if argv is None and checks:
        fix_hashes(arguments.hash_seed(arguments))
    code = run(arguments)
    if argv is None and code == Exit.INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C must not break into the end of the process
    if argv is None and checks:
        _leave_threads(code)
    return code


def build_parser() -> ArgumentParser:
    """Return the parser of all commands."""
    parser = ArgumentParser(
        prog="aiodist",
        description="Synchronous data-parallel replicas as coroutines on one event loop, with the order of every "
        "collective checked.",
    )
    parser.add_argument("--version", action="version", version=f"aiodist {aiodist.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(command=partial(print_help, parser))
    for add in (add_check, add_demo, add_doctor, add_explain, add_run, add_trace):
        add(commands)
    return parser


def _complete(parser: ArgumentParser) -> None:
    """Print the shell's possible completions, and exit; the shell requests them by an environment variable."""
    with suppress(ImportError):  # the extra "completion"
        import argcomplete

        argcomplete.autocomplete(parser)


def run(arguments: Namespace) -> int:
    """Run the command of parsed arguments; return the exit code."""
    try:
        return int(arguments.command(arguments))
    except UsageError as error:
        return _end(f"aiodist: error: {error}", Exit.USAGE)
    except InterruptedRun as interruption:
        return _end(str(interruption), Exit.INTERRUPTED)
    except KeyboardInterrupt:
        return _end("interrupted", Exit.INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit does not fail
        return Exit.BROKEN_PIPE


def _end(line: str, code: Exit) -> int:
    print(line, file=sys.stderr)
    return code


def _leave_threads(code: int) -> None:
    """End the process at once if the program that was checked has left a thread that may never end."""
    if all(thread.daemon or thread is threading.main_thread() for thread in threading.enumerate()):
        return
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _print_anything() -> None:
    """Print characters that the terminal's encoding lacks as question marks, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
