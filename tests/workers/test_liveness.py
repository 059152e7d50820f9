"""Silent workers: which count as stopped, and what is reported of a loop that does not answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiodist._workers.control import SILENT_SECONDS, SUSPICIOUS_SECONDS, Pulse, trouble
from aiodist._workers.layout import Hello


@pytest.mark.parametrize(
    ("silent", "told"),
    [
        (SUSPICIOUS_SECONDS / 2, None),
        (SILENT_SECONDS - 1, None),
        (SILENT_SECONDS + 1, "has been silent for 61 s, though its system answers: it is stopped"),
    ],
)
def test_worker_on_another_machine_has_a_minute_or_what_the_user_says(silent: float, told: str | None) -> None:
    hello = Hello("1", ("CPU:0",), "host", "a machine that is not this one", 1)
    assert trouble(hello, silent, 0.0) == told
    assert trouble(hello, silent, 90.0) is None


def test_pulse_tells_for_how_long_a_loop_is_silent_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("aiodist._workers.control.time.monotonic", lambda: now)
    questions: list[Callable[[], Any]] = []

    def ask(answer: Callable[[], Any]) -> bool:
        questions.append(answer)
        return True

    pulse = Pulse(ask)
    now = 50.6
    pulse.beat(now)
    pulse.beat(now)
    (answer,) = questions
    assert pulse.silent_seconds < 1
    now = 52.0
    assert pulse.silent_seconds > 1
    told, file, _ = pulse.silence()
    assert file.endswith("control.py")
    assert told.startswith("its event loop has been silent for 2.0 s: something blocks it. Its thread is at\n")
    assert "test_liveness.py:" in told
    assert "in test_pulse_tells_for_how_long" in told
    answer()
    now = 53.5
    assert pulse.silent_seconds < 1
