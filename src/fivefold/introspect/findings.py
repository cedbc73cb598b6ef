"""What rules find."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from fivefold.introspect.numbers import plain
from fivefold.introspect.shape import Evidence, FindingData

__all__ = ["Finding", "as_data", "evidence", "ordered"]


@dataclass(frozen=True)
class Finding:
    """Something that could be better, with the numbers that show it. See `shape.FindingData`."""

    id: str
    title: str
    advice: str
    share: float | None = None
    """of a steady step"""
    ranks: tuple[int, ...] = ()
    gain_s: float | None = None
    """per step, upper bound"""
    evidence: tuple[Evidence, ...] = ()
    figures: dict[str, Any] = field(default_factory=dict[str, Any])
    clause: str = ""
    """for the verdict; the title if empty"""
    broken: bool = False
    """the run fails or stands still: told first"""

    @property
    def says(self) -> str:
        """For a sentence."""
        return self.clause or self.title


def evidence(
    section: str,
    text: str,
    *,
    ranks: Iterable[int] = (),
    rows: Iterable[int] = (),
    phase: str | None = None,
    tag: str | None = None,
) -> Evidence:
    """Where to look."""
    return {
        "section": section, "text": text, "rows": [int(row) for row in rows],
        "ranks": [int(rank) for rank in ranks], "phase": phase, "tag": tag,
    }  # fmt: skip


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    """What is broken first, then by gain; those without a gain last."""
    return sorted(findings, key=lambda f: (not f.broken, -(f.gain_s or 0.0), f.gain_s is None))


def as_data(finding: Finding) -> FindingData:
    """For the document."""
    return cast("FindingData", plain({
        "id": finding.id, "title": finding.title, "share": finding.share, "ranks": finding.ranks,
        "gain_s_per_step": finding.gain_s, "advice": finding.advice, "evidence": finding.evidence,
        "figures": finding.figures,
    }))  # fmt: skip
