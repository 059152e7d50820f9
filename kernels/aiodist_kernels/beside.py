# SPDX-License-Identifier: Apache-2.0
"""A compiler beside an event loop: what would keep other threads from the interpreter for long is held back.

A kernel, for the CPU or for CUDA, takes half a second of Python, in a thread of its own, and the interpreter's lock
goes from thread to thread. Kernels are compiled one after the other, as Numba does anyway: it has one lock for all.
What held up a ticker in another thread, measured:

- Full garbage collections, 40 to 170 ms each, with the lock held: Numba makes some 400,000 objects, and the collector
  looks through all there are three times before the first kernel is done. They are put off. The young generations, in
  which a compiler's garbage dies, are collected as ever: memory grows by some MiB and no more.
- The 5 ms after which a thread asks for the lock that another holds. It asks after one.

What remains is the loading of Numba's libraries, 10 to 20 ms, once in a process.
"""

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SWITCH_SECONDS: Final = 1e-3

_LEAST_FROZEN: Final = 2000
"""Python 3.12 counts some hundred objects of its own as frozen; a program that freezes has thousands."""

_NEVER: Final = 1 << 30
_one_at_a_time: Final = threading.Lock()


@contextmanager
def considerately() -> Iterator[None]:
    """Put off full collections, and let other threads have the interpreter sooner; one caller after the other.

    What the program itself sets meanwhile stays.
    """
    with _one_at_a_time:
        interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
        sooner, putting_off = min(interval, SWITCH_SECONDS), (*thresholds[:2], _NEVER)
        sys.setswitchinterval(sooner)
        gc.set_threshold(*putting_off)
        sooner, putting_off = sys.getswitchinterval(), gc.get_threshold()  # as the interpreter has understood them
        try:
            yield
        finally:
            if sys.getswitchinterval() == sooner:
                sys.setswitchinterval(interval)
            if gc.get_threshold() == putting_off:
                gc.set_threshold(*thresholds)
            _call_all_old()


def _call_all_old() -> None:
    """Move all objects to the oldest generation, without a look at them: else a full collection would follow at once.

    The next one comes when the program itself has made many.
    """
    if gc.get_freeze_count() < _LEAST_FROZEN:  # what the program has frozen stays so
        gc.freeze()
        gc.unfreeze()
