"""run_sync of a replica on a GPU: its device and stream are the current ones of every loaded framework."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from aiodist import MirroredStrategy, get_replica_context
from aiodist._arrays import device as frameworks
from aiodist._gpu.cuda_core import DeviceStream
from tests.gpu.fake_driver import FakeDriver

OWN = DeviceStream(1, SimpleNamespace(handle=99))
"""The replica's stream."""


@pytest.fixture
def log(plant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a log of the contexts of planted torch, cupy and numba.cuda, and of the driver's calls, in order."""
    log: list[Any] = plant(2).driver.log

    def entered(what: str) -> Callable[..., Any]:
        @contextmanager
        def context(*args: Any, **_: Any) -> Iterator[None]:
            log.append(f"enter {what}{args}")
            yield
            log.append(f"leave {what}")

        return context

    torch = SimpleNamespace(
        is_available=lambda: True,
        device=entered("torch device"),
        stream=entered("torch stream"),
        ExternalStream=lambda handle, device: (handle, device),
    )
    cupy = SimpleNamespace(Device=entered("cupy device"), Stream=SimpleNamespace(from_external=entered("cupy stream")))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=torch))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cupy))
    monkeypatch.setitem(sys.modules, "numba.cuda", SimpleNamespace(gpus={1: entered("numba device")(1)}))
    for name, handle in {"torch": 7, "cupy": 0, "numba": 2}.items():  # CuPy's default stream, and each thread's own
        monkeypatch.setitem(frameworks.TYPES, name, SimpleNamespace(stream={1: handle, 0: 0}.get))
    monkeypatch.setattr(FakeDriver, "stream", lambda _, device, name: {("GPU:1", 1): OWN}[name, device])
    return log


@pytest.mark.anyio
@pytest.mark.parametrize("device", ["GPU:1", "CPU:0"])
async def test_run_sync_uses_the_replicas_device_and_stream_in_order(log: list[Any], device: str) -> None:
    async def step() -> None:
        await get_replica_context().run_sync(log.append, "the function")

    await MirroredStrategy([device]).run(step)
    callers = [("foreign", 1, 1), ("foreign", 1, 7)]
    wanted = [
        *[step for stream in callers for step in (("record", stream), ("wait", OWN))],
        "enter torch device(1,)",
        "enter torch stream((99, 1),)",
        "enter cupy device(1,)",
        "enter cupy stream(namespace(handle=99),)",
        "enter numba device(1,)",
        "the function",
        "leave numba device",
        "leave cupy stream",
        "leave cupy device",
        "leave torch stream",
        "leave torch device",
        ("record", OWN),
        *[("wait", stream) for stream in callers],
    ]
    found = [entry[:2] if isinstance(entry, tuple) else entry for entry in log]
    assert found == (wanted if device == "GPU:1" else ["the function"])
