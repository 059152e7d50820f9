"""What a job's ranks have in common beside collectives: a store of keys, found by a URL, and the making of groups."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from aiodist._torch import private
from aiodist._torch.group import RankGroup
from aiodist._torch.job import Job
from aiodist._torch.private import c10d


class RankStore(c10d.Store):  # type: ignore[misc]
    """A store of the ranks that know it by one name; a rank that waits for a key lets others run."""

    def __init__(self, job: Job, name: str) -> None:
        super().__init__()
        self._job = job
        job.kept.append(self)
        self._values = job.stores.setdefault(name, {})

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._values[key] = _bytes(value)
        self._job.ranks.notify(self._job.store_signal)

    def get(self, key: str) -> bytes:
        """Return what a key is set to, once it is."""
        self.wait([key])
        return self._values[key]

    def add(self, key: str, number: int) -> int:
        """Add to a counter, and return what it is then."""
        total = int(self._values.get(key, b"0")) + number
        self.set(key, str(total))
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it is set to what is expected, or to nothing where that is; return what it is set to then."""
        if self._values.get(key, b"") == _bytes(expected):
            self.set(key, desired)
        return self._values.get(key, _bytes(expected))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether keys are set; if not, other ranks get a turn, for a program may ask until they are."""
        there = all(key in self._values for key in keys)
        if not there:
            self._job.ranks.sleep(0.0)
        return there

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """Let other ranks run until keys are set."""
        missing = next((key for key in keys if key not in self._values), None)
        if missing is not None:
            what = f"waits for key {missing!r} of the store"
            self._job.wait_elsewhere(self._job.store_signal, lambda: all(key in self._values for key in keys), what)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it was set."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return how many keys are set."""
        return len(self._values)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def install(job: Job) -> None:
    """Let `torch.distributed` make groups and stores of a job."""

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[Any, int, int]]:
        query = parse_qs(urlparse(url).query)
        if rank < 0:
            rank = int(query.get("rank", [os.environ.get("RANK", "-1")])[0])
        if world_size < 0:
            world_size = int(query.get("world_size", [os.environ.get("WORLD_SIZE", "-1")])[0])
        _check(job, rank, world_size)
        yield RankStore(job, "default"), rank, world_size

    def tcp_store(host: str = "", port: int = 0, *_: Any, **__: Any) -> RankStore:
        return RankStore(job, f"{host}:{port}")

    def new_group(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return _new_group(job, *args, **kwargs)

    private.install(new_group, rendezvous)
    private.torch.distributed.TCPStore = tcp_store


def _check(job: Job, rank: int, size: int) -> None:
    if size != job.size:
        raise RuntimeError(f"the script asks for {size} ranks: run aiodist check with --ranks {size}")
    if rank != job.rank():
        raise RuntimeError(
            f"the script calls this rank {rank}, but it is rank {job.rank()}: RANK and LOCAL_RANK in the environment "
            "say which"
        )


def _new_group(
    job: Job,
    group_size: int,
    group_rank: int | None,
    ranks: Sequence[int],
    backend: Any,
    store: Any,
    group_name: str,
    *_: Any,  # options and time limits of backends
    pg_tag: str | None = None,
    group_desc: str | None = None,
    **__: Any,
) -> tuple[Any, Any]:
    """Make a process group, as `_new_process_group_helper` does; that has the meaning of each argument."""
    found = private.existing_group(pg_tag, list(ranks))
    if found is not None:
        return found  # type: ignore[no-any-return]
    rank = job.rank()
    if not ranks:
        _check(job, rank if group_rank is None else group_rank, group_size)
    member = job.new_group(rank, tuple(ranks), group_name) if ranks else job.ledger.root.member_of(rank)
    if member is None:
        return c10d.GroupMember.NON_GROUP_MEMBER, None
    own_store = c10d.PrefixStore(f"{group_name}/", store)
    group = RankGroup(job, member, group_size, group_name, group_desc or "undefined", str(backend), own_store)
    tag = {"add_to_default_tag": True} if not pg_tag else {"pg_tag": f"user:{pg_tag}"}
    private.register(
        group, backend_name=backend, store=own_store, group_name=group_name,
        backend_config=str(c10d.BackendConfig(c10d.Backend(backend))), **tag,
    )  # fmt: skip
    if not ranks:  # torch's own waits for all ranks here, too
        group.begin()
    return group, own_store
