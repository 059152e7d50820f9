"""What a terminal gets: a bar, colours unless NO_COLOR says otherwise."""

from __future__ import annotations

import re
import sys

import pytest

from tests.tools.command import behind_pipe, in_terminal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="terminals are POSIX here")
RUN = ["demo", "text", "--steps", "5", "--replicas", "2"]
COLOUR = re.compile(r"\x1b\[[\d;]*3\d")


def test_terminal_gets_a_bar_with_bits_and_speed() -> None:
    ended = in_terminal(RUN)
    assert ended.code == 0
    assert "5/5" in ended.output
    assert re.search(r"\d\.\d\d bits/char, \d+ steps/s", ended.output)
    assert COLOUR.search(ended.output)


def test_no_color_is_obeyed() -> None:
    ended = in_terminal(RUN, NO_COLOR="1")
    assert ended.code == 0
    assert "5/5" in ended.output
    assert not COLOUR.search(ended.output)


def test_narrow_encoding_is_no_error() -> None:
    ended = behind_pipe(RUN, PYTHONIOENCODING="ascii")
    assert ended.code == 0
    assert ended.output.isascii()
    assert "\x1b" not in ended.output
