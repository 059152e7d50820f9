"""Rendering: the result of an analysis as text: headline, each replica's call, what differs, how it came about, advice.

A line that has nothing to say is left out. Replicas that do the same share a line, so a text about thousands of them
fits on a screen.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeAlias

from aiodist._core import source
from aiodist._core.call import LEAF, Call, Function, Post, compare, leaf_text
from aiodist._core.divergence import branch_line, diff, left_by_exception
from aiodist._core.report import DivergenceKind, ReplicaReport
from aiodist._core.terms import Location, Reason, ReplicaState
from aiodist._core.text import (
    WIDTH,
    capitalised,
    clause,
    count,
    cut,
    fitted,
    full_place,
    grouped,
    ids_briefly,
    noun,
    place,
    shortened,
    shown_file,
)
from aiodist._core.trouble import Collective

_MOST_PLACES = 6
_MOST_PARTITIONS = 8
_MOST_PATHS = 4
_MOST_STEPS = 6
_MOST_DEVICES = 2
_LONGEST_CALL = 60
_SHORTEST_LINE = 30
_LONGEST_PART = 80

_ids = partial(ids_briefly, most_runs=12)
_clause = partial(clause, most_runs=12)


def trouble_text(trouble: Collective) -> tuple[list[str], tuple[str, ...]]:
    """Return the lines on a collective in trouble, and the advice."""
    cycle_text = trouble.index.snapshot.cycle_text
    lines = [
        _headline(trouble),
        *_replica_lines(trouble),
        *_difference(trouble),
        *trouble.cancellations,
        *([f"{capitalised(clause(trouble.unmade_by, 'has'))} not made {trouble.label}."] if trouble.unmade_by else []),
        *([cycle_text] if cycle_text and trouble.reason is Reason.TIMEOUT else []),
        *_last_agreement(trouble),
        *_divergence(trouble),
    ]
    return lines, tuple(fitted(_advice(trouble)))


# Replicas that wait for each other.


class Step(NamedTuple):
    """Replicas of a cycle that wait in one collective for the missing ones."""

    replicas: tuple[int, ...]
    post: Post
    waits_in: Collective
    missing: tuple[int, ...]
    odd: bool

    def __str__(self) -> str:
        where = f"{self.waits_in.with_group(str(self.post.call))} ({place(self.post.location)})"
        waits = f"{clause(self.replicas, 'waits')} in {where} for {ids_briefly(self.missing)}"
        return f"{'>' if self.odd else ' '} {waits}"


def cycle_text(steps: Sequence[Step]) -> tuple[list[str], tuple[str, ...]]:
    """Return the lines on replicas that wait for each other in collectives of several groups, and the advice."""
    everyone = {i for step in steps for i in step.replicas}
    each = "each in another group's collective" if len(everyone) == len(steps) else "in collectives of several groups"
    shown_steps = list(map(str, steps))
    if len(steps) > _MOST_STEPS:
        shown_steps[_MOST_STEPS - 1 : -1] = [f"  … and {len(steps) - _MOST_STEPS} more"]
    unmade = [(creation, step) for step in steps if (creation := step.waits_in.unmade) is not None]
    places = [(creation.slot.posts[0][0].location, step.odd) for creation, step in unmade]
    places += [(step.post.location, step.odd) for step in steps]
    differ, advice = _groups_differ(steps, unmade)
    lines = [
        f"{ids_briefly(everyone)} wait for each other, {each}",
        *(f"{line}," for line in shown_steps[:-1]),
        shown_steps[-1],
        *source_lines(places),
        *differ,
    ]
    return lines, tuple(fitted([advice]))


def _groups_differ(steps: Sequence[Step], unmade: Sequence[tuple[Collective, Step]]) -> tuple[list[str], str]:
    """Return how the groups of a cycle differ, and the advice; ``unmade`` are the incomplete creations."""
    if len({creation.group.key for creation, _ in unmade}) > 1:
        calls = [(shortened(str(each.slot.posts[0][0].call), _LONGEST_CALL), step.replicas) for each, step in unmade]
        listed = ", ".join(f"{call} on {ids_briefly(ids)}" for call, ids in calls)
        return [f"The members, the order or the names of their groups differ: {listed}."], _SAME_GROUP
    if unmade:
        creation, _ = unmade[0]
        others = set(creation.group.key[0]) - creation.records.keys()
        return [f"{capitalised(clause(others, 'has'))} not made {creation.label}."], _SAME_GROUP
    labels = [step.waits_in.label for step in steps]
    if len(steps) == 2 and None in labels and compare(steps[0].post.call, steps[1].post.call) is None:
        whose = " and ".join(f"{ids_briefly(s.replicas)} in that of {s.waits_in.label or 'the run'}" for s in steps)
        return [f"They make the same call in different contexts: {whose}."], _SAME_CONTEXT
    return [], _SAME_ORDER


# The headline.


def _headline(trouble: Collective) -> str:
    collective = _collective(trouble)
    match trouble.reason:
        case Reason.EXITED if trouble.exited:
            without = f"making {trouble.label}" if trouble.number < 0 else collective
            return f"{_ids(trouble.exited)} ended without {without}, which {_what_others_do(trouble)}"
        case Reason.ABANDONED:
            return f"{_clause(trouble.abandoned, 'was')} cancelled out of {collective} before it was complete"
        case Reason.UNMATCHED:
            return _unmatched(trouble)
        case Reason.EXITED | Reason.TIMEOUT:
            seconds = trouble.timeout_seconds
            failed = f"timed out after {seconds:.3g} s" if seconds else "cannot be completed"
            return f"{collective} {failed}: {_what_is_late(trouble)}"
    return f"{noun()}s disagree at {collective}"


def _collective(trouble: Collective) -> str:
    if trouble.number < 0:
        return f"the creation of {trouble.label}"
    number = f"collective #{trouble.number}"
    if trouble.is_join:
        number = f"the join ({number})"
    return f"{number} of {trouble.label}" if trouble.label is not None else number


def _what_others_do(trouble: Collective) -> str:
    waiting = [i for i, replica in trouble.reports.items() if replica.state is ReplicaState.WAITING]
    if waiting and trouble.number >= 0:
        return f"{_clause(waiting, 'waits')} in"
    others = trouble.reports.keys() - set(trouble.exited)
    return f"{_ids(others) if others else 'nobody'} {'made' if trouble.number < 0 else 'called'}"


def _unmatched(trouble: Collective) -> str:
    (here, *_), post, _ = trouble.partitions[0]
    there = next(i for i in trouble.reports if i != here)
    if there in trouble.index.unknown:
        return f"{noun()} {here} waits in {post.call}, and nothing is known of {noun()} {there}"
    if post.call.role.startswith("send"):
        return f"{noun()} {there} does not receive what {noun()} {here} sends"
    return f"{noun()} {there} does not send what {noun()} {here} is to receive"


def _what_is_late(trouble: Collective) -> str:
    arrived = {replica_id for partition in trouble.partitions for replica_id in partition.replicas}
    absent = trouble.reports.keys() - arrived
    missing = absent - trouble.index.unknown
    wait = _clause(arrived, "waits") if arrived else "nobody waits"
    if missing:
        return f"{_clause(missing, 'has')} not arrived, {wait} in it"
    if absent:
        return f"{wait} in it, and nothing is known of {_ids(absent)}"
    return "its merge function has not returned" if trouble.merges else "all have arrived, but their values have not"


# What each replica called, and where: the lines that begin with a replica, and the source lines below them.


_Doing: TypeAlias = Mapping[int, tuple[str, Location | None]]
"""What each replica does, and where."""


def _replica_lines(trouble: Collective) -> list[str]:
    leaf = _differing_leaf(trouble)
    calls: dict[int, str] = {}
    for each in trouble.partitions:
        calls.update(dict.fromkeys(each.replicas, _shown_call(each.post.call, leaf)))
    doing = {i: _doing(trouble, replica, calls.get(i)) for i, replica in trouble.reports.items()}
    return [*_rows(trouble, doing), *_source_lines(trouble, doing), *_waits(trouble)]


def _shown_call(call: Call, leaf: int | None) -> str:
    """Return a call as text; for a large nest, only the leaf that differs."""
    whole = str(call)
    if call.structure is None or len(whole) <= _LONGEST_CALL:
        return whole
    if leaf is None:  # an axis, a source or a name stands at the end
        return shortened(whole, _LONGEST_CALL)
    differs = f"value{call.paths[leaf]}: {leaf_text(*call.leaves[leaf])}"
    return f"{call.kind}({', '.join([*filter(None, [call.op]), f'{len(call.paths)} leaves', differs])})"


def _doing(trouble: Collective, replica: ReplicaReport, call: str | None) -> tuple[str, Location | None]:
    """Return what a replica does, and where; ``call`` is its call in the collective in question, if it has made one."""
    replica_id, index = replica.replica_id, trouble.index
    calls_made = replica.history[-1].sequence_number + 1 if replica.history else 0
    made = f"after {count(calls_made, 'collective')}"
    if replica.call is not None:
        return call or replica.call, replica.location
    if replica_id in index.unknown:
        return "nothing is known", None
    if replica.state is ReplicaState.EXITED:
        value = "" if replica.returned in (None, "None") else f"{replica.returned} "
        return f"returned {value}{made}", replica.ended_at
    if replica.state.ended:
        return f"{replica.state} {made}", None
    for other in index.waits.get(replica_id, ()):
        record = other.records[replica_id]
        return f"waits in {other.with_group(record.call)}", record.location
    what = "cancelled out of it, continues" if replica_id in trouble.abandoned else "elsewhere"
    return f"{what}, {made}", replica.stack[-1] if replica.stack else None


def _rows(trouble: Collective, doing: _Doing) -> list[str]:
    """Return one line for all replicas that do the same, with the minority marked and last."""
    minority = set(trouble.minority)
    by_row = grouped(
        ((replica_id in minority, what, full_place(at) if at is not None else ""), replica_id)
        for replica_id, (what, at) in doing.items()
    )
    ordered = sorted(by_row.items(), key=lambda each: (each[0][0], -len(each[1]), each[1][0]))
    rows = []
    for (mark, what, where), ids in ordered[:_MOST_PARTITIONS]:
        devices = dict.fromkeys(trouble.reports[replica_id].device for replica_id in ids[:_MOST_DEVICES])
        device = ", ".join(devices) if len(ids) <= _MOST_DEVICES else count(len(ids), noun())
        rows.append((mark, ids_briefly(ids), device, what, where))
    rest = sum(len(ids) for _, ids in ordered[_MOST_PARTITIONS:])
    more = [f"  … and {count(rest, noun())} in {len(ordered) - _MOST_PARTITIONS} more ways"] if rest else []
    return _columns(rows) + more


def _columns(rows: Sequence[tuple[bool, str, str, str, str]]) -> list[str]:
    """Return rows in columns; if they do not fit, with the places on separate lines."""
    who, device, what, where = (max(map(len, cells)) for cells in zip(*(row[1:] for row in rows), strict=True))
    room = WIDTH - (2 + who + 2 + device + 2)
    stacked = what + 3 + where > room
    lines = []
    for index, (mark, *cells, at) in enumerate(rows):
        start = f"{'>' if mark else ' '} {cells[0]:<{who}}  {cells[1]:<{device}}  "
        if stacked:  # replicas at the same place share its line
            shared = index + 1 < len(rows) and rows[index + 1][-1] == at
            lines += [f"{start}{shortened(cells[2], room)}".rstrip(), *([f"      {at}"] if at and not shared else [])]
        else:
            lines.append(f"{start}{cells[2]:<{what}}   {at}".rstrip())
    return lines


def _source_lines(trouble: Collective, doing: _Doing) -> list[str]:
    """Return the source lines of the first few places in the text, with those of the minority marked.

    The lines of different callers of a shared helper come before the helper's own line.
    """
    minority = set(trouble.minority)
    chains = {each.replicas[0]: chain for each, chain in zip(trouble.partitions, trouble.chains, strict=False)}
    places: dict[Location, bool] = {}
    helpers: dict[Location, bool] = {}
    for replica_id in sorted(doing, key=minority.__contains__):
        for at in chains.get(replica_id, ()):
            places.setdefault(at, replica_id in minority)
        here = doing[replica_id][1]
        if here is not None and any(chains.values()):
            helpers[here] = False
        elif here is not None:
            places.setdefault(here, replica_id in minority)
    return source_lines([*places.items(), *helpers.items()])


def source_lines(places: Iterable[tuple[Location, bool]]) -> list[str]:
    """Return the source lines at the first few of some places, some of which are marked."""
    lines: dict[tuple[str, str], bool] = {}
    for at, mark in islice(places, _MOST_PLACES):
        line = source.line_at(at)
        if line:
            lines.setdefault((place(at), line), mark)
    width = max((len(where) for where, _ in lines), default=0)
    room = max(_SHORTEST_LINE, WIDTH - width - 6)
    return [f"{'>' if mark else ' '}   {where:<{width}}  {cut(line, room)}" for (where, line), mark in lines.items()]


def _waits(trouble: Collective) -> list[str]:
    """Return what replicas wait for outside of collectives, with one line for all that wait for the same thing."""
    waits = grouped(
        (each.waits_for, each.replica_id) for each in trouble.reports.values() if each.waits_for is not None
    )
    return [f"{capitalised(clause(ids, what))}." for what, ids in list(waits.items())[:_MOST_PLACES]]


# What differs inside the calls: the first field that is not the same, unless the rows show it.


def _difference(trouble: Collective) -> list[str]:
    calls, reason, leaf = _calls(trouble), trouble.reason, _differing_leaf(trouble)
    if leaf is not None:
        what = "array type" if reason is Reason.DEVICE else reason
        where = f"{what} differs at value{calls[0].paths[leaf]}"
        return [f"The {where}: {_on_each(trouble, [leaf_text(*call.leaves[leaf]) for call in calls])}."]
    match reason:
        case Reason.CALL_SITE:
            return _sites_differ(trouble)
        case Reason.STRUCTURE:
            return [_structures_differ(trouble)]
        case Reason.MERGE_FN:
            functions = "merge functions" if trouble.merges else "functions"
            return [f"The {functions} differ: {_on_each(trouble, [_function(call.function) for call in calls])}."]
    return []


def _calls(trouble: Collective) -> list[Call]:
    return [each.post.call for each in trouble.partitions]


_LEAF_FIELDS = {Reason.SHAPE: 0, Reason.DTYPE: 1, Reason.DEVICE: 2}


def _differing_leaf(trouble: Collective) -> int | None:
    """Return the index of the first leaf that differs, if the reason is a shape, dtype or device in a nest."""
    field, calls = _LEAF_FIELDS.get(trouble.reason), _calls(trouble)
    if field is None or calls[0].structure is None:
        return None
    leaves = enumerate(zip(*(call.leaves for call in calls), strict=True))
    return next((index for index, column in leaves if len({leaf[field] for leaf in column}) > 1), None)


def _sites_differ(trouble: Collective) -> list[str]:
    """Distinguish calls on one line, by their columns or their callers."""
    for depth, sites in enumerate(zip(*(each.post.path for each in trouble.partitions), strict=False)):
        if len({site[:3] for site in sites}) > 1:
            on_one_line = len({site[:2] for site in sites}) == 1
            if not depth and not on_one_line:
                break  # the rows show it
            what = "Their callers differ" if depth else "They are different calls on one line"
            where = [f"column {(site.column or 0) + 1}" if on_one_line else place(site.location) for site in sites]
            return [f"{what}: {_on_each(trouble, where)}."]
    return []


def _on_each(trouble: Collective, texts: Iterable[str]) -> str:
    """Return each partition's text with the replicas to which it applies."""
    pairs = zip(texts, trouble.partitions, strict=True)
    by_text = grouped((text, i) for text, partition in pairs for i in partition.replicas)
    parts = [f"{text} on {ids_briefly(ids)}" for text, ids in list(by_text.items())[:_MOST_PARTITIONS]]
    return ", ".join(parts if len(parts) == len(by_text) else [*parts, "…"])


