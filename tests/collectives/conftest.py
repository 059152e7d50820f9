"""The fixtures for planted GPUs and for the blocks of results."""

from tests.gpu.conftest import plant
from tests.kernels.conftest import made

__all__ = ["made", "plant"]
