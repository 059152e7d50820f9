"""The entry point of `aiodist` and `python -m aiodist`, and the `demo` command."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import aiodist
from aiodist._arrays.environment import completes_words, fix_hashes, launched
from aiodist._tools.check import add_check, add_explain
from aiodist._tools.doctor import add_doctor
from aiodist._tools.launch import add_run, launch
from aiodist._tools.trace.show import add_trace
from aiodist._tools.usage import Commands, Exit, Parser, UsageError, natural, positive, print_help

_CANNOT_WRITE = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EBADF, errno.EIO}
_TEXT = """\
Train a character language model in NumPy on the manual pages in the standard library (pydoc_data.topics). Each replica
computes the gradient of its part of a batch in the worker thread of its device, and an all_reduce sums the gradients.
The exit code is 1 if the replicas end with different weights.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command with these arguments, by default those of the process; return the exit code.

    Raises:
        SystemExit: from argparse: code 2 after a usage error, or 0 after `--help` and `--version`.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # rather than lose a report for a character that cannot be encoded
    parser = build_parser()
    if completes_words():
        with suppress(ImportError):  # the extra "completion"
            import argcomplete

            argcomplete.autocomplete(parser)  # exits if a shell has asked for completions
    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    arguments = Namespace(own=words[end + 1 :])  # the arguments of the program to check

    def command() -> int:
        parser.parse_args(words[:end], arguments)
        is_check = "hash_seed" in arguments
        if "program" in arguments:
            arguments.arguments += words[end:]  # `run` passes them on with the `--`
        elif arguments.own and not is_check:
            parser.error(f"unexpected arguments: -- {' '.join(arguments.own)}")
        if argv is None and is_check:
            fix_hashes(arguments.hash_seed(arguments))
        return int(arguments.command(arguments))

    code = _exit_code_of(command)
    if argv is None and code == Exit.INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C must not interrupt the end of the process
    left = [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
    if argv is None and "hash_seed" in arguments and left:  # by the program that was checked; they may never end
        sys.stderr.flush()
        os._exit(code)
    return code


def build_parser() -> ArgumentParser:
    """Return the parser of all commands."""
    parser = Parser(
        prog="aiodist",
        description="Synchronous data-parallel replicas as coroutines on one event loop, with the order of every "
        "collective checked.",
    )
    parser.add_argument("--version", action="version", version=f"aiodist {aiodist.__version__}")
    commands: Any = parser.add_subparsers(title="commands", metavar="COMMAND")
    parser.set_defaults(command=partial(print_help, parser))
    for add in (add_check, _add_demo, add_doctor, add_explain, add_run, add_trace):
        add(commands)
    return parser


def _exit_code_of(command: Callable[[], int]) -> int:
    """Run a command; return the exit code. An error or an interruption that ends it is reported in one line."""
    try:
        try:
            return command()
        finally:
            if sys.stdout is not None:  # None: closed
                sys.stdout.flush()  # at the end of the process a failure could not be reported
    except UsageError as error:
        print(f"aiodist: error: {error}", file=sys.stderr)
        return Exit.USAGE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except OSError as error:
        if error.errno not in _CANNOT_WRITE:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that the flush at exit succeeds
        if error.errno == errno.EPIPE:
            return Exit.BROKEN_PIPE
        print(f"aiodist: error: cannot write the output: {error.strerror}", file=sys.stderr)
        return Exit.FAILED


# The demos.


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="run a demo: training, or the report on a mistake",
        description="Run a demo: training, or the report on a mistake. Neither needs data or a network.",
    )
    demos = demo.add_subparsers(title="demos", metavar="DEMO")
    demo.set_defaults(command=partial(print_help, demo))
    text = demos.add_parser("text", help="train a character language model on the Python manual", description=_TEXT)
    option = text.add_argument
    option("-n", "--replicas", type=positive, metavar="N", default=4, help="how many replicas (default: %(default)s)")
    option("--workers", type=positive, metavar="N", help="distribute the replicas over N processes")
    option("--steps", type=positive, metavar="N", default=1300, help="how many steps (default: %(default)s)")
    same = "the same seed gives the same weights (default: %(default)s)"
    option("--seed", type=natural, metavar="N", default=0, help=same)
    text.set_defaults(command=_run_text)
    mismatch = demos.add_parser(
        "mismatch",
        help="show the report on a program in which one replica takes another branch",
        description="Run a faulty program and print the report on it. The exit code is 0: the report is the purpose.",
    )
    mismatch.set_defaults(command=_run_mismatch)


def _run_text(arguments: Namespace) -> int:
    from aiodist._demos.text import run_text

    replicas, workers = arguments.replicas, arguments.workers
    if workers is not None and replicas < workers:
        raise UsageError(f"--replicas {replicas} with --workers {workers}: each worker needs at least one")
    started = launched()
    if started is None and workers is not None and workers > 1:
        return launch(workers, [sys.executable, *sys.orig_argv[1:]])
    size, rank = (started.workers, started.rank) if started is not None else (1, 0)
    if workers not in {None, size}:
        raise UsageError(f"--workers {workers} in a job of {size} workers: omit --workers or the launcher")
    if workers is None:
        strategy: aiodist.Strategy = aiodist.MirroredStrategy(replicas)
    else:
        begin, end = (replicas * k // workers for k in (rank, rank + 1))
        strategy = aiodist.MultiWorkerMirroredStrategy(devices=[f"CPU:{index}" for index in range(begin, end)])
    return Exit.DONE if run_text(strategy, steps=arguments.steps, seed=arguments.seed) else Exit.FAILED


def _run_mismatch(_: Namespace) -> Exit:
    from aiodist._demos.mismatch import run_mismatch

    return Exit.DONE if run_mismatch() else Exit.FAILED