def _function(function: Function | None) -> str:
    if function is None:
        return "none"
    return f"{function.name} at {shown_file(function.file)}:{function.line}" if function.file else function.name


def _structures_differ(trouble: Collective) -> str:
    """Return which leaves, or arguments of a merge function, only one side has, or how the containers differ."""
    first, *others = trouble.partitions
    other = next(each for each in others if compare(each.post.call, first.post.call) is Reason.STRUCTURE)
    a, on_a, b, on_b = first.post.call, ids_briefly(first.replicas), other.post.call, ids_briefly(other.replicas)
    (number, names), (other_number, other_names) = a.arguments or (0, a.paths), b.arguments or (0, b.paths)
    what, value = ("structures", "value") if a.arguments is None else ("arguments", "")
    if number != other_number:
        return f"The arguments differ: {count(number, 'positional argument')} on {on_a}, {other_number} on {on_b}."
    if a.arguments is None and None in (a.structure, b.structure):
        single, nest = (on_a, on_b) if a.structure is None else (on_b, on_a)
        return f"The structures differ: a single value on {single}, a nest on {nest}."
    common = set(names).intersection(other_names)
    extra = [f"{value}{each} is on {on_a} only" for each in names if each not in common]
    extra += [f"{value}{each} is on {on_b} only" for each in other_names if each not in common]
    if not extra:
        path, here, there = _differing_parts(a.structure or "", b.structure or "")
        return f"The {what} differ{f' at value{path}' if path and value else ''}: {here} on {on_a}, {there} on {on_b}."
    more = f", and {len(extra) - _MOST_PATHS} more" if len(extra) > _MOST_PATHS else ""
    return f"The {what} differ: {', '.join(extra[:_MOST_PATHS])}{more}."


