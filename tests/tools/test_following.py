"""What the launcher makes of the notes of workers that wait to meet the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aiodist._arrays import environment
from aiodist._tools.launch.following import LAST_WORDS_SECONDS, _Asked, _Job
from aiodist.workers.meeting import Stage, told_to_the_launcher


def _complaint(notes: Path, **what: str) -> str | None:
    for name, text in what.items():
        (notes / name.replace("_", ".")).write_text(text)
    job = _Job([], notes, _Asked(), None)
    return job._waits_in_vain(1.0) or job._waits_in_vain(1.0 + LAST_WORDS_SECONDS)


@pytest.mark.parametrize(
    ("notes", "in_vain"),
    [
        ({"ended_1": "0", "meeting_2": ""}, True),
        ({"ended_1": "0", "meeting_2": "", "met_2": "1"}, True),
        ({"ended_1": "0", "met_1": "1", "meeting_2": "", "met_2": "1"}, True),
        ({"leaving_1": "", "met_1": "1", "meeting_2": "", "met_2": "1"}, True),
        ({"leaving_1": "", "met_1": "2", "meeting_2": "", "met_2": "1"}, False),
        (
            {"ended_1": "0", "met_1": "2", "meeting_2": "", "met_2": "1"},
            False,
        ),  # they have met, and it is yet to say so
        ({"ended_1": "0", "met_1": "1", "meeting_2": ""}, False),
        ({"ended_1": "0", "met_1": "1", "met_2": "1"}, False),
        ({"met_1": "1", "meeting_2": "", "met_2": "1"}, False),
        ({"ended_1": "0", "meeting_1": ""}, False),
    ],
)
def test_waits_in_vain(tmp_path: Path, notes: dict[str, str], in_vain: bool) -> None:
    assert (_complaint(tmp_path, **notes) is not None) is in_vain


def test_words(tmp_path: Path) -> None:
    assert _complaint(tmp_path, ended_1="0", meeting_2="", meeting_3="") == (
        "the worker of process 1 has ended without making a MultiWorkerMirroredStrategy, and 2 others wait for it "
        "there; every worker must run the same program"
    )
    assert _complaint(tmp_path, met_1="1", met_2="1") == (
        "the worker of process 1 has ended after making 1 MultiWorkerMirroredStrategy, and 1 other waits for it to "
        "make the next; every worker must run the same program"
    )


def test_notes_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def there() -> dict[str, str]:
        return {note.name.partition(".")[0]: note.read_text() for note in tmp_path.iterdir()}

    monkeypatch.setattr(environment, "agent", lambda: None)
    monkeypatch.setattr(environment, "notes", lambda: str(tmp_path))
    for times in range(1, 3):
        with told_to_the_launcher():
            assert Stage.MEETING.note in there()
        assert there() == {"met": str(times)}
    with pytest.raises(ValueError, match="apart"), told_to_the_launcher():
        raise ValueError("apart")
    assert there() == {"met": "2"}
    assert (tmp_path / f"met.{os.getpid()}").exists()


def test_those_with_an_earlier_strategy_have_time_to_raise_it_themselves(tmp_path: Path) -> None:
    for name, text in {"ended.1": "0", "met.1": "1", "meeting.2": "", "met.2": "1"}.items():
        (tmp_path / name).write_text(text)
    job = _Job([], tmp_path, _Asked(), None)
    assert job._waits_in_vain(1.0) is None
    (tmp_path / "meeting.2").unlink()
    assert job._waits_in_vain(2.0) is None
    (tmp_path / "meeting.2").touch()
    assert job._waits_in_vain(2.0 + LAST_WORDS_SECONDS) is None
    assert job._waits_in_vain(2.0 + 2 * LAST_WORDS_SECONDS) is not None
