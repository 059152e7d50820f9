"""What a check came to, as JSON."""

from __future__ import annotations

from typing import Any

from aiodist._core.errors import CollectiveError
from aiodist._core.report import Location
from aiodist.checking.check import Checked
from aiodist.checking.ledger import Site
from aiodist.checking.words import failure_text, replay_command


def as_json(checked: Checked) -> dict[str, Any]:
    """Return a check as a dict of strings, numbers, lists and dicts, as JSON has them."""
    request, failure = checked.request, checked.exploration.failure
    found: dict[str, Any] = {
        "target": request.text,
        "outcome": str(checked.outcome),
        "replicas": checked.ledger.replicas,
        "runs": checked.ledger.runs,
        "seed": request.replay.seed if request.replay is not None else request.seed,
        "schedules": checked.exploration.schedules,
        "collectives": [_site(site) for site in checked.ledger.sites],
    }
    if failure is not None:
        found["failure"] = {
            "error": type(failure.error).__name__,
            "text": failure_text(checked),
            "report": failure.error.report.to_dict() if isinstance(failure.error, CollectiveError) else None,
            "schedule": str(failure.schedule),
            "changes": list(checked.exploration.story),
            "replay": replay_command(checked),
        }
    return found


def _site(site: Site) -> dict[str, Any]:
    return {
        "kind": site.kind,
        "call": site.call,
        "location": _place(site.location),
        "times": site.times,
        "bytes": site.bytes,
        "waited_seconds": round(site.waited, 9),
        "longest_wait_seconds": round(site.longest, 9),
        "last_to_come": {str(replica_id): times for replica_id, times in sorted(site.last.items())},
    }


def _place(location: Location) -> dict[str, Any]:
    return {"file": location.file, "line": location.line, "function": location.function}
