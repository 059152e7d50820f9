"""File names that mean the same on every machine: checkouts may lie in different places.

A file is named from the entry of ``sys.path``, or the working directory, that it lies under. So digests of calls agree
between machines, and a report shows files as this machine has them.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from aiodist._core.call import OrderCheck, Post, digest


@functools.lru_cache(maxsize=4096)
def portable(file: str) -> str:
    """Return a file's name from the entry of ``sys.path``, or the working directory, that it lies under."""
    best = ""
    for entry in (*sys.path, os.getcwd()):  # noqa: PTH109  (a string is all that is needed)
        prefix = os.path.join(os.path.abspath(entry), "")  # noqa: PTH100, PTH118  (and quick)
        if file.startswith(prefix) and len(prefix) > len(best):
            best = prefix
    return file[len(best) :]


@functools.lru_cache(maxsize=4096)
def resolved(file: str) -> str:
    """Return the file of this machine that a portable name means; the name itself where there is none."""
    for entry in (*sys.path, os.getcwd()):  # noqa: PTH109
        path = os.path.join(os.path.abspath(entry), file)  # noqa: PTH100, PTH118
        if os.path.isfile(path) and os.path.normpath(path) == path:  # noqa: PTH113  (none with "..")
            return path
    return file


@functools.lru_cache(maxsize=4096)  # workers in one process, of which there may be thousands, share it
def digest_of(order_check: OrderCheck, post: Post) -> bytes:
    """Return 16 bytes that differ where the fingerprints of two calls do, on whichever machine they are made."""
    call = post.call
    if call.function is not None:
        call = replace(call, function=replace(call.function, file=portable(call.function.file)))
    path = tuple(place._replace(file=portable(place.file)) for place in post.path)
    return digest(order_check, [Post(call, path)])


def with_files(snapshot: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return a snapshot, as JSON has it, with other names of its files."""

    def place(row: Sequence[Any]) -> list[Any]:
        return [rename(row[0]), *row[1:]]

    def call(row: Mapping[str, Any]) -> Mapping[str, Any]:
        function = row.get("function")
        return {**row, "function": {**function, "file": rename(function["file"])}} if function else row

    def facts(row: Mapping[str, Any]) -> dict[str, Any]:
        found = dict(row)
        for name in ("stack", "cancelled_in"):
            if name in row:
                found[name] = list(map(place, row[name]))
        if "child_calls" in row:
            found["child_calls"] = [[place(at), text] for at, text in row["child_calls"]]
        if row.get("ended_at"):
            found["ended_at"] = place(row["ended_at"])
        return found

    return {
        **snapshot,
        "places": list(map(place, snapshot["places"])),
        "calls": list(map(call, snapshot["calls"])),
        "replicas": list(map(facts, snapshot["replicas"])),
        "groups": [{**group, "made_at": group["made_at"] and place(group["made_at"])} for group in snapshot["groups"]],
    }
