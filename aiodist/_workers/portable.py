"""File names that mean the same on every machine: checkouts may lie in different places.

A file is named from the entry of ``sys.path``, or the working directory, that it lies under. So digests of calls agree
between machines, and a report shows files as this machine has them.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from aiodist._core.call import OrderCheck, Place, Post, digest
from aiodist._core.snapshot import GroupRecord, ReplicaFacts, SlotRecord, Snapshot

Rename: TypeAlias = Callable[[str], str]


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


def digest_of(order_check: OrderCheck, post: Post) -> bytes:
    """Return 16 bytes that differ where the fingerprints of two calls do, on whichever machine they are made."""
    return digest(order_check, [_post(post, portable)])


def to_portable(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot whose files mean the same on every machine."""
    return _renamed(snapshot, portable)


def to_local(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with the files of this machine."""
    return _renamed(snapshot, resolved)


def _renamed(snapshot: Snapshot, rename: Rename) -> Snapshot:
    posts: dict[Post, Post] = {}
    return replace(
        snapshot,
        replicas=tuple(_facts(each, rename) for each in snapshot.replicas),
        groups=tuple(_group(each, rename, posts) for each in snapshot.groups),
    )


def _facts(facts: ReplicaFacts, rename: Rename) -> ReplicaFacts:
    return replace(
        facts,
        stack=tuple(at._replace(file=rename(at.file)) for at in facts.stack),
        ended_at=None if facts.ended_at is None else facts.ended_at._replace(file=rename(facts.ended_at.file)),
        cancelled_in=tuple((rename(file), line) for file, line in facts.cancelled_in),
    )


def _group(group: GroupRecord, rename: Rename, posts: dict[Post, Post]) -> GroupRecord:
    return replace(
        group,
        made_at=None if group.made_at is None else _place(group.made_at, rename),
        history=tuple(_slot(each, rename, posts) for each in group.history),
        open=tuple(_slot(each, rename, posts) for each in group.open),
        join=None if group.join is None else _slot(group.join, rename, posts),
    )


def _slot(slot: SlotRecord, rename: Rename, posts: dict[Post, Post]) -> SlotRecord:
    found = []
    for post, ids in slot.posts:
        if post not in posts:
            posts[post] = _post(post, rename)
        found.append((posts[post], ids))
    return slot._replace(posts=tuple(found))


def _post(post: Post, rename: Rename) -> Post:
    call = post.call
    if call.function is not None and call.function.file:
        call = replace(call, function=replace(call.function, file=rename(call.function.file)))
    return Post(call, tuple(_place(place, rename) for place in post.path))


def _place(place: Place, rename: Rename) -> Place:
    return place._replace(file=rename(place.file))
