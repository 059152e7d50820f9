"""Testing programs that run on replicas: on a controlled event loop, under many schedules, with recorded collectives.

Call these functions from plain functions: each call makes its own event loop, on which time is virtual and a deadlock
is an error at once. The pytest plugin ``aiodist.testing.pytest_plugin`` does the same for test functions with a marker.

Modules, in order; each imports only from those above it and from lower floors:

- `recording`: which collectives were made, and the comparison with others.
- `running`: running replicas once, or under many schedules.
- `pytest_plugin`: the marker ``replicas``; enabled by name, with ``-p`` or ``pytest_plugins``.
"""

from aiodist.testing.recording import Recording, assert_same_collectives, record_collectives
from aiodist.testing.running import Explored, explore, run_replicas

__all__ = ["Explored", "Recording", "assert_same_collectives", "explore", "record_collectives", "run_replicas"]
