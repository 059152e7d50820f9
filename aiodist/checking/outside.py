"""The outside: whether anything but the loop's own callbacks could still make something happen.

A loop has nothing to run and no timer. It will stay so unless a file descriptor becomes ready, a signal handler of the
program's is called, or another thread calls in. File descriptors and signal handlers the loop knows. Of threads, only
those count that can act (`threads`).
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any
from weakref import WeakSet

from aiodist.checking.threads import busy_threads

_PATIENCE = 0.25
_GLANCE = 0.0002


def alarm_handler() -> Any:
    """Return what is called when the process's timer is up (`signal.alarm`, `signal.setitimer`)."""
    return signal.getsignal(signal.SIGALRM) if sys.platform != "win32" else None


def alarm_is_set() -> bool:
    """Return whether that timer is running."""
    return sys.platform != "win32" and signal.getitimer(signal.ITIMER_REAL)[0] > 0


_slow: WeakSet[threading.Thread] = WeakSet()
"""Threads that were at work for longer than others wait for them."""


def let_threads_finish() -> None:
    """Wait until no thread is at work, but not long, and for the same one only once."""
    until = time.monotonic() + _PATIENCE
    while busy := [thread for thread in busy_threads(pause=_GLANCE) if thread not in _slow]:
        if time.monotonic() > until:
            _slow.update(busy)
            return
        time.sleep(_GLANCE)
