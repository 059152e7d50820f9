"""Where things are in a checkout, and how to start a fresh Python on it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT, ROOT / "kernels")
PACKAGES = (ROOT / "aiodist", ROOT / "kernels" / "aiodist_kernels")


def environment(sources: Sequence[Path] = SOURCES) -> dict[str, str]:
    """Return the environment of a process that imports our packages from `sources`."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))}


def run_python(arguments: Sequence[str], folder: Path, sources: Sequence[Path] = SOURCES) -> str:
    """Run Python in `folder` with our packages importable from `sources`; return all that it prints, errors too."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(sources),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
        check=False,
    )
    return done.stdout
