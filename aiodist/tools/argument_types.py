"""What command-line arguments may be; argparse turns the errors into one line and exit code 2."""

from __future__ import annotations

from argparse import ArgumentTypeError


def positive(text: str) -> int:
    """Read a whole number from 1 on."""
    return _whole(text, 1)


def natural(text: str) -> int:
    """Read a whole number from 0 on."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
    return int(text)


def names(text: str) -> tuple[str, ...]:
    """Read names, separated by commas."""
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise ArgumentTypeError(f"expected names separated by commas, got {text!r}")
    return found


def devices(text: str) -> tuple[str, ...]:
    """Read device names, separated by commas; what they may be is the strategy's to say."""
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise ArgumentTypeError(f"expected device names separated by commas, such as CPU:0,CPU:1, got {text!r}")
    return names
