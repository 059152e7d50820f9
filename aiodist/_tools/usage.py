"""Exit codes, usage errors, and types of arguments."""

from __future__ import annotations

import math
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _SubParsersAction
from contextlib import suppress
from enum import IntEnum
from typing import Any, TypeAlias

Commands: TypeAlias = "_SubParsersAction[ArgumentParser]"


class Exit(IntEnum):
    """Exit codes."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    RAISED = 3
    INTERRUPTED = 130  # 128 + SIGINT, as in shells
    BROKEN_PIPE = 141  # 128 + SIGPIPE


class UsageError(Exception):
    """The arguments are wrong or contradict each other; the command prints the message and exits with code 2."""


class Parser(ArgumentParser):
    """A parser that raises an OSError if its help or version cannot be written; argparse ignores that."""

    def _print_message(self, message: str, file: Any = None) -> None:
        print(message, end="", file=file or sys.stderr)


def print_help(parser: ArgumentParser, _: Namespace) -> Exit:
    """Print a parser's help: the command when no subcommand is given."""
    parser.print_help()
    return Exit.DONE


# Types of arguments: argparse turns their errors into one line and exit code 2.


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    return natural(text, least=1)


def natural(text: str, least: int = 0) -> int:
    """Read a whole number of at least 0."""
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """Read a duration in seconds."""
    with suppress(ValueError):
        if 0.0 < (value := float(text)) < math.inf:
            return value
    raise ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
