"""What a run shows on its way, in a terminal and elsewhere, and what Ctrl-C leaves."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from aiodist.demos.endings import InterruptedRun
from aiodist.demos.progress import Watch

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def watched(console: Console, steps: int, *, upto: int | None = None, lines: int = 10) -> None:
    with Watch(console, steps, "2 replicas", "loss {:.3f}".format, lines=lines) as watch:
        for _ in range(steps if upto is None else upto):
            watch.step(2.0)
        if upto is not None:
            raise KeyboardInterrupt


def pipe() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, highlight=False), out


def terminal() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=100, _environ={"TERM": "xterm"}), out


def test_pipe_gets_a_line_at_the_first_step_and_at_each_tenth_of_the_run() -> None:
    console, out = pipe()
    watched(console, 50)
    lines = out.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "2 replicas, step  1 of 50: loss 2.000"
    assert lines[1].startswith("2 replicas, step  5 of 50: loss 2.000, ")
    assert lines[-1].startswith("2 replicas, step 50 of 50: loss 2.000, ")
    assert all(line.endswith(" steps/s") for line in lines[1:])
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(("steps", "lines", "printed"), [(1, 10, 1), (7, 10, 7), (25, 10, 14), (9, 2, 4), (100, 2, 3)])
def test_last_step_always_has_a_line(steps: int, lines: int, printed: int) -> None:
    console, out = pipe()
    watched(console, steps, lines=lines)
    assert len(out.getvalue().splitlines()) == printed
    assert f"step {steps} of {steps}" in out.getvalue().splitlines()[-1]


def test_terminal_gets_a_bar_and_its_cursor_back() -> None:
    console, out = terminal()
    watched(console, 20)
    assert HIDE_CURSOR in out.getvalue()
    assert out.getvalue().rindex(SHOW_CURSOR) > out.getvalue().rindex(HIDE_CURSOR)
    assert "20/20" in out.getvalue()
    assert "loss 2.000" in out.getvalue()


def test_dumb_terminal_gets_lines() -> None:
    out = io.StringIO()
    watched(Console(file=out, force_terminal=True, _environ={"TERM": "dumb"}), 20)
    assert len(out.getvalue().splitlines()) == 11
    assert HIDE_CURSOR not in out.getvalue()


@pytest.mark.parametrize("make", [pipe, terminal])
def test_interruption_says_where(make: Callable[[], tuple[Console, io.StringIO]]) -> None:
    console, out = make()
    with pytest.raises(InterruptedRun, match=r"^interrupted at step 3 of 20 on 2 replicas; nothing was saved$"):
        watched(console, 20, upto=3)
    assert out.getvalue().count(HIDE_CURSOR) == out.getvalue().count(SHOW_CURSOR)


def test_smoothed_loss_starts_at_the_first() -> None:
    console, out = pipe()
    with Watch(console, 1, "2 replicas", "loss {:.3f}".format) as watch:
        watch.step(4.0)
    assert "loss 4.000" in out.getvalue()


def test_other_errors_pass_through() -> None:
    console, out = terminal()
    with pytest.raises(ZeroDivisionError), Watch(console, 2, "2 replicas", str):
        raise ZeroDivisionError
    assert out.getvalue().endswith(SHOW_CURSOR)
