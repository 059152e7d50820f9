"""Who waits for whom: the one question behind every deadlock, for nodes and waits of any kind.

A node (a replica, a task) has waits (a collective, a lock, another task). A wait ends once all of its blockers have
acted. A node is **stuck** when each of its waits has a blocker that is stuck or gone. The stuck nodes are the greatest
set with that property: begin with all nodes, and repeatedly remove each node with a wait that has no blocker left in
the set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

Node = TypeVar("Node", bound=Hashable)
Wait = TypeVar("Wait", bound=Hashable)


def stuck(
    waits: Mapping[Node, Sequence[Wait]],
    blockers: Mapping[Wait, Collection[Node]],
    gone: Collection[Node] = (),
) -> set[Node]:
    """Return the nodes that will never continue.

    Args:
        waits: what each node waits for; it continues when any of these waits ends. A node without waits can act.
        blockers: which nodes must act before a wait ends: all of them.
        gone: nodes that will never act, though they wait for nothing.

    This takes time in proportion to the number of waits and blockers.
    """
    left = {node for node, own in waits.items() if own and node not in gone}
    never = left.union(gone)
    every = dict.fromkeys(wait for own in waits.values() for wait in own)  # thousands may have one wait in common
    held = {wait: sum(node in never for node in blockers[wait]) for wait in every}
    waiters: dict[Wait, list[Node]] = {}
    blocked_by: dict[Node, list[Wait]] = {}
    for node in left:
        for wait in waits[node]:
            waiters.setdefault(wait, []).append(node)
    for wait in held:
        for node in blockers[wait]:
            blocked_by.setdefault(node, []).append(wait)
    ended = deque(wait for wait, count in held.items() if not count)
    while ended:
        for node in waiters.get(ended.popleft(), ()):
            if node not in left:
                continue
            left.remove(node)
            for wait in blocked_by.get(node, ()):
                held[wait] -= 1
                if not held[wait]:
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
        found = _way_back(follows, start, done, len(best) or len(order) + 1)
        done.add(start)  # no other cycle that is looked for passes through it
        if found:
            best = found
            starts += found  # the last first: in a ring it leads to what is done at once
    if not best:
        return []
    rank = {node: index for index, node in enumerate(order)}
    first = min(range(len(best)), key=lambda index: rank[best[index]])
    return best[first:] + best[:first]


def _way_back(
    follows: Mapping[Node, Iterable[Node]], start: Node, without: Collection[Node], shorter_than: int
) -> list[Node]:
    """Return the shortest way from a node back to itself without some others, if it has fewer nodes than that."""
    came: dict[Node, Node] = {}
    queue = deque([(start, 1)])
    seen: set[int] = set()
    while queue:
        node, length = queue.popleft()
        if length >= shorter_than:
            return []
        onward = follows.get(node, ())
        if id(onward) in seen:  # thousands wait for the same thousands
            continue
        seen.add(id(onward))
        for other in onward:
            if other == start:
                way = [node]
                while way[-1] != start:
                    way.append(came[way[-1]])
                return way[::-1]
            if other not in came and other not in without:
                came[other] = node
                queue.append((other, length + 1))
    return []
