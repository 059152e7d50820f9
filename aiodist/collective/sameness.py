"""Whether two calls are the same collective: what they ask for, and where they stand, as the order check says."""

from __future__ import annotations

from types import CodeType

from aiodist._core.call import OrderCheck
from aiodist._core.report import Reason
from aiodist.collective.callsite import Path, place, same_path, same_place
from aiodist.collective.signature import NAME, PATH, Signature, first_difference, meaning

Call = tuple[Signature, CodeType, int]
"""What is asked, the caller's code, and the offset of the call in it."""


def difference(order_check: OrderCheck, a: Call, b: Call) -> Reason | None:
    """Return the first thing in which two calls differ; None where they are the same collective."""
    found = first_difference(a[0], b[0])
    if found is not None or a[0][NAME] is not None or order_check is OrderCheck.SIGNATURE:
        return found
    paths = order_check is OrderCheck.CALL_PATH
    same = same_path(a[0][PATH], b[0][PATH]) if paths else same_place(*a[1:], *b[1:])
    return None if same else Reason.CALL_SITE


def fingerprint(order_check: OrderCheck, call: Call) -> tuple[object, ...]:
    """Return all that must agree for calls to be the same collective, as one hashable value."""
    signature, code, offset = call
    if signature[NAME] is not None or order_check is OrderCheck.SIGNATURE:
        return meaning(signature)
    paths = order_check is OrderCheck.CALL_PATH
    sites: Path = signature[PATH] if paths else ((code, offset, code.co_filename),)
    return (*meaning(signature), *(place(*site[:2]) for site in sites))
