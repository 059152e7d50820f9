"""Callers: finds replicas that reached a call through the same callers, but in another order.

If a helper makes the calls, two swapped calls differ only in who called the helper. Different callers are not an error
in themselves: replicas may reach one call in different ways. It is an error if, by a later call at the same place, all
replicas have come through the same callers, each equally often, but in different orders. Compared are the nearest
caller, and the nearest two.

For each place and replica the check keeps the sum of the hashes of its callers, less that of the first replica. When
the sums return to what they were before some call, the calls since then were made in another order. A call that all
replicas reach through the same callers does not change the sums, so it costs hardly anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache

from aiodist._core.call import Place, Post
from aiodist._core.terms import Location

_DEPTHS = (1, 2)


class CallerOrder:
    """A memory of the calls that participants have reached in different ways, as far back as some number of calls."""

    def __init__(self, most_calls: int) -> None:
        self._most_calls = most_calls
        self._sums: dict[Hashable, list[int]] = {}
        self._calls: dict[Hashable, dict[int, int]] = {}  # the last calls' numbers, by a hash of the sums before each

    def note(self, number: int, ways: Iterable[Sequence[int]], place: Hashable = None) -> int | None:
        """Note a call at a place that all participants have made, by its number and how each has reached it.

        A way has several aspects, a `mixed_hash` each; in each, the ways of different participants are compared.

        Returns:
            The number of the first of the calls that they have made in another order; None if there are none.
        """
        aspects = enumerate(zip(*ways, strict=True))
        found = [self._note((place, index), number, column) for index, column in aspects]
        return max((first for first in found if first is not None), default=None)

    def _note(self, key: Hashable, number: int, hashes: Sequence[int]) -> int | None:
        if len(set(hashes)) == 1:
            return None
        sums, calls = self._sums.get(key, [0] * len(hashes)), self._calls.setdefault(key, {})
        calls[hash(tuple(sums))] = number
        if len(calls) > self._most_calls:
            del calls[next(iter(calls))]
        self._sums[key] = [total + one - hashes[0] for total, one in zip(sums, hashes, strict=True)]
        first = calls.get(hash(tuple(self._sums[key])))
        return first if first is not None and number - first < self._most_calls else None


def mixed_hash(value: Hashable) -> int:
    """Return a hash whose sums tell values apart. That of a tuple is nearly a sum of its items' itself."""
    return hash(str(hash(value)))


def nearest_callers(post: Post) -> tuple[int, ...]:
    """Return hashes of the nearest caller of a post, and of the nearest two."""
    return _hashes(post.path[: 1 + _DEPTHS[-1]])


@lru_cache(maxsize=4096)
def _hashes(path: tuple[Place, ...]) -> tuple[int, ...]:
    return tuple(mixed_hash(tuple(place[:3] for place in path[: 1 + depth])) for depth in _DEPTHS)


def callers_in_another_order(
    calls: Sequence[tuple[int, Sequence[tuple[Post, tuple[int, ...]]]]],
) -> dict[int, tuple[tuple[int, Location], ...]]:
    """Return the callers through which each replica reached the last calls at a place, if their order differs.

    Args:
        calls: the numbers of the calls, newest first, with the posts and the replicas that made them.

    Returns:
        By replica, the numbers and callers of the calls that replicas reached through different callers, oldest first.
        If a replica's own function made a call, the call's place stands for its caller.
    """
    for index, depth in enumerate(_DEPTHS):
        found: list[tuple[int, dict[int, Post]]] = []
        sums: Counter[int] = Counter()  # of the hashes of each replica's callers
        for number, posts in calls:
            if len({nearest_callers(post)[index] for post, _ in posts}) > 1:
                found.insert(0, (number, {each: post for post, replicas in posts for each in replicas}))
                sums.update({each: nearest_callers(post)[index] for each, post in found[0][1].items()})
                if len(set(sums.values())) == 1:
                    return {
                        each: tuple((number, post_of[each].path[: 1 + depth][-1].location) for number, post_of in found)
                        for each in sums
                    }
            elif not found:
                break
    return {}
