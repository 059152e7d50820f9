"""What aiodist and, where it is installed, torch say of the programs with a planted fault in tests/faults.

Run from a checkout: ``python -m tests.benchmarks.faults [PAGE]``. It prints the tables of docs/benchmarks/faults.md, or
writes them to PAGE. With torch it takes some minutes: what hangs there is given its time.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from aiodist import CollectiveError
from aiodist._checking.explore import explore, run
from tests.benchmarks import torch_ranks
from tests.benchmarks.timing import table, versions
from tests.benchmarks.torch_ranks import Outcomes
from tests.faults.case import REPLICAS, Case
from tests.faults.test_faults import FAULTS, MOST_SCHEDULES, TWINS, orders, program_of

SCHEDULES = 22
PEER = "gloo with DETAIL"


def ours(case: Case) -> str:
    """Return what aiodist says of a program under every schedule that it is tested with, on the loop of the checker."""
    replicas = case.sizes[-1]
    program = program_of(case, replicas)
    if case.scheduled:
        found = explore(program, schedules=MOST_SCHEDULES, seed=0, seconds=20)
        return (
            f"{_verdict(case, found.error, replicas)}, at schedule {found.schedules}" if found.error else "**missed**"
        )
    said = Counter(
        _verdict(case, run(program, order, seed=seed, seconds=20).error, replicas)
        for seed, order in enumerate(orders(SCHEDULES))
    )
    return "; ".join(what if len(said) == 1 else f"{what} ({count}×)" for what, count in said.items())


def _verdict(case: Case, error: BaseException | None, replicas: int) -> str:
    if error is None:
        return "passes"
    if not isinstance(error, CollectiveError):
        return f"the program's {type(error).__name__}"
    report = error.report
    text = str(report)
    named = all(place in text for place in case.named_lines())
    right = report.reason is case.reason and case.suspects_of(replicas) in (report.suspects, None) and case.says in text
    who = _who(report.suspects, replicas)
    return f"{report.reason}, {who}{', line' if named else ''}{'' if right else ' (**wrong**)'}"


def theirs(case: Case, ended: Outcomes) -> str:
    """Return what a peer made of a program: who raised, who hangs, which ranks and lines the messages name."""
    messages = [message for message in ended.values() if message is not None]
    hang = [rank for rank in range(REPLICAS) if rank not in ended]
    if not messages:
        return f"hangs on {_who(hang)}" if hang else "passes" if case.error is None else "silent"
    raised = _who([rank for rank, message in ended.items() if message is not None])
    own = case.error is not None and any(message.startswith(case.error.__name__) for message in messages)
    late = all("imed out" in message or "imeout" in message for message in messages)
    said = [f"{'own exception' if own else 'timeout' if late else 'error'} on {raised}"]
    if hang:
        said.append(f"hangs on {_who(hang)}")
    if case.error is not None and not own:
        blamed = {int(rank) for message in messages for rank in re.findall(r"\b[Rr]anks? (\d+)", message)}
        said.append(f"names {_who(sorted(blamed)) if blamed else 'no rank'}")
        lines = any(place in message for place in case.named_lines() for message in messages)
        said.append("line" if lines else "no line")
    return ", ".join(said)


def _who(replicas: Sequence[int], of: int = REPLICAS) -> str:
    return "all" if len(replicas) == of else ", ".join(map(str, sorted(replicas)))


def rows_of(cases: list[Case], *, with_torch: bool) -> list[str]:
    """Return the lines of a table, one a program, and what the peer's cells come to."""
    rows, counts = [], Counter[str]()
    for case in cases:
        print(case.name, file=sys.stderr)  # by no thread of its own: one that lives could wake a loop that stands still
        row = [case.family, case.name.replace("_", " "), ours(case)]
        if with_torch:
            row.append(theirs(case, torch_ranks.outcomes(case)) if case.peers else "")
            counts[row[-1].partition(" on ")[0] if row[-1] else "not expressible"] += 1
        rows.append(row)
    said = [f"{PEER}: {', '.join(f'{what} {number}' for what, number in counts.most_common())}."] if with_torch else []
    return [*table(("family", "program", "aiodist", PEER)[: len(rows[0])], rows), "", *said]


def page() -> str:
    """Return the tables, and what they were made with."""
    has_torch = importlib.util.find_spec("torch") is not None
    lines = [versions() + (f" torch {importlib.import_module('torch').__version__}." if has_torch else ""), ""]
    for cases, what in (FAULTS, "faults"), (TWINS, "correct twins"):
        lines += [f"## {len(cases)} {what}", "", *rows_of(cases, with_torch=has_torch), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        print(page())
