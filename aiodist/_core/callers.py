"""Callers: finds replicas that reached a call through the same callers, but in another order.

If a helper makes the calls, two swapped calls differ only in who called the helper. Different callers are not an error
in themselves: replicas may reach one call in different ways. It is an error if, by a later call at the same place, all
replicas have come through the same callers, each equally often, but in different orders. Compared are the nearest
caller, and the nearest two.

For each place and replica the check keeps the sum of the hashes of its callers, less that of the first replica. When
the sums return to what they were some calls ago, the calls in between were made in another order. A call that all
replicas reach through the same callers does not change the sums, so it costs hardly anything.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

from aiodist._core.call import Place, Post

Callers: TypeAlias = tuple[Place, ...]

_DEPTHS = (1, 2)
_MOST_CALLS = 64


class CallerOrder:
    """A memory of those calls of a group that replicas reached through different callers."""

    def __init__(self) -> None:
        self._sums: dict[Hashable, list[int]] = {}
        self._earlier: dict[Hashable, deque[int]] = {}

    def note(self, first: Post, others: Mapping[int, Post], members: int) -> bool:
        """Note a call that all have made, with the differing posts by position; return whether it is in order."""
        noted = [self._note(first, others, members, depth) for depth in _DEPTHS]  # every depth must be noted
        return all(noted)

    def _note(self, first: Post, others: Mapping[int, Post], members: int, depth: int) -> bool:
        hashes = [hash(_key(_callers(first, depth)))] * members
        for position, post in others.items():
            hashes[position] = hash(_key(_callers(post, depth)))
        if len(set(hashes)) == 1:
            return True
        place = depth, first.path[0][:3]
        sums = self._sums.get(place, [0] * members)
        earlier = self._earlier.setdefault(place, deque([hash(tuple(sums))], _MOST_CALLS))
        self._sums[place] = [total + one - hashes[0] for total, one in zip(sums, hashes, strict=True)]
        now = hash(tuple(self._sums[place]))
        in_order = now not in earlier
        earlier.append(now)
        return in_order


def callers_in_another_order(
    calls: Sequence[tuple[int, Sequence[tuple[Post, tuple[int, ...]]]]],
) -> dict[int, tuple[tuple[int, Callers], ...]]:
    """Return the callers through which each replica reached the last calls at a place, if their order differs.

    Args:
        calls: the numbers of the calls, newest first, with the posts and the replicas that made them.

    Returns:
        By replica, the numbers and callers of the calls, oldest first.
    """
    for depth in _DEPTHS:
        found: dict[int, tuple[tuple[int, Callers], ...]] = {}
        for count, (number, posts) in enumerate(calls[:_MOST_CALLS]):
            if count == 0 and len({_key(_callers(post, depth)) for post, _ in posts}) == 1:
                break
            for post, replicas in posts:
                for replica_id in replicas:
                    found[replica_id] = ((number, _callers(post, depth)), *found.get(replica_id, ()))
            orders = set(found.values())
            if count and len({frozenset(Counter(_key(each) for _, each in order).items()) for order in orders}) == 1:
                return found
    return {}


def _callers(post: Post, depth: int) -> Callers:
    return post.path[1 : 1 + depth]


def _key(callers: Callers) -> tuple[tuple[object, ...], ...]:
    return tuple(place[:3] for place in callers)
