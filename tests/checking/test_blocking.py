"""A replica that holds up the event loop is noted, with the line at which it was."""

from __future__ import annotations

import time

import pytest

from aiodist import get_replica_context
from aiodist._checking.blocking import BlockingWatch
from aiodist.testing import run_replicas


def test_replica_that_holds_up_the_loop_is_noted_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiodist._checking.blocking._PAUSE", 0.001)
    monkeypatch.setattr("aiodist._checking.blocking._LONG", 0.0)

    def computes() -> None:
        until = time.monotonic() + 20
        while time.monotonic() < until:
            for _, place in list(watch.found):
                if place.function == "computes":
                    return

    async def replica() -> None:
        ctx = get_replica_context()
        if ctx.replica_id_in_sync_group == 1:
            computes()
        await ctx.barrier()

    with BlockingWatch() as watch:
        run_replicas(replica, 3)
    assert ("replica 1", "computes") in {(who, place.function) for who, place in watch.found}