_LEAF_NAME = "__leaf__"
_CLASS = re.compile(r"<class '([\w.]+)'>")


def _differing_parts(a: str, b: str) -> tuple[str, str, str]:
    """Return the path of the smallest part in which two nests differ, and both parts, with ``*`` for leaves."""
    path, *texts = "", *(_CLASS.sub(r"\1", text.replace(LEAF, _LEAF_NAME)) for text in (a, b))
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):  # a key's repr may be no expression
        path, *nodes = _differing_nodes("", *(ast.parse(text, mode="eval").body for text in texts))
        texts = list(map(ast.unparse, nodes))
    here, there = (shortened(text.replace(_LEAF_NAME, "*"), _LONGEST_PART) for text in texts)
    return path, here, there


def _differing_nodes(path: str, a: ast.AST, b: ast.AST) -> tuple[str, ast.AST, ast.AST]:
    parts = list(zip(ast.iter_child_nodes(a), ast.iter_child_nodes(b), strict=False))
    differing = [i for i, (x, y) in enumerate(parts) if ast.dump(x) != ast.dump(y)]
    if len(differing) != 1 or type(a) is not type(b) or len(parts) != len(list(ast.iter_child_nodes(b))):
        return path, a, b
    (index,) = differing
    x, y = parts[index]
    match a:
        case ast.Dict(keys=keys) if index >= len(keys):
            part = f"[{ast.unparse(keys[index - len(keys)] or a)}]"
        case ast.List() | ast.Tuple():
            part = f"[{index}]"
        case ast.Call() if isinstance(x, ast.keyword) and isinstance(y, ast.keyword) and x.arg == y.arg:
            part, x, y = f".{x.arg}", x.value, y.value
        case _:
            return path, a, b
    return _differing_nodes(path + part, x, y)


