"""What a run shows on its way, in a terminal and elsewhere, and what Ctrl-C leaves."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from aiodist._demos.interruption import InterruptedRun
from aiodist._demos.terminal import Watch

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def pipe() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=False, highlight=False), out


def terminal(kind: str = "xterm") -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=True, width=100, _environ={"TERM": kind}), out


def dumb_terminal() -> tuple[Console, io.StringIO]:
    return terminal("dumb")


def watch(console: Console, steps: int, error: BaseException | None = None) -> None:
    """Watch a run of three steps, or of all, that ends with an error if there is one."""
    with Watch(console, steps, "2 replicas", "loss {:.3f}".format) as watch:
        for _ in range(3 if error else steps):
            watch.step(2.0)
        if error:
            raise error


def test_pipe_gets_a_line_at_the_first_step_and_at_each_tenth_of_the_run() -> None:
    console, out = pipe()
    watch(console, 50)
    lines = out.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "2 replicas, step  1 of 50: loss 2.000"
    assert lines[1].startswith("2 replicas, step  5 of 50: loss 2.000, ")
    assert all(line.endswith(" steps/s") for line in lines[1:])
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("make", [pipe, dumb_terminal])
@pytest.mark.parametrize(("steps", "printed"), [(1, 1), (7, 7), (25, 14)])
def test_last_step_always_has_a_line(make: Callable[[], tuple[Console, io.StringIO]], steps: int, printed: int) -> None:
    console, out = make()
    watch(console, steps)
    assert len(out.getvalue().splitlines()) == printed
    assert f"step {steps} of {steps}" in out.getvalue().splitlines()[-1]
    assert HIDE_CURSOR not in out.getvalue()


def test_terminal_gets_a_bar_and_its_cursor_back() -> None:
    console, out = terminal()
    watch(console, 20)
    assert HIDE_CURSOR in out.getvalue()
    assert out.getvalue().rindex(SHOW_CURSOR) > out.getvalue().rindex(HIDE_CURSOR)
    assert "20/20" in out.getvalue()
    assert "loss 2.000" in out.getvalue()


@pytest.mark.parametrize("make", [pipe, terminal])
@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (KeyboardInterrupt(), InterruptedRun, "^interrupted at step 3 of 20 on 2 replicas; nothing was saved$"),
        (ZeroDivisionError("mine"), ZeroDivisionError, "^mine$"),
    ],
)
def test_error_leaves_the_terminal_as_it_was(
    make: Callable[[], tuple[Console, io.StringIO]], error: BaseException, kind: type[BaseException], said: str
) -> None:
    console, out = make()
    with pytest.raises(kind, match=said):
        watch(console, 20, error)
    assert out.getvalue().count(HIDE_CURSOR) == out.getvalue().count(SHOW_CURSOR)


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_terminal_gets_colours_unless_no_color_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], coloured: bool
) -> None:
    out = io.StringIO()
    watch(Console(file=out, force_terminal=True, _environ={"TERM": "xterm-256color"} | variables), 20)
    assert ("\x1b[36m" in out.getvalue()) is coloured
