"""Tables and goals of helpers, out of the kept results."""

from __future__ import annotations

from typing import Any

import report_augmentation
import report_epochs
import report_peers
import report_stream
from augmentation import PAIR
from epochs import PARTS
from places import HERE
from publishing import Page
from workload import WORKS

__all__ = ["ORDER", "PAGE", "section"]

ORDER = (*WORKS, PAIR, *PARTS, "stream", "peers")


def section(result: dict[str, Any]) -> str:
    """A part as it stands in the README."""
    if result["part"] in (*WORKS, PAIR):
        return report_augmentation.section(result)
    if result["part"] in PARTS:
        return report_epochs.section(result)
    parts = {"stream": report_stream, "peers": report_peers}
    return parts[result["part"]].section(result)


PAGE = Page(HERE, section, ORDER)
