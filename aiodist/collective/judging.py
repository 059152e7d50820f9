"""Judging: the way to a verdict. What looks at the replicas and puts it into words is loaded when there is trouble."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiodist._core.errors import CollectiveError

if TYPE_CHECKING:
    from aiodist.collective.group import SyncGroup
    from aiodist.collective.rendezvous import Rendezvous

_MOST_TOLD_APART = 16


def judge(group: SyncGroup, overdue: Rendezvous | None = None) -> CollectiveError:
    """Return the verdict on a group's trouble; see `verdict.judge`."""
    from aiodist.collective import verdict  # a tenth of what `import aiodist` would take

    return verdict.judge(group, overdue)


def echo(group: SyncGroup, meeting: Rendezvous) -> CollectiveError:
    """Return what is raised in a replica that begins a collective after another's failure has ended its group.

    The failure is what comes out of the run, so in a large group all who come to the same collective are told what the
    first of them is: to look at all replicas for each of thousands would take minutes.
    """
    last = group.unmet[-1] if group.unmet and group.size > _MOST_TOLD_APART else None
    if last is not None and last.number == meeting.number and isinstance(last.error, CollectiveError):
        return last.error
    return judge(group)
