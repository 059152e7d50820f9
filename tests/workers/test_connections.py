"""The first worker's connections: as many file descriptors as it needs, or an error that says what to do."""

from __future__ import annotations

import errno

import pytest

from aiodist._workers.addresses import allow_connections

resource = pytest.importorskip("resource")


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return the soft and hard limits that are set, the last one in force."""
    found = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: found[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: found.append(limits))
    return found


def test_soft_limit_is_left_alone_where_it_is_enough(limits: list[tuple[int, int]]) -> None:
    allow_connections(700)
    assert limits == [(1024, 4096)]


def test_soft_limit_is_raised_to_what_is_needed(limits: list[tuple[int, int]]) -> None:
    allow_connections(3000)
    assert limits[-1] == (3256, 4096)


def test_hard_limit_is_told_with_what_to_do(limits: list[tuple[int, int]]) -> None:
    with pytest.raises(
        OSError, match=r"each of the 4095 others, and so needs 4351 .* allows it 4096; raise the hard"
    ) as e:
        allow_connections(4095)
    assert e.value.errno == errno.EMFILE
    assert limits == [(1024, 4096)]
