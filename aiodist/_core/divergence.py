"""How replicas diverged: the calls of a replica of the majority, aligned with those of a replica of the minority.

All made the same calls before the collective in trouble, so only later calls can differ. Usually each replica has made
one, in which it waits. If calls overlap there are more, and these show what was skipped, added or swapped. If not, the
calls before often repeat (a training loop): what followed the last time shows which of the two sides left the pattern.
Otherwise the program's source may show that one call is in a branch on the way to the other. The report does not call
the last two certain.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import TypeVar

from aiodist._core import source
from aiodist._core.report import CallRecord, Divergence, DivergenceKind
from aiodist._core.terms import Location
from aiodist._core.text import capitalised, clause, count, ids_briefly, place, shortened

_MOST_LINES = 8
_MOST_BREAKS = 4
_MOST_CALLERS = 4
_LONGEST_CALL = 60


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two sides that are compared, with its first replica's calls from the one in trouble on."""

    replicas: tuple[int, ...]
    calls: Sequence[CallRecord]  # empty if it has ended
    keys: Sequence[Hashable]  # of the calls, equal if they mean the same
    path: tuple[Location, ...]  # from its function down to its call, or to the place where it returned
    handles: str  # the exception that it is handling; empty if there is none


@dataclass(frozen=True, slots=True)
class Past:
    """The known calls that all made before, newest last."""

    calls: Sequence[CallRecord]
    keys: Sequence[Hashable]


T = TypeVar("T", Past, Side)


def diverged(past: Past, usual: Side, odd: Side, *, tie: bool = False) -> Divergence | None:
    """Return how the odd side diverged from the usual one; None if that cannot be known.

    On a tie neither is the odd one, so a call that only one of them makes is not reported as skipped by the other.
    """
    rounds = _placed(past), _placed(usual), _placed(odd)
    if not odd.calls or not usual.calls:
        return _left_loop(*rounds)
    found = (
        _by_calls(usual, odd)
        or _by_exception(usual, odd)
        or _left_loop(*rounds)
        or _by_rounds(*rounds)
        or _by_source(usual, odd)
    )
    if tie and found is not None and found.kind in (DivergenceKind.SKIPPED, DivergenceKind.ADDED):
        one, other = found.replicas, found.others
        if found.kind is DivergenceKind.SKIPPED:
            one, other = other, one
        only = f"{clause(one, 'makes')} {_listed(found.calls)}, which {clause(other, 'does')} not make here."
        return replace(found, text=capitalised(only))
    return found


def _placed(part: T) -> T:
    """Return a part whose keys include the places: a call that means the same elsewhere is no round of a loop."""
    return replace(part, keys=[(key, call.location) for key, call in zip(part.keys, part.calls, strict=True)])


def _listed(calls: Sequence[CallRecord]) -> str:
    more = f" and {count(len(calls) - 3, 'more call')}" if len(calls) > 3 else ""
    return ", ".join(f"{shortened(call.call, _LONGEST_CALL)} at {place(call.location)}" for call in calls[:3]) + more


def _kind_at(call: CallRecord) -> str:
    return f"{call.call.partition('(')[0]} at {place(call.location)}"


def _skipped(
    usual: Side, odd: Side, calls: Sequence[CallRecord], *, certain: bool, how: str = "", then: str = ""
) -> Divergence:
    first, last, others = calls[0].sequence_number, calls[-1].sequence_number, ids_briefly(usual.replicas)
    what = f"{_kind_at(calls[0])}, which {others} made as #{first}"
    if len(calls) > 1:
        made = "made" if certain else "would make"  # they wait in the first
        what = f"{len(calls)} calls, from {_kind_at(calls[0])} on, which {others} {made} as #{first} to #{last}"
    text = f"{capitalised(how + ids_briefly(odd.replicas))} skipped {what}{then}."
    return Divergence(DivergenceKind.SKIPPED, odd.replicas, usual.replicas, tuple(calls), certain, text)


