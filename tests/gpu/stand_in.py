"""The real driver module, cuda.core and all, on a library that stands in for the CUDA driver's; see libcuda.c.

    LD_LIBRARY_PATH=FOLDER python -m tests.gpu.stand_in          # FOLDER holds what `build` made

This does not test the hardware, its timing, or what the CUDA driver refuses and the stand-in accepts.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import shutil
import subprocess
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from aiodist import MirroredStrategy, PerReplica, get_replica_context
from aiodist._gpu import enqueue
from aiodist._gpu.cuda_core import CudaCore
from aiodist._gpu.enqueue import Queue
from aiodist_kernels import ReduceOp
from aiodist_kernels.cuda.forms import Form
from tests.gpu.problem import Problem
from tests.kernels.arrays import BFLOAT16, SINGLE, assert_same_bits
from tests.kernels.cuda import on_host

_Launch = ctypes.CFUNCTYPE(
    None, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_uint
)


def build(folder: Path) -> bool:
    """Build the library in a folder; return whether there is a compiler for it."""
    compiler = shutil.which("cc")
    if compiler is None:
        return False
    source, library = Path(__file__).with_name("libcuda.c"), folder / "libcuda.so.1"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"], check=True)
    return True


class Loading(CudaCore):
    """The real driver, which records the forms of the kernels that it loads, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.library: Any = ctypes.CDLL("libcuda.so.1")
        self.forms: list[Form] = []
        self.errors: list[str] = []
        self._carry_out = _Launch(self.carry_out)
        self.library.stub_on_launch(self._carry_out)

    def load(self, device: int, form: Form) -> None:
        if not self.is_loaded(device, form):
            self.forms.append(form)
        super().load(device, form)

    def carry_out(self, library: int, name: bytes, arguments: Any, blocks: int, threads: int) -> None:
        try:
            form = self.forms[library]
            assert blocks > 0
            assert threads == 256
            count = 4 if form.tabled else form.count + 3
            given = [ctypes.c_int64.from_address(arguments[i]).value for i in range(count)]
            on_host.launch(form, given, lambda *_: None, lambda *_: None)
        except BaseException:  # noqa: BLE001  (callbacks must not raise)
            self.errors.append(traceback.format_exc())

    def put(self, device: int, values: np.ndarray) -> Any:
        with self.using():
            return self.upload(device, np.ascontiguousarray(values).reshape(-1).view(np.uint8))


def read(memory: Any, like: np.ndarray) -> np.ndarray:
    """Return the content of memory, which is the host's."""
    return np.frombuffer(ctypes.string_at(memory.address, like.nbytes), like.dtype).reshape(like.shape)


def reduced(driver: Loading, op: ReduceOp, dtype: np.dtype, devices: list[int], sizes: list[int]) -> None:
    """Reduce leaves on these devices several times, and check every replica's results."""
    problem, queue = Problem(driver.put, op, dtype, devices, sizes), Queue(driver)
    with driver.using():
        streams = [driver.stream(device, f"GPU:{i}") for i, device in enumerate(devices)]
        streams += [driver.foreign_stream(device, 1) for device in sorted(set(devices))]
    for _ in range(3):
        assert problem.run(queue, streams).is_done()
    assert not driver.errors, driver.errors[0]
    for out, wanted in problem.results:
        assert_same_bits(read(out, wanted), wanted)


def page_locked_memory_serves_again(driver: Loading) -> None:
    """It is reused only when nothing refers to any part of it."""
    with driver.using():
        host = driver.host_memory(200)
        part, address = host[2:], host.ctypes.data
        del host
        assert driver.host_memory(200).ctypes.data != address, "a part of it is still referenced"
        del part
        assert driver.host_memory(200).ctypes.data == address


def peers_reach_our_memory(driver: Loading) -> None:
    """A device that reads another's memory can also read memory from its pool."""
    with driver.using():
        assert driver.reaches(1, 0)
    assert driver.library.stub_opened(0, 1)


def nothing_is_left(driver: Loading) -> None:
    """Memory is released when nothing refers to it; events are reused."""
    problem = ReduceOp.SUM, SINGLE, [0, 1, 1], [64, 5]
    gc.freeze()  # leave out what was imported
    reduced(driver, *problem)
    gc.collect()
    memory, events = (driver.library.stub_live(what) for what in (0, 2))
    for _ in range(3):
        reduced(driver, *problem)
    gc.collect()
    assert driver.library.stub_live(0) == memory
    assert driver.library.stub_live(2) == events


