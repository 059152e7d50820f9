"""File names that mean the same on every machine: checkouts may lie in different places.

A file is named from the entry of ``sys.path``, or the working directory, that it lies under. So digests of calls agree
between machines, and a report shows files as this machine has them.
"""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import replace

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
        call = replace(call, function=call.function._replace(file=portable(call.function.file)))
    path = tuple(place._replace(file=portable(place.file)) for place in post.path)
    return digest(order_check, [Post(call, path)])
