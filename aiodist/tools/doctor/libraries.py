"""Which libraries are installed, and in what versions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import aiodist
from aiodist.tools.doctor.findings import Finding, Section

NEEDED = ("anyio", "numba", "numpy", "optree", "rich", "threadpoolctl")
OPTIONAL = {
    "trio": "pip install 'aiodist[trio]' to run replicas on trio",
    "uvloop": "pip install 'aiodist[uvloop]' for asyncio's quicker event loop",
    "ml_dtypes": "pip install ml_dtypes for bfloat16",
    "scikit-learn": "pip install 'aiodist[examples]' for the demo on digits",
}


def libraries() -> Section:
    """Look which libraries there are."""
    needed = [_look(name, f"pip install {name}", needed=True) for name in NEEDED]
    optional = [_look(name, remedy, needed=False) for name, remedy in OPTIONAL.items()]
    return Section("libraries", [Finding("aiodist", aiodist.__version__), *needed, *optional])


def _look(name: str, remedy: str, *, needed: bool) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, "not installed", remedy, needed)