# What came before, and how the replicas diverged.


def _last_agreement(trouble: Collective) -> list[str]:
    first = trouble.number
    if trouble.divergence is not None and trouble.divergence.kind is DivergenceKind.SWAPPED:
        first = min(first, trouble.divergence.calls[0].sequence_number)  # the first call with callers in another order
    common = min((replica.history for replica in trouble.reports.values()), key=len, default=())
    last = next((record for record in reversed(common) if record.sequence_number < first), None)
    if last is not None:
        return [f"All {noun()}s agreed up to #{last.sequence_number}: {last.call} at {place(last.location)}."]
    whole = "run" if trouble.label is None else "group"
    return [f"This is the first collective of the {whole}."] if trouble.number == 0 else []


def _divergence(trouble: Collective) -> list[str]:
    if trouble.sides is None:
        return []
    divergence = trouble.divergence
    lines = [*diff(*trouble.sides), *([divergence.text] if divergence is not None else [])]
    if divergence is None or divergence.kind not in (DivergenceKind.LEFT_LOOP, DivergenceKind.OTHER_BRANCH):
        lines += filter(None, [branch_line(*trouble.sides)])
    return lines


# Advice: what usually causes a disagreement, and what to do about it. Only what fits the findings.


def _advice(trouble: Collective) -> Sequence[str]:  # noqa: C901, PLR0911  (one return a finding, the most telling first)
    reason, divergence, sides = trouble.reason, trouble.divergence, trouble.sides or ()
    kind = divergence.kind if divergence is not None else None
    one_more_or_less = kind in (DivergenceKind.SKIPPED, DivergenceKind.ADDED)
    if trouble.races:
        return [*trouble.races[:2], _RACE]
    states = {trouble.reports[i].state for i in trouble.gone}
    if reason is Reason.EXITED and states and ReplicaState.EXITED not in states:
        return []  # the error or the cancellation is the cause
    if trouble.unmade_by or (trouble.number < 0 and reason is Reason.EXITED):
        return [_SAME_GROUP]
    if trouble.is_join and reason is Reason.EXITED:
        return ["If one replica joins, all must: await ctx.join() after the loop, on every path out of it."]
    if trouble.number < 0 and reason is Reason.CALL_SITE:
        return ["Every member must make the group at the same place, or give the group the same name."]
    if trouble.sides and kind is DivergenceKind.LEFT_LOOP:
        return _UNEVEN_BY_FAILURE if left_by_exception(*trouble.sides) else _UNEVEN
    if kind is DivergenceKind.SWAPPED:
        return ["Iterate over sorted keys, or reduce one dict: then the order is the same on every replica."]
    if any(side.handles for side in sides):
        return ["Let an exception end the run, or do what follows it on every replica: reduce whether one has failed."]
    of_one_line = (one_more_or_less or reason is Reason.NAME) and _on_one_line(trouble)
    if of_one_line and any(source.is_in_loop(at) for side in sides[:1] for at in side.path):
        return [_ITEMS]
    if kind is not None and reason in _BRANCHED:
        return _CONDITION
    if one_more_or_less:
        return [*_CONDITION, _NAME]
    if reason is Reason.EXITED and trouble.exited:
        return _EXITED
    text = _BY_REASON.get(reason, "") + _by_calls(trouble)
    return [text] if text else []