def current_device_stays(driver: Loading) -> None:
    """The current device stays the same: none, and another one."""
    context = ctypes.c_void_p(1)
    for device in (None, 1):
        if device is not None:
            driver._core.Device(device).set_current()
        driver.library.cuCtxGetCurrent(ctypes.byref(context))
        before = context.value
        reduced(driver, ReduceOp.SUM, SINGLE, [0, 0], [8])
        driver.library.cuCtxGetCurrent(ctypes.byref(context))
        assert context.value == before


def arrays_of_numba(driver: Loading) -> None:
    """Numba's device arrays, on two GPUs, in every kind of call that takes arrays."""
    cuda: Any = importlib.import_module("numba.cuda")
    values = [np.arange(24, dtype=np.float32).reshape(4, 6) * (k + 1) for k in range(2)]
    total, joined = values[0] + values[1], np.concatenate(values, 1)

    def put(value: np.ndarray, ordinal: int, *, streamed: bool = False) -> Any:
        with cuda.gpus[ordinal]:
            return cuda.to_device(value, stream=cuda.stream() if streamed else 0)

    async def step() -> Any:
        ctx = get_replica_context()
        me = ctx.replica_id_in_sync_group
        value, out = put(values[me], me, streamed=True), put(np.zeros((4, 6), np.float32), me)
        assert await ctx.all_reduce("SUM", value, out=out) is out
        with cuda.gpus[me]:
            gaps = put(np.zeros((4, 12), np.float32), me)[:, ::2]
        with pytest.raises(TypeError, match="without gaps"):
            ctx.all_reduce("SUM", gaps)
        assert await ctx.all_reduce("SUM", value, out=value) is value
        found = [out, *await ctx.all_reduce("MAX", [value, put(np.zeros((0, 3)), me), put(np.array(True), me)])]
        found += [await ctx.all_gather(put(values[me], me), 1), await ctx.reduce_scatter("SUM", put(values[me], me))]
        found.append(await ctx.broadcast(put(values[me], me), 1))
        assert [one.gpu_data.context.device.id for one in found] == [me] * len(found)
        with cuda.gpus[me]:
            wanted = [total, total, np.zeros((0, 3)), np.array(True), joined, np.split(total, 2)[me], values[1]]
            for one, other in zip(found, wanted, strict=True):
                assert_same_bits(one.copy_to_host(), other)

    async def program() -> None:
        strategy = MirroredStrategy(["GPU:0", "GPU:1"])
        with mock.patch.object(enqueue, "queue", return_value=Queue(driver)):
            await strategy.run(step)
            there = PerReplica([put(value, k) for k, value in enumerate(values)])
            for axis in (None, 0, (0, 1)):
                wanted = await strategy.reduce("MEAN", PerReplica(values), axis)
                assert_same_bits((await strategy.reduce("MEAN", there, axis)).copy_to_host(), wanted)
            assert_same_bits((await strategy.gather(there, 0)).copy_to_host(), np.concatenate(values))

    asyncio.run(program())
    assert not driver.errors, driver.errors[0]


def main() -> None:
    """Try everything. One kernel of each form is compiled, and loaded for all: its code is never executed here."""
    compiled: Any = importlib.import_module("aiodist_kernels.cuda.compiled")
    real, programs = compiled.compile_form, {}

    def compile_form(form: Form, capability: tuple[int, int]) -> Any:
        if form.tabled not in programs:
            programs[form.tabled] = real(form, capability)
        return programs[form.tabled]

    with mock.patch.object(compiled, "compile_form", compile_form):
        try_all(Loading())


def try_all(driver: Loading) -> None:
    for devices in ([0, 0], [0, 1], [1, 0, 1]):
        reduced(driver, ReduceOp.SUM, SINGLE, devices, [1000])
        reduced(driver, ReduceOp.MEAN, BFLOAT16, devices, [70, 1, 4099])
        reduced(driver, ReduceOp.SUM, np.dtype(np.int32), devices, [400_000])
    reduced(driver, ReduceOp.SUM, SINGLE, [0] * 21, [50])
    arrays_of_numba(driver)
    page_locked_memory_serves_again(driver)
    peers_reach_our_memory(driver)
    nothing_is_left(driver)
    current_device_stays(driver)


if __name__ == "__main__":
    main()