def _next_call(odd: Side, skipped: Sequence[CallRecord], *, or_swapped: bool) -> str:
    """Return the end of a sentence on skipped calls, if the odd side's next call is also a call of the others."""
    its, makes = ("its", "it makes") if len(odd.replicas) == 1 else ("their", "they make")
    alternative = f", or {makes} the two in another order" if or_swapped else ""
    return f"; {its} next call is the others' #{skipped[-1].sequence_number + 1}{alternative}"


def _added(usual: Side, odd: Side, calls: Sequence[CallRecord], what: str, *, certain: bool = False) -> Divergence:
    text = f"{capitalised(ids_briefly(odd.replicas))} {what}."
    return Divergence(DivergenceKind.ADDED, odd.replicas, usual.replicas, tuple(calls), certain, text)


# By the calls themselves, and by the callers of one call.


def _by_calls(usual: Side, odd: Side) -> Divergence | None:
    if usual.keys[:2] == odd.keys[1::-1] and len(usual.keys) > 1:
        both, calls = ids_briefly([usual.replicas[0], odd.replicas[0]]), usual.calls[:2]
        text = f"{both} make the same two calls in opposite order: {' and '.join(map(_listed, zip(calls)))}."
        return Divergence(DivergenceKind.SWAPPED, odd.replicas, usual.replicas, tuple(calls), True, capitalised(text))
    if odd.keys[0] in usual.keys:
        skipped = usual.calls[: usual.keys.index(odd.keys[0])]
        may_follow = len(skipped) == len(odd.calls) == 1  # it waits in one call, so it may make the other after it
        then = _next_call(odd, skipped, or_swapped=may_follow)
        return _skipped(usual, odd, skipped, certain=not may_follow, then=then)
    if usual.keys[0] in odd.keys:
        calls = odd.calls[: odd.keys.index(usual.keys[0])]
        more = f"made {count(len(calls), 'more call')} than {ids_briefly(usual.replicas)}: {_listed(calls)}"
        return _added(usual, odd, calls, more, certain=True)
    return None


def reached_in_another_order(
    usual: Side, odd: Side, callers: Sequence[tuple[int, Location]], others: Sequence[tuple[int, Location]]
) -> Divergence:
    """Return the divergence of two sides that reached one call through the same callers in different orders.

    The callers of both sides are given with the numbers of their calls.
    """
    differing = [i for i, (a, b) in enumerate(zip(callers, others, strict=True)) if a != b]
    callers, others = (each[differing[0] : differing[-1] + 1] for each in (callers, others))
    order = ", then ".join(f"from {place(caller)} as #{number}" for number, caller in callers[:_MOST_CALLERS])
    other = "in the opposite order"
    if [caller for _, caller in callers] != [caller for _, caller in reversed(others)]:
        other = f"in another order: {', '.join(place(caller) for _, caller in others[:_MOST_CALLERS])}"
    reached = f"{capitalised(ids_briefly(usual.replicas))} reached {_kind_at(odd.calls[0])} {order}"
    calls = tuple(CallRecord(number, odd.calls[0].call, caller) for number, caller in callers)
    text = f"{reached}; {ids_briefly(odd.replicas)} {other}."
    return Divergence(DivergenceKind.SWAPPED, odd.replicas, usual.replicas, calls, True, text)


# By a loop that one side has left.


def _left_loop(past: Past, usual: Side, odd: Side) -> Divergence | None:
    for inside, left in ((usual, odd), (odd, usual)):
        way = _way_out(inside, left) if inside.keys and inside.keys[0] in past.keys else None
        if way is not None:
            loop, there = way
            extra = _extra_call(past, inside, left, loop, there)
            return extra or _uneven(past, inside, left, loop, None if left is usual else there)
    return None


def _way_out(inside: Side, left: Side) -> tuple[Location, Location] | None:
    """Return the loop that only one side is in, and where the other has gone; None if there is no such loop."""
    fork = _fork(inside, left)
    loop = None if fork is None else source.loop_left(*fork)
    return None if fork is None or loop is None else (loop, fork[1])


