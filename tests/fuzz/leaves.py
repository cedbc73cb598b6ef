"""The leaves of what nets return, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["flat"]


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Leaves of tuples, lists, dicts and dataclasses; None is one. Fields and keys give the names."""
    inside: dict[Any, Any]
    if isinstance(tree, dict):
        inside = tree
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        inside = tree._asdict()
    elif isinstance(tree, list | tuple):
        inside = dict(enumerate(tree))
    elif dataclasses.is_dataclass(tree):
        inside = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}
    else:
        return {path: tree}
    return {
        name: leaf
        for key, value in inside.items()
        for name, leaf in flat(value, f"{path}.{key}" if path else str(key)).items()
    }
