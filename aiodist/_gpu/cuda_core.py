"""The driver, through cuda.core: only this module calls CUDA, so everything else can be tested without it.

Kernels are compiled by Numba and launched by `cuda.core.launch`, which takes the host a microsecond or two; Numba's own
dispatcher takes twenty and more. PTX is linked to machine code by nvJitLink, which comes with the compiler, because the
driver may be older than the compiler's PTX. Everything works in each GPU's primary context, which frameworks use, too.

Streams, events and launch configurations are made once. The current device is remembered within `CudaCore.using`.
"""

from __future__ import annotations

import ctypes
import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np

from aiodist._arrays.host import Array
from aiodist._gpu.steps import HOST, Copy
from aiodist_kernels.cuda.forms import THREADS, Form, blocks
from aiodist_kernels.pool import Pool

NEEDS: Final = "GPUs need packages that are missing here, or do not fit: pip install --upgrade 'aiodist[cuda]'"

_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
_VERIFIED = ((9, 0), (8, 0))  # kernels are compiled for one of these; newer devices run them, too

_LEAST_LOCKED: Final = 1 << 12  # the smallest block of page-locked memory in bytes; block sizes are powers of two


@dataclass(frozen=True, eq=False)
class DeviceStream:
    """A stream, and the ordinal of its device."""

    device: int
    stream: Any  # cuda.core's

    @cached_property
    def handle(self) -> Any:
        """The driver's handle."""
        return self.stream.handle


@dataclass(slots=True, eq=False)
class DeviceEvent:
    """An event, and the list of its device's events that can be reused."""

    event: Any
    spare: list[DeviceEvent]


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory from the device's pool; once dropped, it returns there in stream order."""

    address: int
    buffer: Any


