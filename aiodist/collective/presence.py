"""Which collectives can do without replicas that have joined."""

from __future__ import annotations

from collections.abc import Sequence

from aiodist._core.report import Reason
from aiodist.collective.signature import DETAIL, KIND, Signature
from aiodist.collective.wording import ids


def check_present(signature: Signature, absent: Sequence[int]) -> None:
    """Check that a collective can do without some replicas.

    Args:
        signature: the collective's.
        absent: the positions of those that have joined.

    Raises:
        ValueError: it takes a value of one of them.
    """
    kind, source = signature[KIND], signature[DETAIL]
    if kind.shared and not (kind.detail is Reason.SOURCE and source in absent):
        return
    which = f"replica {source}'s value" if kind.shared else "a value of every replica"
    has = "has" if len(absent) == 1 else "have"
    raise ValueError(
        f"{kind.name} needs {which}, and {ids(absent)} {has} joined; make it before the first joins, or after the last "
        "has"
    )
