"""What is warned of, whatever the filters: all threads share those, and a library may exchange them in one."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest


class Warned(NamedTuple):
    """One warning."""

    text: str
    category: type[Warning]
    file: str
    line: int


@contextmanager
def warned() -> Iterator[list[Warned]]:
    """Gather warnings instead of showing them."""
    told: list[Warned] = []

    def warn_explicit(text: Any, category: type[Warning], file: str, line: int, *_: Any, **__: Any) -> None:
        told.append(Warned(str(text), category, file, line))

    def warn(text: Any, category: type[Warning] = UserWarning, stacklevel: int = 1, **_: Any) -> None:
        frame = sys._getframe(stacklevel)
        warn_explicit(text, category, frame.f_code.co_filename, frame.f_lineno)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "warn_explicit", warn_explicit)
        patch.setattr(warnings, "warn", warn)
        yield told
