"""Findings: what a look at the machine gives, section by section, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what it is.
        value: what was found.
        remedy: what to do about it; None where there is nothing to do.
        needed: aiodist does not work as it should until the remedy is applied.
    """

    name: str
    value: str | int | float
    remedy: str | None = None
    needed: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """Findings on one subject.

    Attributes:
        title: the subject.
        findings: in the order in which they are read.
    """

    title: str
    findings: Sequence[Finding]


def missing(sections: Sequence[Section]) -> list[Finding]:
    """Return the findings without whose remedies aiodist does not work as it should."""
    return [finding for section in sections for finding in section.findings if finding.needed and finding.remedy]


def as_text(sections: Sequence[Section]) -> str:
    """Return findings for a person."""
    blocks = []
    for section in sections:
        width = max(len(finding.name) for finding in section.findings)
        lines = [f"  {finding.name:{width}}  {_told(finding)}" for finding in section.findings]
        blocks.append("\n".join([section.title, *lines]))
    wanting = missing(sections)
    verdict = "All that is needed is there." if not wanting else "Missing: " + ", ".join(f.name for f in wanting) + "."
    return "\n\n".join([*blocks, verdict])


def _told(finding: Finding) -> str:
    return f"{finding.value}: {finding.remedy}" if finding.remedy else str(finding.value)


def as_json(sections: Sequence[Section]) -> dict[str, object]:
    """Return findings for a program: ``{"ok": …, "sections": {title: {name: {"value": …, "remedy": …}}}}``."""
    return {
        "ok": not missing(sections),
        "sections": {
            section.title: {
                finding.name: {"value": finding.value, "remedy": finding.remedy, "needed": finding.needed}
                for finding in section.findings
            }
            for section in sections
        },
    }
