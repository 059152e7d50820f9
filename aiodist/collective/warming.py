"""Warming up in the background: kernels that a program turns out to need are compiled beside it.

The first large reduction that a kernel would make quicker asks for it, and goes on without: NumPy serves until the
kernel is there, with the same bits. One thread compiles what was asked for and ends when nothing is left to do, so that
no thread lies about idle. It is no daemon: a process that ends must not pull the ground from under the compiler. So the
interpreter's exit waits for the kernel that is being compiled, some tenths of a second, and for no more.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from threading import Lock, Thread, main_thread
from typing import TYPE_CHECKING

import aiodist_kernels as kernels
from aiodist_kernels import Accumulate, KernelSpec, ReduceOp, policy

if TYPE_CHECKING:
    from aiodist_kernels.rules import DType

THREAD_NAME = "aiodist kernels"

_asked_from: dict[tuple[ReduceOp, DType, int, Accumulate], int] = {}
_queue: deque[KernelSpec] = deque()
_lock = Lock()
_thread: Thread | None = None


def ask_for(op: ReduceOp, dtype: DType, count: int, nbytes: int, accumulate: Accumulate) -> None:
    """Have a kernel compiled in the background, if it would pay for buffers of ``nbytes``."""
    key = op, dtype, count, accumulate
    least = _asked_from.get(key)
    if least is None:
        least = _asked_from[key] = max(kernels.pays_from(KernelSpec(*key)), policy.WARM_UP_FROM)
    if nbytes >= least:
        _asked_from[key] = policy.NEVER
        _compile(KernelSpec(*key))


def _compile(spec: KernelSpec) -> None:
    global _thread  # noqa: PLW0603  (the process has one compiler, and one thread for it)
    if kernels.is_ready(spec):
        return
    with _lock:
        _queue.append(spec)
        if _thread is None or not _thread.is_alive():
            _thread = Thread(target=_work_off, name=THREAD_NAME)
            with suppress(RuntimeError):  # the interpreter is about to end
                _thread.start()


def _work_off() -> None:
    global _thread  # noqa: PLW0603
    while True:
        with _lock:
            if not _queue or not main_thread().is_alive():
                _thread = None
                return
            spec = _queue.popleft()
        try:
            kernels.warm([spec])
        except ImportError:  # Numba does not work here: `aiodist doctor` says why, and NumPy goes on serving
            _queue.clear()