class CudaCore:
    """Enqueues work; devices are the driver's ordinals. Only `wait_for` blocks the calling thread."""

    def __init__(self) -> None:
        try:
            core: Any = importlib.import_module("cuda.core")
            self._driver: Any = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise ImportError(f"{NEEDS} ({error})") from error
        if core.__version__.startswith("0."):
            raise ImportError(f"{NEEDS} (cuda-core is {core.__version__}, and must be 1.0 or newer)")
        self._core = core
        self._streams: dict[int | str, DeviceStream] = {}  # by device, or by a logical device's name
        self._foreign: dict[tuple[int, int], DeviceStream] = {}
        self._kernels: dict[tuple[int, Form], Any] = {}
        self._reaches: dict[tuple[int, int], bool] = {}
        self._events: defaultdict[int, list[DeviceEvent]] = defaultdict(list)
        self._launch: Callable[..., None] = self._core.launch
        self._shape = lru_cache(1024)(lambda grid: self._core.LaunchConfig(grid=grid, block=THREADS))
        self._current: int | None = None  # the current device, if it is known; within `using`
        self._contexts: dict[int, tuple[Any, Any]] = {}  # by device, cuda.core's object and the primary context
        self._device_of: dict[int, int] = {}  # by the address of a primary context
        self._host = Pool(math.inf, self._lock_pages)

    @contextmanager
    def using(self) -> Iterator[None]:
        """Restore the current device afterwards. Everything is enqueued within this, by one thread at a time."""
        before = self._driver.cuCtxGetCurrent()[1]
        self._current = self._device_of.get(int(before))  # often current already
        try:
            yield
        finally:
            self._current = None
            self._call("cuCtxSetCurrent", before)

    def _make_current(self, device: int) -> Any:
        """Make a device current, and return cuda.core's object for it."""
        if device not in self._contexts:
            found = self._core.Device(device)
            found.set_current()
            self._contexts[device] = found, found.context.handle
            self._device_of[int(found.context.handle)] = device
        found, context = self._contexts[device]
        if self._current != device:
            self._call("cuCtxSetCurrent", context)  # cuda.core's own way takes ten microseconds
            self._current = device
        return found

    def stream(self, device: int, name: str = "") -> DeviceStream:
        """Return the stream on which a device reduces, or that of the logical device of a name; always the same one."""
        key = name or device
        found = self._streams.get(key)
        if found is None:
            found = self._streams[key] = DeviceStream(device, self._make_current(device).create_stream())
        return found

    def used_stream(self, name: str) -> DeviceStream | None:
        """Return the stream of a logical device; None if nothing has used it yet."""
        return self._streams.get(name)

    def foreign_stream(self, device: int, handle: int) -> DeviceStream:
        """Return a stream that others created, by its handle."""
        found = self._foreign.get((device, handle))
        if found is None:
            found = self._foreign[device, handle] = DeviceStream(device, self._core.Stream.from_handle(handle))
        return found

    def record(self, stream: DeviceStream) -> DeviceEvent:
        """Record an event after everything that is on a stream so far."""
        self._make_current(stream.device)  # default streams belong to the current device
        spare = self._events[stream.device]
        if spare:
            event = spare.pop()
            stream.stream.record(event.event)
            return event
        return DeviceEvent(stream.stream.record(options=self._core.EventOptions(blocking_sync=True)), spare)

    def release(self, event: DeviceEvent) -> None:
        """Take back an event for reuse; streams that already wait for it still do."""
        event.spare.append(event)

    def wait(self, stream: DeviceStream, event: DeviceEvent) -> None:
        """Let a stream wait for an event."""
        self._make_current(stream.device)
        stream.stream.wait(event.event)

    def is_done(self, event: DeviceEvent) -> bool:
        """Return whether an event is done, without waiting."""
        return bool(event.event.is_done)

    def wait_for(self, event: DeviceEvent) -> None:
        """Block this thread until an event is done."""
        event.event.sync()

    def allocate(self, device: int, nbytes: int) -> DeviceMemory:
        """Return memory for work on the device's own stream."""
        buffer = self._make_current(device).allocate(nbytes, stream=self.stream(device).stream)
        return DeviceMemory(int(buffer.handle), buffer)

    def host_memory(self, nbytes: int) -> Array:
        """Return bytes of page-locked host memory, which devices copy to and from asynchronously.

        Locking pages takes as long as copying them, and unlocking may wait for all of a device's work. So memory is
        reused, and never unlocked before the process ends.
        """
        return np.asarray(self._host.lease(max(_LEAST_LOCKED, 1 << (nbytes - 1).bit_length())))[:nbytes]

    def _lock_pages(self, nbytes: int) -> Array:
        self._make_current(0)
        address = int(self._call("cuMemHostAlloc", nbytes, self._driver.CU_MEMHOSTALLOC_PORTABLE))
        return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))

    def upload(self, device: int, words: Array) -> DeviceMemory:
        """Return memory with a copy of an array, for work on the device's own stream."""
        memory = self.allocate(device, words.nbytes)
        self._call("cuMemcpyHtoDAsync", memory.address, words.ctypes.data, words.nbytes, self._handle(device))
        return memory

    def copy(self, copy: Copy) -> None:
        """Copy bytes, or rows of bytes, on a device's own stream."""
        device, (to, target), (by, source), nbytes, rows, target_pitch, source_pitch = copy
        stream = self._handle(device)
        if rows > 1:
            how = self._driver.CUDA_MEMCPY2D()
            how.dstMemoryType = how.srcMemoryType = self._driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
            how.dstDevice, how.dstPitch = target, target_pitch
            how.srcDevice, how.srcPitch = source, source_pitch
            how.WidthInBytes, how.Height = nbytes, rows
            self._call("cuMemcpy2DAsync", how, stream)
        elif HOST in {to, by} or to == by:
            way = "DtoH" if to == HOST else "HtoD" if by == HOST else "DtoD"
            self._call(f"cuMemcpy{way}Async", target, source, nbytes, stream)
        else:
            contexts = [self._make_current(each).context.handle for each in (to, by)]
            self._make_current(device)
            self._call("cuMemcpyPeerAsync", target, contexts[0], source, contexts[1], nbytes, stream)

    def is_loaded(self, device: int, form: Form) -> bool:
        """Return whether a kernel can be launched at once."""
        return (device, form) in self._kernels

    def load(self, device: int, form: Form) -> None:
        """Compile a kernel for a device and load it, in a few tenths of a second, in any thread."""
        # Nothing here needs a current device, so other threads may enqueue meanwhile.
        if self.is_loaded(device, form):
            return
        try:
            from aiodist_kernels.cuda.compiled import compile_form
        except ImportError as error:
            raise ImportError(f"{NEEDS} ({error})") from error
        major, minor = self._core.Device(device).compute_capability
        capability = next((verified for verified in _VERIFIED if (major, minor) >= verified), (major, minor))
        program = compile_form(form, capability)
        code = self._core.ObjectCode.from_ptx(program.ptx.encode())  # a str would be a path
        linker = self._core.Linker(code, options=self._core.LinkerOptions(arch=f"sm_{major}{minor}"))
        self._kernels[device, form] = linker.link("cubin").get_kernel(program.name)

    def launcher(self, device: int, form: Form, work: int) -> Callable[..., None]:
        """Return a function that launches a loaded kernel on the device's own stream, one thread per item of work."""
        shape = self._shape(blocks(work))
        stream, kernel, start = self.stream(device).stream, self._kernels[device, form], self._launch

        def launch(*arguments: int) -> None:  # Python integers are passed as 64 bits
            self._make_current(device)
            start(stream, shape, kernel, *arguments)

        return launch

    def reaches(self, device: int, other: int) -> bool:
        """Return whether kernels on a device can read the other's memory, and enable that."""
        found = self._reaches.get((device, other))
        if found is None:
            found = self._reaches[device, other] = device == other or self._enable(device, other)
        return found

    def _enable(self, device: int, other: int) -> bool:
        peer = self._make_current(other)
        if not self._make_current(device).can_access_peer(other):
            return False
        result = self._driver.cuCtxEnablePeerAccess(peer.context.handle, 0)[0]
        if int(result) not in {0, _ALREADY_ENABLED}:
            return False
        # Access to the context does not cover its memory pool, which `allocate` uses.
        access = self._driver.CUmemAccessDesc()
        access.location.type = self._driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        error, pool = self._driver.cuDeviceGetMemPool(peer.device_id)  # not every system has one
        return not int(error) and not int(self._driver.cuMemPoolSetAccess(pool, [access], 1)[0])

    def _handle(self, device: int) -> Any:
        self._make_current(device)
        return self.stream(device).handle

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the CUDA driver, and return its result."""
        error, *results = getattr(self._driver, name)(*arguments)
        if int(error):
            raise RuntimeError(f"the CUDA driver's {name} failed with {error.name}")
        return results[0] if results else None
