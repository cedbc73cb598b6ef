"""One command starts a job on an allocation, and a rank finds out where it is.

Everything here works without torch, on login nodes too. Names are imported on first use: a rank that
only asks where it is should not pay for the launcher.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.launch.engine import Engine, choose, engines
    from fivefold.launch.environment import RankPlace, launched, locate
    from fivefold.launch.job import Job, Outcome, RankFailure, Stopped
    from fivefold.launch.meet import Rendezvous, meeting

__all__ = [
    "Engine",
    "Job",
    "Outcome",
    "RankFailure",
    "RankPlace",
    "Rendezvous",
    "Stopped",
    "choose",
    "engines",
    "launched",
    "locate",
    "meeting",
]

_HOME = {
    "Engine": "engine",
    "Job": "job",
    "Rendezvous": "meet",
    "Outcome": "job",
    "RankPlace": "environment",
    "RankFailure": "job",
    "Stopped": "job",
    "choose": "engine",
    "engines": "engine",
    "launched": "environment",
    "locate": "environment",
    "meeting": "meet",
}


def __getattr__(name: str) -> object:
    """Import a public name from the module where it lives (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'fivefold.launch' has no attribute {name!r}")
    value: object = getattr(import_module(f"fivefold.launch.{_HOME[name]}"), name)
    globals()[name] = value
    return value
