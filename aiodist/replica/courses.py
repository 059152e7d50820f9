"""Courses: what is known of calls that have come before, so that the next step of the same call goes without delay."""

from __future__ import annotations

from types import CodeType
from typing import Final, NamedTuple

from aiodist._arrays.leaves import has_device_arrays
from aiodist.collective.rendezvous import Rendezvous
from aiodist.collective.signature import KIND, TYPES, Signature
from aiodist.workers.calls import Digests
from aiodist.workers.crossing import Span
from aiodist.workers.recipes import Recipe, Straight, recipe_of
from aiodist.workers.record import Flag
from aiodist_kernels import Accumulate

_MOST: Final = 4096


class Course(NamedTuple):
    """What is known of a call, whatever it brings.

    Attributes:
        digest: what must agree.
        number: the same, as a number.
        recipe: plans what is to be exchanged.
        flags: what the record says of the accumulator.
        merges: a merge function makes the result.
        ferried: something of it lies on devices.
        straight: the recipe, where it is for the straight way.
        code: of the caller; held, so that no other has its id.
    """

    digest: bytes
    number: int
    recipe: Recipe
    flags: int
    merges: bool
    ferried: bool
    straight: Straight | None
    code: CodeType


class Courses:
    """The calls of a group of replicas.

    Args:
        digests: the team's.
        span: the group's workers.
    """

    def __init__(self, digests: Digests, span: Span) -> None:
        self._digests = digests
        self._span = span
        self._known: dict[tuple[object, ...], Course] = {}
        self._straight: dict[tuple[int, int], tuple[Signature, Accumulate, Course]] = {}  # by place, the latest call's

    def straight(self, meeting: Rendezvous) -> Course | None:
        """Return the course of a meeting that has one, if it goes the straight way."""
        found = self._straight.get((id(meeting.code), meeting.offset))
        if found is None or found[0] != meeting.signature or found[1] != meeting.options.accumulate:
            return None
        return found[2]

    def of(self, meeting: Rendezvous) -> Course:
        """Return the course of a meeting at which all local replicas mean the same."""
        accumulate = meeting.options.accumulate
        key = (meeting.signature, id(meeting.code), meeting.offset, accumulate)
        found = self._known.get(key) or self._find(key, meeting, accumulate)
        if found.straight is not None:
            self._straight[id(meeting.code), meeting.offset] = meeting.signature, accumulate, found
        return found

    def digest_of(self, meeting: Rendezvous) -> bytes:
        """Return the digest of a meeting's call alone."""
        return self._digests.of(meeting.call)

    def _find(self, key: tuple[object, ...], meeting: Rendezvous, accumulate: Accumulate) -> Course:
        if len(self._known) >= _MOST:
            self._known.clear()
            self._straight.clear()
        signature = meeting.signature
        types = signature[TYPES]
        recipe = recipe_of(signature, accumulate, self._span)
        digest = self.digest_of(meeting)
        found = self._known[key] = Course(
            digest,
            int.from_bytes(digest, "little"),
            recipe,
            Flag.FLOAT64 if accumulate == "float64" else Flag.NONE,
            signature[KIND].across is None,
            types is not None and has_device_arrays(types),
            recipe if isinstance(recipe, Straight) else None,
            meeting.code,
        )
        return found
