"""What a run shows on its way, in a terminal and elsewhere, and what Ctrl-C leaves."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from aiodist._demos.interruption import InterruptedRun
from aiodist._demos.terminal import Watch

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def end(error: BaseException | None) -> None:
    if error is not None:
        raise error


def watched(steps: int, terminal: str = "", error: BaseException | None = None, **variables: str) -> str:
    """Watch a run of so many steps in a terminal of a kind, or in a pipe; return what is printed.

    An error, if there is one, ends it at step 3, and what comes out of that stands at the end.
    """
    out = io.StringIO()
    environment = {"TERM": terminal, **variables}
    console = Console(file=out, force_terminal=bool(terminal), width=100, highlight=False, _environ=environment)
    try:
        with Watch(console, steps, "2 replicas", "loss {:.3f}".format) as watch:
            for _ in range(3 if error else steps):
                watch.step(2.0)
            end(error)
    except (InterruptedRun, ZeroDivisionError) as caught:
        return f"{out.getvalue()}{type(caught).__name__}: {caught}"
    return out.getvalue()


def test_pipe_gets_a_line_at_the_first_step_and_at_each_tenth_of_the_run() -> None:
    printed = watched(50)
    lines = printed.splitlines()
    assert len(lines) == 11
    assert lines[0] == "2 replicas, step  1 of 50: loss 2.000"
    assert lines[1].startswith("2 replicas, step  5 of 50: loss 2.000, ")
    assert all(line.endswith(" steps/s") for line in lines[1:])
    assert "\x1b" not in printed


@pytest.mark.parametrize("terminal", ["", "dumb"])
@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (7, 7), (25, 14)])
def test_last_step_always_has_a_line(terminal: str, steps: int, lines: int) -> None:
    printed = watched(steps, terminal)
    assert len(printed.splitlines()) == lines
    assert f"step {steps} of {steps}" in printed.splitlines()[-1]
    assert HIDE_CURSOR not in printed


@pytest.mark.parametrize("no_color", ["", "1"])
def test_terminal_gets_a_bar_and_its_cursor_back_and_colours_unless_no_color_says_otherwise(no_color: str) -> None:
    printed = watched(20, "xterm-256color", NO_COLOR=no_color)
    assert HIDE_CURSOR in printed
    assert printed.rindex(SHOW_CURSOR) > printed.rindex(HIDE_CURSOR)
    assert "20/20" in printed
    assert "loss 2.000" in printed
    assert ("\x1b[36m" in printed) is not bool(no_color)


@pytest.mark.parametrize("terminal", ["", "xterm"])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyboardInterrupt(), "InterruptedRun: interrupted at step 3 of 20 on 2 replicas; nothing was saved"),
        (ZeroDivisionError("mine"), "ZeroDivisionError: mine"),
    ],
)
def test_error_leaves_the_terminal_as_it_was(terminal: str, error: BaseException, said: str) -> None:
    printed = watched(20, terminal, error)
    assert printed.endswith(said)
    assert printed.count(HIDE_CURSOR) == printed.count(SHOW_CURSOR) == bool(terminal)
