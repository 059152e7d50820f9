"""How far a run has come: a bar in a terminal, plain lines anywhere else, one clear line when Ctrl-C ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aiodist.demos.endings import InterruptedRun

_REFRESH_SECONDS = 0.1
_SILENCE_SECONDS = 10.0
_SMOOTHING = 0.95


class Display(Protocol):
    """What a run's progress is shown on."""

    def start(self) -> None:
        """Take the place that is needed."""
        ...

    def show(self, done: int, text: str) -> None:
        """Show that so many steps are done, and what there is to say."""
        ...

    def stop(self) -> None:
        """Leave the terminal as it was found."""
        ...


class Bar:
    """A bar that is drawn in place, at most ten times a second, and by no thread of its own."""

    def __init__(self, console: Console, steps: int, title: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", style="cyan"),
            TimeElapsedColumn(),
        )
        self._progress = Progress(*columns, console=console, auto_refresh=False)
        self._task = self._progress.add_task(title, total=steps, text="")
        self._steps = steps
        self._drawn = 0.0

    def start(self) -> None:
        """Draw the empty bar."""
        self._progress.start()

    def show(self, done: int, text: str) -> None:
        """Draw it anew, unless that was just done."""
        now = time.perf_counter()
        self._progress.update(self._task, completed=done, text=text)
        if done == self._steps or now - self._drawn > _REFRESH_SECONDS:
            self._progress.refresh()
            self._drawn = now

    def stop(self) -> None:
        """Leave the last bar, and give the cursor back."""
        self._progress.stop()


class Lines:
    """A few lines over a run, for files, pipes and terminals that cannot move the cursor."""

    def __init__(self, console: Console, steps: int, title: str, lines: int) -> None:
        self._console = console
        self._title, self._steps = title, steps
        self._every = max(steps // lines, 1)
        self._printed = 0.0

    def start(self) -> None:
        """Print nothing yet."""

    def show(self, done: int, text: str) -> None:
        """Print a line if it is time for one, and let no buffer keep it."""
        if self._is_due(done):
            line = f"{self._title}, step {done:>{len(str(self._steps))}} of {self._steps}: {text}"
            self._console.print(line, soft_wrap=True)
            self._console.file.flush()
            self._printed = time.perf_counter()

    def stop(self) -> None:
        """Print nothing more."""

    def _is_due(self, done: int) -> bool:
        """Whether this is the first step, a round one, or the last, or nothing was said for long."""
        silent = time.perf_counter() - self._printed
        return done in {1, self._steps} or done % self._every == 0 or silent > _SILENCE_SECONDS


class Watch:
    """Follows one run; a context manager around it.

    Args:
        console: where to show it.
        steps: how many steps there will be.
        title: what runs, such as ``4 replicas``.
        wording: what to say about a loss, in nats.
        lines: how many lines to print over the run where there is no place for a bar.

    Raises:
        InterruptedRun: out of the block, in place of KeyboardInterrupt.
    """

    def __init__(
        self, console: Console, steps: int, title: str, wording: Callable[[float], str], *, lines: int = 10
    ) -> None:
        in_place = console.is_terminal and not console.is_dumb_terminal
        self._display: Display = Bar(console, steps, title) if in_place else Lines(console, steps, title, lines)
        self._title, self._wording = title, wording
        self._steps, self._done = steps, 0
        self._smooth = 0.0
        self._first = 0.0

    def step(self, loss: float) -> None:
        """Take note of one more step and its loss."""
        self._done += 1
        self._smooth = _SMOOTHING * self._smooth + (1 - _SMOOTHING) * loss
        smooth = self._smooth / (1 - _SMOOTHING**self._done)  # corrected for its start at zero
        self._display.show(self._done, f"{self._wording(smooth)}{self._speed()}")

    def _speed(self) -> str:
        """Say how fast it goes, counted from the first step's end: what comes before is paid once."""
        now = time.perf_counter()
        if self._done == 1:
            self._first = now
            return ""
        return f", {(self._done - 1) / (now - self._first):.0f} steps/s"

    def __enter__(self) -> Self:
        self._display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.stop()
        if isinstance(error, KeyboardInterrupt):
            where = f"interrupted at step {self._done} of {self._steps} on {self._title}"
            raise InterruptedRun(f"{where}; nothing was saved") from None