def left_by_exception(usual: Side, odd: Side) -> bool:
    """Return whether an exception may have ended the loop that the odd side has left."""
    way = _way_out(usual, odd)
    return way is not None and source.handler_between(*way) is not None


def _extra_call(past: Past, inside: Side, left: Side, loop: Location, there: Location) -> Divergence | None:
    """Return the call that one side makes after a loop, if the others may be in the next round of an outer loop.

    This is possible if the call is under a condition, in a loop around both, and was never made before.
    """
    if not left.calls or left.keys[0] in past.keys or not source.is_in_one_loop(loop, there):
        return None
    call = left.calls[0]
    under = source.condition_of(call.location) or source.condition_of(there)
    if under is None or (under.file == loop.file and under.line <= loop.line):
        return None
    made = f"made a call that {clause(inside.replicas, 'does')} not have: {_listed([call])}, under {_code_at(under)}"
    return _added(inside, left, [call], made)


def _uneven(past: Past, inside: Side, left: Side, loop: Location, outside: Location | None) -> Divergence:
    """Return that one side has left a loop for ``outside``, or if that is None, that only the other stayed in it."""
    made = sum(key == inside.keys[0] for key in past.keys)
    call = inside.calls[0]
    if past.calls[0].sequence_number == 0:  # all rounds are known
        text = (
            f"{capitalised(ids_briefly(inside.replicas))} made {count(made + 1, 'call')} at {place(call.location)}, "
            f"{ids_briefly(left.replicas)} made {made}; after {count(made, 'common round')} "
        )
    else:
        text = f"After more than {made} common calls at {place(call.location)} "
    if outside is None:
        text += f"{clause(inside.replicas, 'makes')} another round of the loop at {place(loop)}."
    else:
        text += f"{ids_briefly(left.replicas)} left the loop at {place(loop)}{_ways_out(loop, outside)}."
    return Divergence(DivergenceKind.LEFT_LOOP, left.replicas, inside.replicas, (call,), True, text)


def _ways_out(loop: Location, outside: Location) -> str:
    """Return what may have ended a loop or a round early: an exception, or a condition checked in every round."""
    handler = source.handler_between(loop, outside)
    if handler is not None:
        return f"; an exception may have ended it, caught by {_code_at(handler)}"
    found = [
        f"a {word} under {_code_at(condition)}"
        for word, conditions in source.conditions_in(loop).items()
        for condition in conditions[:_MOST_BREAKS]
    ]
    return f", which has {' and '.join(found)}" if found else ""


def _code_at(location: Location) -> str:
    return f"`{source.line_at(location)}` at {place(location)}"


# By earlier rounds of a loop.


def _by_rounds(past: Past, usual: Side, odd: Side) -> Divergence | None:
    expected = _expected(past)
    if not expected or usual.keys[0] == odd.keys[0]:
        return None
    if past.keys[expected[0]] == odd.keys[0]:  # the majority left the pattern
        usual, odd = odd, usual
    elif past.keys[expected[0]] != usual.keys[0]:
        return None
    call, next_call = odd.calls[0], usual.calls[0]
    ahead = next((j for j, index in enumerate(expected) if past.keys[index] == odd.keys[0]), None)
    if ahead:
        number = next_call.sequence_number
        calls = [past.calls[index]._replace(sequence_number=number + j) for j, index in enumerate(expected[:ahead])]
        then, how = _next_call(odd, calls, or_swapped=ahead == 1), "judging by earlier rounds, "
        return _skipped(usual, odd, calls, certain=False, how=how, then=then)
    if call.location == next_call.location:  # it is one call, and the report says what differs in it
        return None
    as_before = f"{ids_briefly(usual.replicas)} continued as before, with {_kind_at(next_call)}"
    return _added(usual, odd, [call], f"made a call that earlier rounds do not have: {_listed([call])}; {as_before}")


