"""The stuck nodes and the shortest cycle, compared with a naive fixpoint and with all cycles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from aiodist._core.waitgraph import shortest_cycle, stuck

many = settings(max_examples=120)
_few = st.lists(st.integers(0, 6), max_size=3)


def naively_stuck(
    waits: Mapping[int, Sequence[int]], blockers: Mapping[int, Sequence[int]], gone: Sequence[int]
) -> set[int]:
    left = {node for node, own in waits.items() if own and node not in gone}
    while True:
        never = left | set(gone)
        free = {node for node in left if any(never.isdisjoint(blockers[wait]) for wait in waits[node])}
        if not free:
            return left
        left -= free


@many
@given(st.dictionaries(st.integers(0, 6), _few), st.lists(_few, min_size=7, max_size=7), _few)
def test_stuck_nodes_are_the_greatest_fixpoint(
    waits: dict[int, list[int]], blocking: list[list[int]], gone: list[int]
) -> None:
    blockers = dict(enumerate(blocking))
    assert stuck(waits, blockers, gone) == naively_stuck(waits, blockers, gone)


def cycles(follows: Mapping[int, Sequence[int]], path: list[int]) -> list[list[int]]:
    """Return all cycles that begin with a path and pass through no node twice."""
    found = []
    for other in follows.get(path[-1], ()):
        if other == path[0]:
            found.append(path)
        elif other not in path:
            found += cycles(follows, [*path, other])
    return found


@many
@given(st.dictionaries(st.integers(0, 6), _few), st.permutations(range(7)))
def test_cycle_is_a_shortest_one(waits: dict[int, list[int]], order: list[int]) -> None:
    follows = {node: [other for other in others if other != node] for node, others in waits.items()}
    lengths = [len(each) for start in range(7) for each in cycles(follows, [start])]
    cycle = shortest_cycle(follows, order)
    assert len(cycle) == min(lengths, default=0)
    assert all(after in follows[node] for node, after in zip(cycle, cycle[1:] + cycle[:1], strict=True))
    assert not cycle or cycle[0] == min(cycle, key=order.index)


def test_cycle_of_thousands_is_found_in_either_direction() -> None:
    ids = list(range(4096))
    assert shortest_cycle({i: [(i + 1) % 4096] for i in ids}, ids) == ids
    assert shortest_cycle({i: [(i - 1) % 4096] for i in ids}, ids) == [0, *ids[:0:-1]]
