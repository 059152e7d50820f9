"""Callers: finds replicas that reached a call through the same callers, but in another order.

If a helper makes the calls, two swapped calls differ only in who called the helper. Different callers are not an error
in themselves: replicas may reach one call by different ways. It is an error if, by a later call at the same place, all
replicas have come by the same ways, each equally often, but in different orders. A way is the nearest caller, or the
nearest two.

For each place and replica the check keeps the sum of the hashes of its ways, less that of the first replica. When the
sums return to what they were some calls ago, the calls in between were made in another order. A call that all replicas
reach by one way does not change the sums, so where all callers agree nothing is kept and hardly anything computed.
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
    """What is remembered of the calls of a group that replicas reached by different ways."""

    def __init__(self) -> None:
        self._apart: dict[Hashable, list[int]] = {}
        self._before: dict[Hashable, deque[int]] = {}

    def note(self, first: Post, others: Mapping[int, Post], members: int) -> bool:
        """Note a call that all have made, with the differing posts by position; return whether it is in order."""
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
    """Return the ways by which each replica reached the last calls at a place, oldest first; None if they are in order.

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