def _by_calls(trouble: Collective) -> str:  # noqa: PLR0911  (one return a reason)
    """Return the part of the advice that depends on the calls or the replicas."""
    calls, cancellations = _calls(trouble), " ".join(trouble.cancellations)
    match trouble.reason:
        case Reason.NAME | Reason.REDUCE_OP as reason if _on_one_line(trouble):
            what = "name" if reason is Reason.NAME else "op"
            return f" All replicas call at the same line, so the {what} is a variable: print it."
        case Reason.STRUCTURE if trouble.merges:
            return "Every replica must pass the merge function arguments of the same structure."
        case Reason.STRUCTURE:
            same_leaves = None in {c.structure for c in calls} or len({frozenset(c.paths) for c in calls}) == 1
            return _CONTAINERS if same_leaves else _LEAVES
        case Reason.SHAPE:
            pairs = zip(calls[0].shapes or (), calls[1].shapes or (), strict=False)
            only_axis_0 = all(len(a) == len(b) > 0 and a[1:] == b[1:] for a, b in pairs if a != b)
            return " Was it a last, smaller batch? Drop it, or pad it." if only_axis_0 else ""
        case Reason.DTYPE if any("float64" in call.dtypes for call in calls):
            return " NumPy makes float64 by default."
        case Reason.ABANDONED if "sibling task failed" in cancellations:
            return (
                "A task group cancels its other tasks when one fails: let that end the run, or reduce whether one has."
            )
        case Reason.ABANDONED if calls and ", inside `" in cancellations and "CancelScope()`" not in cancellations:
            return _TIME_LIMIT
        case Reason.TIMEOUT if trouble.merges and not trouble.missing:
            return "The merge function runs in a task of its own: look at what it awaits."
        case Reason.TIMEOUT if any("Lock" in each or "Semaphore" in each for each in _waits(trouble)):
            return "A lock that is held across a collective keeps the others from reaching it: release it first."
    return ""


