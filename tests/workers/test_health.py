"""Silent workers, links between workers, and the launcher's line to agents on other machines, each by itself."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiodist._tools.launch.switchboard import Switchboard
from aiodist.workers import health
from aiodist.workers.health import FROZEN_SECONDS, SILENT_SECONDS, SUSPICIOUS_SECONDS, Health
from aiodist.workers.joining import Hello
from aiodist.workers.links import MOST_WITH_ALL, partners
from aiodist.workers.pulse import Pulse

ELSEWHERE = "a machine that is not this one"


def hello(agent: str | None) -> Hello:
    return Hello(("CPU:0",), ELSEWHERE, 1, None, agent)


class Asked:
    """Health of a worker on another machine, with a clock of its own and an agent that does not answer by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, agent: str | None = "1:token") -> None:
        self.now = 100.0
        self.asked = 0
        monkeypatch.setattr(health.time, "monotonic", lambda: self.now)  # type: ignore[attr-defined]
        self.health = Health([hello(None), hello(agent)], {1: "10.0.0.1"}, lambda *_: None)
        monkeypatch.setattr(self.health, "_ask_agent", self._count)

    def _count(self, _: int) -> None:
        self.asked += 1

    def after(self, seconds: float) -> str | None:
        self.now = 100.0 + seconds
        return self.health.trouble(1, seconds)


def test_worker_that_is_heard_of_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    assert asked.after(SUSPICIOUS_SECONDS / 2) is None
    assert asked.asked == 0


def test_busy_worker_whose_agent_answers_is_left_alone_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    for seconds in range(2, 500):
        assert asked.after(seconds) is None
        assert asked.health.told(1, "R") is None
    assert asked.asked > 200


def test_stopped_worker_is_told_by_its_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    assert asked.after(2) is None
    assert asked.health.told(1, "T") == "is stopped: the system has halted its process"


def test_worker_counts_as_stopped_when_its_agent_is_silent_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    assert asked.after(2) is None
    assert asked.health.told(1, "?") is None
    assert asked.after(FROZEN_SECONDS - 0.1) is None
    assert asked.after(FROZEN_SECONDS + 1) == (
        "is stopped: neither it nor its agent has said a word for 6 s, though its system does"
    )


def test_agent_that_has_answered_lately_counts_as_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch)
    asked.after(20)
    asked.health.told(1, "S")
    asked.health.told(1, "?")
    assert asked.after(20 + FROZEN_SECONDS - 0.1) is None
    assert asked.after(20 + FROZEN_SECONDS + 0.1) is not None


def test_worker_without_an_agent_has_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(monkeypatch, agent=None)
    assert asked.after(SILENT_SECONDS - 1) is None
    assert "has been silent for 61 s, though its system answers" in str(asked.after(SILENT_SECONDS + 1))


@given(st.integers(2, 5000), st.data())
def test_links_are_wanted_by_both_ends_and_are_few(size: int, data: Any) -> None:
    rank = data.draw(st.integers(1, size - 1))
    mine = partners(rank, size)
    assert rank not in mine
    assert 0 not in mine
    assert all(rank in partners(other, size) for other in mine)
    assert len(mine) <= (MOST_WITH_ALL if size <= MOST_WITH_ALL else 3 * size.bit_length())


def test_launcher_notes_what_agents_say_and_nothing_from_strangers(tmp_path: Path) -> None:
    switchboard = Switchboard(tmp_path)
    _, port, token = switchboard.address.rsplit(":", 2)
    lines = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(3)]
    agent, lost, stranger = lines
    for line, said in zip(lines, (token, token, "guessed"), strict=True):
        line.sendall(f"{said}\n".encode())
    agent.sendall(b"ended ab-12 3\n")
    stranger.sendall(b"x 9\n")
    lost.close()
    while len(list(tmp_path.iterdir())) < 2:
        switchboard.serve()
    switchboard.send(15)
    assert agent.recv(1) == bytes([15])
    assert stranger.recv(1) == b""
    switchboard.close()
    assert agent.recv(1) == b""
    assert (tmp_path / "ended.ab-12").read_text() == "3"
    assert sorted(note.read_text() for note in tmp_path.iterdir()) == ["1", "3"]
    for line in lines:
        line.close()


class Loop:
    """A listener whose loop answers when it is told to."""

    def __init__(self) -> None:
        self.questions: list[Any] = []

    def call_soon_threadsafe(self, fn: Any, *args: Any) -> None:
        self.questions.append((fn, args))


def test_pulse_tells_for_how_long_a_loop_is_silent_and_where(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("aiodist.workers.pulse.time.monotonic", lambda: now)
    loop: Any = Loop()
    pulse = Pulse()
    now = 52.0
    pulse.beat(loop, now)
    pulse.beat(loop, now)
    ((answer, arguments),) = loop.questions
    answer(*arguments)
    now = 55.5
    told = pulse.silence()
    assert told.startswith("its event loop has been silent for 3.5 s: something blocks it. Its thread is at\n")
    assert "test_health.py:" in told
    assert "in test_pulse_tells_for_how_long" in told
