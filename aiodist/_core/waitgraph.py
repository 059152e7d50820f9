"""The wait-for graph: which nodes will never continue, and which of them wait for each other in a cycle.

A node (a replica, a task) has waits (a collective, a lock, another task). A wait ends once all of its blockers have
acted. A node is **stuck** when each of its waits has a blocker that is stuck or gone. The stuck nodes are the greatest
set with that property: begin with all nodes, and repeatedly remove each node with a wait that has no blocker left in
the set.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)
Wait = TypeVar("Wait", bound=Hashable)


def stuck(
    waits: Mapping[Node, Sequence[Wait]],
    blockers: Mapping[Wait, Collection[Node]],
    gone: Collection[Node] = (),
) -> set[Node]:
    """Return the nodes that will never continue, in time proportional to the number of waits and blockers.

    Args:
        waits: the waits of each node, which continues when any of them ends. A node without waits can act.
        blockers: the nodes that all must act before a wait ends.
        gone: nodes that will never act, though they wait for nothing.
    """
    left = {node for node, own in waits.items() if own and node not in gone}
    never = left.union(gone)
    waiters: defaultdict[Wait, list[Node]] = defaultdict(list)
    for node in left:
        for wait in waits[node]:
            waiters[wait].append(node)
    blocks: defaultdict[Node, list[Wait]] = defaultdict(list)
    for wait in waiters:
        for node in blockers[wait]:
            blocks[node].append(wait)
    remaining = {wait: sum(node in never for node in blockers[wait]) for wait in waiters}
    ended = [wait for wait, count in remaining.items() if not count]
    while ended:
        for node in waiters[ended.pop()]:
            if node in left:
                left.remove(node)
                for wait in blocks[node]:
                    remaining[wait] -= 1
                    if not remaining[wait]:
                        ended.append(wait)
    return left


def shortest_cycle(follows: Mapping[Node, Iterable[Node]], order: Sequence[Node]) -> list[Node]:
    """Return a shortest cycle, beginning with its first node in ``order``; empty if there is none.

    Args:
        follows: the nodes that each node waits for, without itself.
        order: all nodes.
    """
    best: list[Node] = []
    done: set[Node] = set()
    starts = list(reversed(order))
    while starts and len(best) != 2:
        start = starts.pop()
        if start in done:
            continue
        found = _cycle_through(follows, start, done, len(best) or len(order) + 1)
        done.add(start)  # a shorter cycle does not pass through it
        if found:
            best = found
            starts += found  # the last is tried first: in a ring it leads to a finished node at once
    if not best:
        return []
    rank = {node: index for index, node in enumerate(order)}
    first = min(range(len(best)), key=lambda index: rank[best[index]])
    return best[first:] + best[:first]


def _cycle_through(
    follows: Mapping[Node, Iterable[Node]], start: Node, without: Collection[Node], shorter_than: int
) -> list[Node]:
    """Return the shortest cycle through a node and without some others, if it has fewer nodes than that."""
    previous: dict[Node, Node] = {}
    queue = deque([(start, 1)])
    seen: set[int] = set()
    while queue:
        node, length = queue.popleft()
        if length >= shorter_than:
            return []
        successors = follows.get(node, ())
        if id(successors) in seen:  # thousands may wait for the same thousands
            continue
        seen.add(id(successors))
        for other in successors:
            if other == start:
                cycle = [node]
                while cycle[-1] != start:
                    cycle.append(previous[cycle[-1]])
                return cycle[::-1]
            if other not in previous and other not in without:
                previous[other] = node
                queue.append((other, length + 1))
    return []