def _on_one_line(trouble: Collective) -> bool:
    return len({replica.location for replica in trouble.reports.values() if replica.location is not None}) == 1


_SAME_GROUP = "Every member must make the group: of the same replicas, in the same order, under the same name."
_SAME_CONTEXT = "The context must be the same on every replica: the run's, or the group's."
_SAME_ORDER = (
    "Issue the collectives of groups in the same order on every replica, or issue those of each group in a task of "
    "their own."
)
_BRANCHED = (Reason.KIND, Reason.STRUCTURE, Reason.SHAPE, Reason.DTYPE, Reason.REDUCE_OP, Reason.AXIS, Reason.SOURCE)
_STOP = (
    "  done = await ctx.all_reduce(ReduceOp.MAX, done)",
    "A replica that has run out of data can join instead: await ctx.join().",
)
_UNEVEN = (
    "Give every replica equally many rounds: drop the remainder, or decide together when to stop, e.g.", *_STOP,
)  # fmt: skip
_EXITED = (
    "Every replica must make as many collectives as the others: decide together when to stop, e.g.", *_STOP,
)  # fmt: skip
_UNEVEN_BY_FAILURE = (
    "Give every replica equally many rounds, even if one fails: reduce whether one has failed, e.g.",
    "  failed = await ctx.all_reduce(ReduceOp.MAX, failed)",
)
_CONDITION = (
    "A condition on a replica's own data is the usual cause: reduce the condition first, e.g.",
    "  stop = await ctx.all_reduce(ReduceOp.MAX, stop)",
)
_NAME = "If the places are meant to meet, give both calls the same name=."
_RACE = (
    "The order of racing tasks may differ on other replicas: await them one after the other, or give each a group of "
    "its own: ctx.new_group(range(ctx.num_replicas_in_sync))."
)
_ITEMS = (
    "The calls are on one line, in a loop over items that differ by replica: iterate over the same items in the same "
    "order on every replica, with zeros where one has no value, or reduce one dict."
)
_TIME_LIMIT = (
    "A time limit around one replica's collective leaves the others waiting. Put the limit around the whole run, or "
    "set CommunicationOptions(timeout_seconds=...)."
)
_CONTAINERS = "Every replica must pass its values in the same containers."
_LEAVES = "Where a replica has no value, reduce zeros instead, or leave the leaf out everywhere."
_BY_REASON = {
    Reason.KIND: (
        "Every replica must issue the same collectives in the same order. Is one of these calls made under a "
        "condition that depends on the replica?"
    ),
    Reason.NAME: "The names differ: calls that are meant to meet need the same name.",
    Reason.REDUCE_OP: "The reduce op must be the same on every replica.",
    Reason.AXIS: "The axis must be the same value everywhere. Was the replica's id passed?",
    Reason.SOURCE: (
        "The source must be the same value everywhere, the id of the one that has the value. Was the replica's id "
        "passed?"
    ),
    Reason.MERGE_FN: "The function must be the same everywhere. Pass what differs as an argument.",
    Reason.SHAPE: "Shapes must match; values are not broadcast.",
    Reason.DTYPE: "Values are never cast across replicas.",
    Reason.DEVICE: "Every replica must pass the same type of array or number.",
    Reason.CALL_SITE: (
        "Equal calls from different places are usually two collectives in swapped order: reduce one dict, or iterate "
        f"over sorted keys. {_NAME}"
    ),
}
