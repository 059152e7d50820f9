"""Planted GPUs, as tests of what is enqueued on them have."""

from tests.gpu.conftest import plant

__all__ = ["plant"]