def _expected(past: Past) -> list[int]:
    """Return the indices of one round of past calls, which should come next if the past repeats.

    The longest run of calls that ends now and occurred before is found; the calls that followed it then are expected.
    """
    codes: dict[Hashable, int] = {}
    keys = [codes.setdefault(key, len(codes)) for key in past.keys]
    size, longest, period = len(keys), 0, 0
    for end in range(size - 1, 0, -1):
        length = 0
        while length < end and keys[end - 1 - length] == keys[size - 1 - length]:
            length += 1
        if length > longest:
            longest, period = length, size - end
    return list(range(size - period, size))


# By the source.


def _by_exception(usual: Side, odd: Side) -> Divergence | None:
    """Return the divergence if only one side makes its call while it handles an exception."""
    if bool(usual.handles) == bool(odd.handles):
        return None
    one, other = (odd, usual) if odd.handles else (usual, odd)
    text = f"{capitalised(clause(one.replicas, 'is'))} handling {one.handles}."
    return Divergence(DivergenceKind.OTHER_BRANCH, one.replicas, other.replicas, (), True, text)


def _by_source(usual: Side, odd: Side) -> Divergence | None:
    fork = _fork(odd, usual)
    if fork is None:
        return None
    here, there = fork
    if (here, there) == (odd.calls[0].location, usual.calls[0].location):
        if source.is_optional(here, there):
            call = odd.calls[0]
            more = f"made 1 more call: {_listed([call])}, in a branch on the way to {place(there)}"
            return _added(usual, odd, [call], more)
        if source.is_optional(there, here):
            return _skipped(usual, odd, usual.calls[:1], certain=False)
    line = branch_line(usual, odd)
    if line is None:
        return None
    return Divergence(DivergenceKind.OTHER_BRANCH, odd.replicas, usual.replicas, (), False, line)


def branch_line(usual: Side, odd: Side) -> str | None:
    """Return a sentence on the line at which two sides took different branches, and where each went from there."""
    fork = _fork(odd, usual)
    if fork is None:
        return None
    here, there = fork
    common = source.branch_between(here, there)
    if common is None or common in (here, there):  # one of them ended at the branch itself
        return None
    first, second = (odd.replicas, here), (usual.replicas, there)
    if len(odd.replicas) == len(usual.replicas):
        first, second = sorted([first, second])
    return (
        f"Last common line {place(common)}, `{source.line_at(common)}`; then {clause(first[0], 'goes')} to "
        f"{place(first[1])}, {ids_briefly(second[0])} to {place(second[1])}."
    )


def _fork(a: Side, b: Side) -> tuple[Location, Location] | None:
    """Return the first places at which the paths to two calls differ, if both places are in one function."""
    for here, there in zip(a.path, b.path, strict=False):
        if here != there:
            same = here.file == there.file and here.function == there.function
            return (here, there) if same else None
    return None


# The calls side by side.


def diff(usual: Side, odd: Side) -> list[str]:
    """Return the calls of both sides as a diff, if either has made more than the one in which it waits."""
    if max(len(usual.calls), len(odd.calls)) < 2 or not odd.calls or not usual.calls:
        return []
    first = usual.calls[0].sequence_number
    lines = [f"From #{first} on, - {ids_briefly(usual.replicas)}, + {ids_briefly(odd.replicas)}:"]
    for tag, a, b, c, d in SequenceMatcher(a=usual.keys, b=odd.keys, autojunk=False).get_opcodes():
        runs = [("  ", usual.calls[a:b])] if tag == "equal" else [("- ", usual.calls[a:b]), ("+ ", odd.calls[c:d])]
        for mark, calls in runs:
            lines += [f"  {mark}#{call.sequence_number} {_listed([call])}" for call in calls[:3]]
            lines += [f"  {mark}… {count(len(calls) - 3, 'more call')}"] if len(calls) > 3 else []
    return lines[: _MOST_LINES + 1]
