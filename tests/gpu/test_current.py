"""run_sync of a replica on a GPU: its device and stream are the current ones of whichever framework is loaded."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from aiodist import MirroredStrategy, get_replica_context
from aiodist._arrays import device as frameworks_of
from tests.gpu.fake_driver import FakeDriver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Frameworks:
    """Planted torch, cupy and numba.cuda; what is entered and left, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def entered(self, what: str) -> Callable[..., Any]:
        @contextmanager
        def context(*args: Any, **kwargs: Any) -> Iterator[None]:
            self.log.append(f"enter {what}{args or ''}")
            yield
            self.log.append(f"leave {what}")

        return context

    def modules(self) -> dict[str, Any]:
        torch = SimpleNamespace(
            is_available=lambda: True,
            device=self.entered("torch device"),
            stream=self.entered("torch stream"),
            ExternalStream=lambda handle, device: (handle, device),
        )
        cupy = SimpleNamespace(
            Device=self.entered("cupy device"), Stream=SimpleNamespace(from_external=self.entered("cupy stream"))
        )
        numba = SimpleNamespace(gpus={k: self.entered("numba device")(k) for k in range(2)})
        return {"torch": SimpleNamespace(cuda=torch), "cupy": SimpleNamespace(cuda=cupy), "numba.cuda": numba}


@pytest.fixture
def frameworks(monkeypatch: pytest.MonkeyPatch) -> Frameworks:
    planted = Frameworks()
    for name, module in planted.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name, handle in {"torch": 7, "cupy": 0, "numba": 2}.items():  # CuPy's default stream, and each thread's own
        monkeypatch.setitem(frameworks_of.TYPES, name, SimpleNamespace(stream={1: handle, 0: 0}.get))
    return planted


@dataclass(frozen=True)
class Own:
    """The replica's stream."""

    handle = 99
    stream = "cuda.core's"


async def thread_of(frameworks: Frameworks, device: str) -> None:
    async def step() -> None:
        await get_replica_context().run_sync(frameworks.log.append, "the function")

    await MirroredStrategy([device]).run(step)


@pytest.mark.anyio
async def test_function_runs_on_the_replicas_device_and_stream_in_order_with_its_callers(
    plant: Callable[..., Any], frameworks: Frameworks, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = plant(2)
    streams = {("GPU:1", 1): Own()}
    monkeypatch.setattr(FakeDriver, "stream", lambda self, device, name: streams[name, device])
    log = frameworks.log = machine.driver.log
    await thread_of(frameworks, "GPU:1")
    callers = [("foreign", 1, 1), ("foreign", 1, 7)]
    assert [entry[:2] if isinstance(entry, tuple) else entry for entry in log] == [
        *[step for stream in callers for step in (("record", stream), ("wait", Own()))],
        "enter torch device(1,)",
        "enter torch stream((99, 1),)",
        "enter cupy device(1,)",
        """enter cupy stream("cuda.core's",)""",
        "enter numba device(1,)",
        "the function",
        "leave numba device",
        "leave cupy stream",
        "leave cupy device",
        "leave torch stream",
        "leave torch device",
        ("record", Own()),
        *[("wait", stream) for stream in callers],
    ]


@pytest.mark.anyio
async def test_replica_on_a_cpu_touches_no_gpu(frameworks: Frameworks) -> None:
    await thread_of(frameworks, "CPU:0")
    assert frameworks.log == ["the function"]
