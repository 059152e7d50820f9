"""run_sync of a replica on a GPU: its device and stream are the current ones of whichever framework is loaded."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from aiodist import MirroredStrategy, get_replica_context
from aiodist.gpu import process
from aiodist.gpu.cuda_core import CudaCore, DeviceStream
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
        cupy = SimpleNamespace(Device=self.entered("cupy device"), ExternalStream=self.entered("cupy stream"))
        numba = SimpleNamespace(gpus={k: self.entered("numba device")(k) for k in range(2)})
        return {"torch": SimpleNamespace(cuda=torch), "cupy": SimpleNamespace(cuda=cupy), "numba.cuda": numba}


@pytest.fixture
def frameworks(monkeypatch: pytest.MonkeyPatch) -> Frameworks:
    planted = Frameworks()
    for name, module in planted.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return planted


async def thread_of(frameworks: Frameworks, device: str) -> None:
    async def step() -> None:
        await get_replica_context().run_sync(frameworks.log.append, "the function")

    await MirroredStrategy([device]).run(step)


@pytest.mark.anyio
async def test_function_runs_on_the_replicas_device_and_stream(
    plant: Callable[..., Any], frameworks: Frameworks, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(2)
    streams = {("GPU:1", 1): DeviceStream(1, SimpleNamespace(handle=99))}
    monkeypatch.setattr(FakeDriver, "replica_stream", lambda self, name, device: streams[name, device])
    await thread_of(frameworks, "GPU:1")
    assert frameworks.log == [
        "enter torch device(1,)",
        "enter torch stream((99, 1),)",
        "enter cupy device(1,)",
        "enter cupy stream(99, 1)",
        "enter numba device(1,)",
        "the function",
        "leave numba device",
        "leave cupy stream",
        "leave cupy device",
        "leave torch stream",
        "leave torch device",
    ]


@pytest.mark.anyio
async def test_without_cuda_core_frameworks_use_streams_of_their_own(
    plant: Callable[..., Any], frameworks: Frameworks, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(2)
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    monkeypatch.setattr(process, "executor", CudaCore)
    await thread_of(frameworks, "GPU:0")
    assert [line for line in frameworks.log if line.startswith("enter")] == [
        "enter torch device(0,)",
        "enter cupy device(0,)",
        "enter numba device(0,)",
    ]


@pytest.mark.anyio
async def test_replica_on_a_cpu_touches_no_gpu(frameworks: Frameworks) -> None:
    await thread_of(frameworks, "CPU:0")
    assert frameworks.log == ["the function"]
