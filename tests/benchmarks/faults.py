"""What aiodist and, where it is installed, torch say of the programs with a planted fault in tests/faults.

Run from a checkout: ``python -m tests.benchmarks.faults [PAGE]``. It prints the tables of docs/benchmarks/faults.md, or
writes them to PAGE. With torch it takes some minutes: what hangs there is given its time.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import aiodist
from aiodist import CollectiveError
from aiodist._checking.explore import explore, run
from tests.benchmarks import torch_ranks
from tests.benchmarks.torch_ranks import Engine, Outcomes
from tests.faults.case import REPLICAS, Case
from tests.faults.test_faults import FAULTS, MOST_SCHEDULES, TWINS, orders, program_of

SCHEDULES = 22
PEERS: tuple[Engine, ...] = ("gloo with DETAIL", "threaded group")


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


def table(cases: list[Case], peers: tuple[Engine, ...]) -> list[str]:
    """Return the rows of a table, one a program."""
    lines = [f"| family | program | aiodist | {' | '.join(peers)} |", "|---" * (3 + len(peers)) + "|"]
    counts: dict[Engine, Counter[str]] = {peer: Counter() for peer in peers}
    for case in cases:
        print(case.name, file=sys.stderr)  # by no thread of its own: one that lives could wake a loop that stands still
        cells = []
        for peer in peers:
            cell = theirs(case, torch_ranks.outcomes(case, peer)) if case.peers else ""
            counts[peer][cell.partition(" on ")[0] if cell else "not expressible"] += 1
            cells.append(cell)
        lines.append(f"| {case.family} | {case.name.replace('_', ' ')} | {ours(case)} | {' | '.join(cells)} |")
    for peer, count in counts.items():
        lines += ["", f"{peer}: " + ", ".join(f"{what} {number}" for what, number in count.most_common()) + "."]
    return lines


def page() -> str:
    """Return the tables, and what they were made with."""
    has_torch = importlib.util.find_spec("torch") is not None
    peers = PEERS if has_torch else ()
    versions = f"Python {platform.python_version()}, aiodist {aiodist.__version__}"
    if has_torch:
        versions += f", torch {importlib.import_module('torch').__version__}"
    lines = [f"{versions}.", ""]
    for cases, what in (FAULTS, "faults"), (TWINS, "correct twins"):
        lines += [f"## {len(cases)} {what}", "", *table(cases, peers), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        print(page())
