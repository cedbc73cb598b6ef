"""Checkpoints that survive nodes: written to every node's own storage, protected by the others, flushed.

Names are imported on first use: reading, checking and repairing checkpoints works without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.checkpoint.checkpointer import Checkpointer
    from fivefold.checkpoint.manifest import Item, Manifest, Member

__all__ = ["Checkpointer", "Item", "Manifest", "Member"]

_HOME = {
    "Checkpointer": "fivefold.checkpoint.checkpointer",
    "Item": "fivefold.checkpoint.manifest",
    "Manifest": "fivefold.checkpoint.manifest",
    "Member": "fivefold.checkpoint.manifest",
}


def __getattr__(name: str) -> object:
    """Import a public name from the module where it lives, once (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module 'fivefold.checkpoint' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
