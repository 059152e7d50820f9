"""Judging: the way to a verdict. What looks at the replicas and puts it into words is loaded when there is trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.rendezvous import Rendezvous
    from aiodist.vocabulary.errors import CollectiveError


def judge(group: SyncGroup, overdue: Rendezvous | None = None) -> CollectiveError:
    """Return the verdict on a group's trouble; see `verdict.judge`."""
    from aiodist.collective import verdict  # a tenth of what `import aiodist` would take

    return verdict.judge(group, overdue)
