"""A pytest plugin: test functions that run on replicas, under one schedule or many.

Enabled by name only, with ``-p aiodist.testing.pytest_plugin`` or, in the top ``conftest.py``,
``pytest_plugins = ["aiodist.testing.pytest_plugin"]``:

    @pytest.mark.replicas(4, schedules=50)
    async def test_all_agree():
        ctx = aiodist.get_replica_context()
        assert await ctx.all_reduce("SUM", 1) == 4

The test function is the replica function; fixtures are made once and passed to all replicas in all schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest

from aiodist._runtime.outcome import without_frames_before
from aiodist.testing import explore

_MARKER = (
    "replicas(n, schedules=1, seed=0, replay=None, timeout=60.0): run the test function on n replicas under that many "
    "schedules; see aiodist.testing.explore"
)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Replace a marked test function by a plain one that runs it on replicas, before other plugins see it."""
    __tracebackhide__ = True
    marker = pyfuncitem.get_closest_marker("replicas")
    if marker is None:
        return (yield)
    own = pyfuncitem.obj
    if not marker.args and "n" not in marker.kwargs:
        pytest.fail("the marker needs a number of replicas, e.g. @pytest.mark.replicas(2)", pytrace=False)
    owner = pyfuncitem.module if pyfuncitem.instance is None else pyfuncitem.instance
    function = getattr(owner, pyfuncitem.originalname, own)  # without the wrapper of another plugin
    pyfuncitem.obj = partial(_explore, function, _options(*marker.args, **marker.kwargs))
    try:
        return (yield)
    finally:
        pyfuncitem.obj = own


def _explore(fn: Callable[..., Any], options: dict[str, Any], **kwargs: Any) -> None:
    __tracebackhide__ = True
    try:
        explore(fn, kwargs=kwargs, **options)
    except Exception as error:  # noqa: BLE001  (raised again, without our frames)
        raise without_frames_before(error) from error.__cause__


def _options(
    n: int, schedules: int = 1, seed: int = 0, replay: str | None = None, timeout: float | None = 60.0
) -> dict[str, Any]:
    return {"n": n, "schedules": schedules, "seed": seed, "replay": replay, "timeout": timeout}


_options.__qualname__ = "pytest.mark.replicas"  # named in the TypeError for wrong arguments
