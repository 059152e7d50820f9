"""Callers: whether replicas whose callers differ at a call have gone through the same ones in another order.

Where calls stand in a helper, two of them in swapped order look the same but for who called the helper. Callers that
differ are no fault in themselves: replicas may well come to one call by different ways. They are one when, by a later
call at the same place, all replicas have come by the same ways, each as often as the others, and not in the same order.
A way is the nearest caller, or the nearest two.

The check keeps, for each place, how far the replicas are apart: by replica, the sum of the hashes of its ways. Once
that is what it was some calls before, the calls between have been made in another order. A call to which all come by
one way does not change it, so nothing is kept, and hardly anything computed, where all callers are the same.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeAlias

from aiodist._core.call import Place, Post

Way: TypeAlias = tuple[Place, ...]

_DEPTHS = (1, 2)
_MOST_CALLS = 64


class CallerOrder:
    """What is kept of a group's calls to which replicas came by different ways."""

    def __init__(self) -> None:
        self._apart: dict[Hashable, list[int]] = {}
        self._before: dict[Hashable, deque[int]] = {}

    def note(self, first: Post, others: Mapping[int, Post], members: int) -> bool:
        """Note a call that all have made, and by position the posts that differ; return whether it is in order."""
        noted = [self._note(first, others, members, depth) for depth in _DEPTHS]  # each, whatever the first says
        return all(noted)

    def _note(self, first: Post, others: Mapping[int, Post], members: int, depth: int) -> bool:
        hashes = [hash(_meaning(_way(first, depth)))] * members
        for position, post in others.items():
            hashes[position] = hash(_meaning(_way(post, depth)))
        if len(set(hashes)) == 1:
            return True
        key = depth, first.path[0][:3]
        apart = self._apart.get(key, [0] * members)
        before = self._before.setdefault(key, deque([hash(tuple(apart))], _MOST_CALLS))
        apart = self._apart[key] = [sum_ + one - hashes[0] for sum_, one in zip(apart, hashes, strict=True)]
        now = hash(tuple(apart))
        in_order = now not in before
        before.append(now)
        return in_order


def ways_in_another_order(
    calls: Iterable[Sequence[tuple[Post, tuple[int, ...]]]],
) -> dict[int, tuple[Way, ...]] | None:
    """Return by which ways each replica came to the last calls at a place, oldest first; None where they are in order.

    The calls are given with the replicas that made them, the last call first.
    """
    last = list(zip(calls, range(_MOST_CALLS), strict=False))
    found = (_in_another_order([posts for posts, _ in last], depth) for depth in _DEPTHS)
    return next((ways for ways in found if ways is not None), None)


def _in_another_order(
    calls: Iterable[Sequence[tuple[Post, tuple[int, ...]]]], depth: int
) -> dict[int, tuple[Way, ...]] | None:
    ways: dict[int, tuple[Way, ...]] = {}
    for count, posts in enumerate(calls):
        if count == 0 and len({_meaning(_way(post, depth)) for post, _ in posts}) == 1:
            return None
        for post, replicas in posts:
            for replica_id in replicas:
                ways[replica_id] = (_way(post, depth), *ways.get(replica_id, ()))
        if count and len({frozenset(Counter(map(_meaning, own)).items()) for own in set(ways.values())}) == 1:
            return ways
    return None


def _way(post: Post, depth: int) -> Way:
    return post.path[1 : 1 + depth]


def _meaning(way: Way) -> tuple[tuple[object, ...], ...]:
    return tuple(place[:3] for place in way)
