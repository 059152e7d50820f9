"""The images that `demo digits` learns to read: scikit-learn's bundled digits, 8 × 8 pixels each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aiodist.demos.endings import MissingExtraError

Images: TypeAlias = NDArray[np.float32]
Classes: TypeAlias = NDArray[np.intp]

_HELD_OUT = 5


@dataclass(frozen=True, slots=True)
class Digits:
    """Images of digits, some to learn from and some to be examined on.

    Attributes:
        name: where they come from.
        digest: sha256 of the pixels and classes, in hexadecimal.
        train: float32[n, 64] in 0 to 1, and the digits, int[n].
        held_out: the same, of other images.
    """

    name: str
    digest: str
    train: tuple[Images, Classes]
    held_out: tuple[Images, Classes]


def load_digits() -> Digits:
    """Return 1797 images, of which a fifth, drawn with a fixed seed, is held out.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    pixels, classes = _bundled()
    order = np.random.default_rng(0).permutation(len(pixels))
    images, digits = (pixels[order] / 16).astype(np.float32), classes[order].astype(np.intp)
    held_out = len(images) // _HELD_OUT
    return Digits(
        name="scikit-learn's digits",
        digest=hashlib.sha256(pixels.astype("<f8").tobytes() + classes.astype("<i8").tobytes()).hexdigest(),
        train=(images[held_out:], digits[held_out:]),
        held_out=(images[:held_out], digits[:held_out]),
    )


def _bundled() -> tuple[NDArray[Any], NDArray[Any]]:
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise MissingExtraError(
            "demo digits needs scikit-learn, which is not installed: pip install 'aiodist[examples]'"
        ) from error
    pixels, classes = load(return_X_y=True)
    return pixels, classes
