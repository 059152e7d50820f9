"""How the command line is used and how it ends: exit codes, bad usage, and what its arguments may be."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from enum import IntEnum


class Exit(IntEnum):
    """Exit codes."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    RAISED = 3
    INTERRUPTED = 130  # 128 + SIGINT, as in shells
    BROKEN_PIPE = 141  # 128 + SIGPIPE


class UsageError(Exception):
    """The arguments are wrong or contradict each other; the message is printed."""


def print_help(parser: ArgumentParser, _: Namespace) -> Exit:
    """Print a parser's help, if no subcommand was given."""
    parser.print_help()
    return Exit.DONE


# Types of arguments: argparse turns their errors into one line and exit code 2.


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """Read a whole number of at least 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return int(text)


def devices(text: str) -> tuple[str, ...]:
    """Read device names, separated by commas; the strategy knows which there are."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise ArgumentTypeError(f"expected device names separated by commas, such as CPU:0,CPU:1, got {text!r}")
    return found
