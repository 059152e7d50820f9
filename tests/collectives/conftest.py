"""Planted GPUs, as tests of what is enqueued on them have, and memory of results, watched."""

from tests.gpu.conftest import plant
from tests.kernels.conftest import made

__all__ = ["made", "plant"]
