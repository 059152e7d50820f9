"""The rendezvous of workers: what they say of themselves, and that they have the same aiodist."""

from __future__ import annotations

import pytest

from aiodist._workers.layout import Hello, check_versions, made_differently


def hellos(count: int) -> list[Hello]:
    return [Hello("1.0", ("CPU:0",) * (rank + 1), f"host {rank}", "machine", rank, "a.py:3") for rank in range(count)]


def test_other_version_of_aiodist_is_refused() -> None:
    told = hellos(3)
    check_versions(told)
    told[1] = told[1]._replace(version="2.0")
    with pytest.raises(RuntimeError, match=r"1\.0 on workers 0 and 2; 2\.0 on worker 1"):
        check_versions(told)


def test_strategy_that_is_made_at_different_places() -> None:
    told = hellos(3)
    assert made_differently(told) == ""
    told[2] = told[2]._replace(place="a.py:7")
    assert made_differently(told).startswith(
        "The strategy was made by workers 0 and 1 at a.py:3 and by worker 2 at a.py:7"
    )
