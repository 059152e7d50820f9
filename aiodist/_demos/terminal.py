"""How far a run has come: a bar in a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from aiodist._demos.interruption import InterruptedRun

_REFRESH_SECONDS = 0.1
_SILENCE_SECONDS = 10.0
_SMOOTHING = 0.95
_LINES = 10


class Watch:
    """Shows the progress of one run; a context manager around it.

    Args:
        console: where to show it.
        steps: how many steps there will be.
        title: what runs, such as ``4 replicas``.
        describe: what to say about a loss, in nats.

    Raises:
        InterruptedRun: out of the block, in place of KeyboardInterrupt.
    """

    def __init__(self, console: Console, steps: int, title: str, describe: Callable[[float], str]) -> None:
        self._console, self._steps, self._title, self._describe = console, steps, title, describe
        self._in_place = console.is_interactive
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}", style="cyan"),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=console, auto_refresh=False)  # no thread of its own
        self._task = self._bar.add_task(title, total=steps, text="")
        self._done = 0
        self._smooth = 0.0
        self._first = self._shown = 0.0

    def step(self, loss: float) -> None:
        """Count one more step and its loss."""
        self._done += 1
        self._smooth = _SMOOTHING * self._smooth + (1 - _SMOOTHING) * loss
        smooth = self._smooth / (1 - _SMOOTHING**self._done)  # corrected for its start at zero
        now = time.perf_counter()
        self._first = self._first or now
        text = self._describe(smooth)
        if self._done > 1:  # what comes before the end of the first step is paid once
            text += f", {(self._done - 1) / (now - self._first):.0f} steps/s"
        if self._in_place:
            self._bar.update(self._task, completed=self._done, text=text)
        if self._is_due(now - self._shown):
            self._show(text)
            self._shown = now

    def _is_due(self, silent: float) -> bool:
        if self._in_place:
            return self._done == self._steps or silent > _REFRESH_SECONDS
        is_tenth = self._done % max(self._steps // _LINES, 1) == 0
        return self._done in {1, self._steps} or is_tenth or silent > _SILENCE_SECONDS

    def _show(self, text: str) -> None:
        if self._in_place:
            self._bar.refresh()
            return
        line = f"{self._title}, step {self._done:>{len(str(self._steps))}} of {self._steps}: {text}"
        self._console.print(line, soft_wrap=True)
        self._console.file.flush()

    def __enter__(self) -> Self:
        if self._in_place:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._in_place:
            self._bar.stop()  # leaves the last bar, and gives the cursor back
        if isinstance(error, KeyboardInterrupt):
            where = f"interrupted at step {self._done} of {self._steps} on {self._title}"
            raise InterruptedRun(f"{where}; nothing was saved") from None
