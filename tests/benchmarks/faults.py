"""What aiodist and, if installed, torch report on the programs of tests/faults: docs/benchmarks/faults.md.

    python -m tests.benchmarks.faults [PAGE]

It prints the tables, or writes them to PAGE. With torch it takes some minutes, most of them spent on hangs there.
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
    """Return what aiodist reports on a program under each of the schedules, on the checker's event loop."""
    program = program_of(case, case.sizes[-1])
    if case.scheduled:
        found = explore(program, schedules=MOST_SCHEDULES, seed=0, seconds=20)
        return f"{_verdict(case, found.error)}, at schedule {found.schedules}" if found.error else "**missed**"
    runs = (run(program, order, seed=seed, seconds=20) for seed, order in enumerate(orders(SCHEDULES)))
    verdicts = Counter(_verdict(case, one.error) for one in runs)
    return "; ".join(what if len(verdicts) == 1 else f"{what} ({count}×)" for what, count in verdicts.items())


def _verdict(case: Case, error: BaseException | None) -> str:
    if error is None:
        return "passes"
    if not isinstance(error, CollectiveError):
        return f"the program's {type(error).__name__}"
    report, text, replicas = error.report, str(error.report), case.sizes[-1]
    right = report.reason is case.reason and case.suspects_of(replicas) in (report.suspects, None) and case.says in text
    verdict = f"{report.reason}, {_ids(report.suspects, replicas)}"
    if all(place in text for place in case.named_lines()):
        verdict += ", line"
    return verdict if right else f"{verdict} (**wrong**)"


def theirs(case: Case, ended: Outcomes) -> str:
    """Return how a program ended on a peer: which ranks raise, which hang, what the messages name."""
    messages = [message for message in ended.values() if message is not None]
    hang = [rank for rank in range(REPLICAS) if rank not in ended]
    if not messages:
        return f"hangs on {_ids(hang)}" if hang else "passes" if case.error is None else "silent"
    raised = _ids([rank for rank, message in ended.items() if message is not None])
    own = case.error is not None and any(message.startswith(case.error.__name__) for message in messages)
    late = all("imed out" in message or "imeout" in message for message in messages)
    said = [f"{'own exception' if own else 'timeout' if late else 'error'} on {raised}"]
    if hang:
        said.append(f"hangs on {_ids(hang)}")
    if case.error is not None and not own:
        blamed = {int(rank) for message in messages for rank in re.findall(r"\b[Rr]anks? (\d+)", message)}
        said.append(f"names {_ids(sorted(blamed)) if blamed else 'no rank'}")
        lines = any(place in message for place in case.named_lines() for message in messages)
        said.append("line" if lines else "no line")
    return ", ".join(said)


def _ids(replicas: Sequence[int], of: int = REPLICAS) -> str:
    return "all" if len(replicas) == of else ", ".join(map(str, sorted(replicas)))


def rows_of(cases: list[Case], *, with_torch: bool) -> list[str]:
    """Return the lines of a table with a row for each program, and the counts of the peer's outcomes."""
    rows, counts = [], Counter[str]()
    for case in cases:
        print(case.name, file=sys.stderr)  # no progress bar: its thread could wake the loop, and hide a deadlock
        row = [case.family, case.name.replace("_", " "), ours(case)]
        if with_torch:
            row.append(theirs(case, torch_ranks.outcomes(case)) if case.peers else "")
            counts[row[-1].partition(" on ")[0] if row[-1] else "not expressible"] += 1
        rows.append(row)
    said = [f"{PEER}: {', '.join(f'{what} {number}' for what, number in counts.most_common())}."] if with_torch else []
    return [*table(("family", "program", "aiodist", PEER)[: len(rows[0])], rows), "", *said]


def page() -> str:
    """Return the tables and the versions they were made with."""
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
