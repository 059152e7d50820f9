"""Jobs of torch.distributed: what each rank has called, as dumps of the flight recorder."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

Dumped = dict[str, Any]
Groups = Mapping[str, tuple[str, Sequence[int]]]

_TORCH = "/venv/lib/python3.13/site-packages/torch/distributed/"
_FRAMES = [
    {"name": "all_reduce", "filename": f"{_TORCH}distributed_c10d.py", "line": 2806},
    {"name": "wrapper", "filename": f"{_TORCH}c10d_logger.py", "line": 83},
    {"name": "wrapper", "filename": "/venv/lib/python3.13/site-packages/typing_extensions.py", "line": 3140},
    {"name": "__exit__", "filename": "/usr/lib/python3.13/contextlib.py", "line": 148},
]


_CALL = re.compile(r" *(\S+): (\w+(?: \d+(?:->|<-)\d+)?)((?: \[[\d, ]*\])*)(?: of (\w+))?(?: at (\d+))?")


class Job:
    """The calls of a job's ranks; a collective is complete once all members of its group have issued it.

    Args:
        world_size: the number of ranks.
        groups: process groups besides that of all ranks: by name, the description and the ranks.
        capacity: how many calls a rank's buffer holds.
        backend: gloo does not record groups, nor the state of calls.
    """

    def __init__(self, world_size: int, groups: Groups | None = None, *, capacity: int = 2000, backend: str = "nccl"):
        self.groups = {"0": ("default_pg", list(range(world_size))), **(groups or {})}
        self.entries: list[list[Dumped]] = [[] for _ in range(world_size)]
        self._numbers: dict[tuple[int, str], int] = {}
        self._capacity = capacity
        self._backend = backend
        self._as_one = False

    def call(
        self, rank: int, kind: str, *sizes: Sequence[int], group: str = "0", line: int = 1, **fields: Any
    ) -> Dumped:
        """Add a rank's call; inputs and outputs have the same sizes unless ``fields`` say otherwise."""
        is_p2p = kind.startswith(("send", "recv")) or (fields.get("is_p2p") is True)
        number = self._numbers.get((rank, group), 0)
        if not is_p2p and not self._as_one:
            number = self._numbers[rank, group] = number + 1
        entry = {
            "frames": [*_FRAMES, {"name": "step", "filename": "/job/train.py", "line": line}],
            "record_id": len(self.entries[rank]),
            "process_group": (group, self.groups[group][0]),
            "collective_seq_id": number,
            "p2p_seq_id": 1 if is_p2p else 0,
            "profiling_name": f"{self._backend}:{kind}",
            "input_sizes": [list(each) for each in sizes],
            "input_dtypes": ["Float"] * len(sizes),
            "output_sizes": [list(each) for each in sizes],
            "output_dtypes": ["Float"] * len(sizes),
            "state": "scheduled" if self._as_one else None,
            "retired": False,
            "is_p2p": is_p2p,
            **fields,
        }
        self.entries[rank].append(entry)
        return entry

    def calls(self, script: str) -> Self:
        """Add the calls of a script, such as ``*: all_reduce [3] of 7 at 5``, and return the job.

        Before the colon are the ranks: all members of the group, ``!2`` all but rank 2, or ``0,2``; then follow the
        kind, the sizes of its tensors, the process group, and the line.
        """
        for line in script.strip().splitlines():
            found = _CALL.fullmatch(line)
            assert found, line
            who, kind, group = found[1], found[2], found[4] or "0"
            sizes = [json.loads(each) for each in re.findall(r"\[.*?\]", found[3])]
            for rank in self.groups[group][1]:
                if who == "*" or (str(rank) in re.findall(r"\d+", who)) is not who.startswith("!"):
                    self.call(rank, kind, *sizes, group=group, line=int(found[5] or 1))
        return self

    @contextmanager
    def as_one(self, rank: int, *, state: str | None = None, is_p2p: bool = False) -> Iterator[None]:
        """Coalesce the calls in the block, as torch's manager does; only the end of the block has a state."""
        self._numbers[rank, "0"] = self._numbers.get((rank, "0"), 0) + (not is_p2p)
        self._as_one = True
        yield
        self.call(rank, "coalesced", [], input_dtypes=[], output_dtypes=[], state=state, is_p2p=is_p2p)
        self._as_one = False

    def dump(self, rank: int) -> Dumped:
        """Return the dump of a rank."""
        config = {
            name: {"name": name, "desc": description, "ranks": str(ranks)}
            for name, (description, ranks) in self.groups.items()
            if rank in ranks and self._backend == "nccl"
        }
        entries = [{**each, "state": each["state"] or self._state(each)} for each in self.entries[rank]]
        if self._backend == "gloo":
            entries = [{**each, "state": "scheduled", "retired": each["state"] == "completed"} for each in entries]
        return {"version": "2.10", "pg_config": config, "entries": entries[-self._capacity :]}

    def _state(self, entry: Dumped) -> str:
        if entry["is_p2p"]:
            return "scheduled"
        name = entry["process_group"][0]
        number, kind = entry["collective_seq_id"], entry["profiling_name"]
        alike = (
            any(e["process_group"][0] == name and e["collective_seq_id"] == number and e["profiling_name"] == kind
                for e in self.entries[rank])
            for rank in self.groups[name][1]
        )  # fmt: skip
        return "completed" if all(alike) else "started"

    def write(self, folder: Path, *, without: Sequence[int] = (), as_json: bool = False) -> list[Path]:
        """Write a file per rank; return the files."""
        files = []
        for rank in range(len(self.entries)):
            if rank not in without:
                files.append(folder / (f"{rank}.json" if as_json else f"nccl_trace_rank_{rank}"))
                files[-1].write_bytes(as_bytes(self.dump(rank), as_json=as_json))
        return files


def as_bytes(dump: Any, *, as_json: bool = False) -> bytes:
    """Return a dump as torch writes it."""
    if not as_json:
        return pickle.dumps(dump, 2)
    entries = [{name: value for name, value in each.items() if name != "frames"} for each in dump["entries"]]
    return json.dumps({**dump, "entries": entries}).encode()
