"""Testing programs whose replicas work in step: on a controlled loop, under many schedules, with records of calls.

All of it is for plain functions: each call makes an event loop of its own, on which time is virtual and a deadlock is
proved at once. The pytest plugin ``aiodist.testing.pytest_plugin`` does the same for test functions by a marker; it is
enabled by its name, with ``-p`` or ``pytest_plugins``.
"""

from aiodist.testing.recording import Recording, assert_same_collectives, record_collectives
from aiodist.testing.running import Explored, explore, run_replicas

__all__ = ["Explored", "Recording", "assert_same_collectives", "explore", "record_collectives", "run_replicas"]
