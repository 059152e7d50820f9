"""The CPU in place of CUDA devices, so that a script that names them runs where there are none.

Every function of torch that is given a CUDA device, by name or by number, gets the CPU instead. Queries for devices
find one per rank. The summary says where devices were replaced. What has no stand-in here raises torch's own error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

from aiodist._torch.private import load, torch

_TRUE = "is_available is_initialized is_bf16_supported"
_NOTHING = (
    "synchronize empty_cache init reset_peak_memory_stats manual_seed manual_seed_all set_device set_stream "
    "set_per_process_memory_fraction set_device_index set_device_idx"
)
_ZERO = "memory_allocated max_memory_allocated memory_reserved max_memory_reserved"
_MEMORY = 80 << 30
_NAMES = (str, torch.device)
_PROPERTIES = SimpleNamespace(
    total_memory=_MEMORY, major=8, minor=0, name="CPU in place of CUDA", multi_processor_count=1
)  # fmt: skip


class _Stream:
    """Stands for a CUDA stream or event: all work is done when it is called."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.record()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def record(self, *_: Any) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, other: _Stream) -> float:
        return (other.time - self.time) * 1000.0

    def synchronize(self, *_: Any) -> None:
        pass

    wait = wait_stream = wait_event = record_event = synchronize


class _Device(nullcontext[None]):
    """Stands for the context manager that sets the current device."""

    def __init__(self, *_: Any) -> None:
        super().__init__()


def _replace(module: Any, stand_ins: dict[str, Any]) -> None:
    """Replace a module's names by classes, or by functions that call a stand-in or return it.

    Each name gets a function of its own, because torch._dynamo must tell them apart.
    """

    def function(stand_in: Any) -> Callable[..., Any]:
        return lambda *_, **__: stand_in() if callable(stand_in) else stand_in

    for name, stand_in in stand_ins.items():
        if hasattr(module, name):
            setattr(module, name, stand_in if isinstance(stand_in, type) else function(stand_in))


class CudaAsCpu(torch.overrides.TorchFunctionMode):  # type: ignore[misc]
    """Replaces `torch.cuda`, for a script with as many devices as ranks.

    As a context manager, it replaces CUDA devices in a thread's calls of torch's functions.
    """

    def __init__(self, ranks: int, index: Callable[[], int]) -> None:
        super().__init__()
        self._ranks = ranks
        self._replaced: dict[str, set[str]] = {}
        common = {
            **dict.fromkeys(_TRUE.split(), True),
            **dict.fromkeys(_NOTHING.split(), None),
            **dict.fromkeys(_ZERO.split(), 0),
            "device_count": self._count,
            "stream": nullcontext(),
            "current_stream": partial(_Stream),
        }
        cuda = {
            "current_device": index,
            "device": _Device,
            "memory_summary": "",
            "get_rng_state": torch.get_rng_state,
            "set_rng_state": None,
            "get_device_name": _PROPERTIES.name,
            "get_device_properties": _PROPERTIES,
            "get_device_capability": (_PROPERTIES.major, _PROPERTIES.minor),
            "mem_get_info": (_MEMORY, _MEMORY),
            "default_stream": partial(_Stream),
            "Stream": _Stream,
            "Event": type("Event", (_Stream,), {}),
        }
        _replace(torch.cuda, {**common, **cuda})
        accelerator = {
            "current_accelerator": lambda: torch.device("cuda"),
            "current_device_index": index,
            "current_device_idx": index,
            "device_index": nullcontext(),
        }
        _replace(torch.accelerator, {**common, **accelerator})
        self._replace_others()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in ("cuda", "pin_memory"):
            if name == "cuda":
                self._note("Tensor.cuda")
            return args[0]
        if func is torch.device:
            given = args[0] if args else kwargs.get("type")
            device = self._cpu(given, name)
            return func(*args, **kwargs) if device is given else device
        numbers = args if name == "_parse_to" else args[1:] if name == "to" else ()
        if numbers and type(numbers[0]) is int:
            args = (*args[: len(args) - len(numbers)], self._cpu(numbers[0], "to"), *numbers[1:])
        args = tuple([self._cpu(each, name) if type(each) in _NAMES else each for each in args])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": self._cpu(kwargs["device"], name)}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)

    def notes(self) -> list[str]:
        """Return lines that say where CUDA devices were named."""
        if not self._replaced:
            return ["--cpu: the script names no CUDA devices."]
        replaced = [f"{where} ({', '.join(sorted(what))})" for where, what in sorted(self._replaced.items())]
        return [f"--cpu: the CPU was used in place of CUDA devices in {', '.join(replaced)}."]

    def _note(self, where: str, what: str = "cuda") -> None:
        self._replaced.setdefault(where, set()).add(what)

    def _cpu(self, device: Any, where: str) -> Any:
        """Return the CPU for a CUDA device; anything else is returned unchanged."""
        text = f"cuda:{device}" if type(device) is int else str(device) if isinstance(device, _NAMES) else ""
        if text.partition(":")[0] != "cuda":
            return device
        self._note("to" if where == "_parse_to" else where)
        return torch.device("cpu")

    def _count(self) -> int:
        self._note("torch.cuda.device_count", f"{self._ranks} devices")
        return self._ranks

    def _replace_others(self) -> None:
        """Replace functions that take devices in C++, or by other names."""
        device_mesh, parallel = load("torch.distributed.device_mesh"), load("torch.nn.parallel")
        set_default, read, wrap = torch.set_default_device, torch.load, parallel.DistributedDataParallel.__init__

        def load_here(*args: Any, **kwargs: Any) -> Any:
            return read(*args[:1], *args[2:], **{**kwargs, "map_location": "cpu"})

        def wrap_here(own: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
            if device_ids or output_device is not None:
                self._note("DistributedDataParallel", "device_ids")
            wrap(own, module, **kwargs)

        def on_cpu(where: str, begin: Callable[..., None]) -> Callable[..., None]:
            def begin_here(own: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
                begin(own, str(self._cpu(device_type, where)), *args, **kwargs)

            return begin_here

        torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
        torch.nn.Module.cuda = lambda module, *_: module.to("cuda")
        torch.set_default_device = lambda device: set_default(self._cpu(device, "torch.set_default_device"))
        torch.load = load_here
        torch.autocast.__init__ = on_cpu("torch.autocast", torch.autocast.__init__)
        parallel.DistributedDataParallel.__init__ = wrap_here
        device_mesh.DeviceMesh.__init__ = on_cpu("DeviceMesh", device_mesh.DeviceMesh.__init__)
