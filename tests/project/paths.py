"""The paths of a checkout, and a fresh Python on it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT, ROOT / "kernels")
PACKAGES = (ROOT / "aiodist", ROOT / "kernels" / "aiodist_kernels")


def environment(sources: Sequence[Path] = SOURCES) -> dict[str, str]:
    """Return the environment of a process that imports the packages from `sources`."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, sources))}


def run_python(arguments: Sequence[str], folder: Path, sources: Sequence[Path] = SOURCES) -> str:
    """Run Python in `folder` with the packages importable from `sources`; return its output and errors."""
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
