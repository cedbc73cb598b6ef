"""Work that helpers take over from trainers beside the batches of loaders: validation, and what is decided
by it.

Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.offload.decisions import BestSoFar, EarlyStopping, Plateau
    from fivefold.offload.results import Result
    from fivefold.offload.validator import Validator

__all__ = ["BestSoFar", "EarlyStopping", "Plateau", "Result", "Validator"]


def __getattr__(name: str) -> object:
    """Import a public name from its module (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = {"Result": "results", "Validator": "validator"}.get(name, "decisions")
    return getattr(import_module(f"{__name__}.{home}"), name)
