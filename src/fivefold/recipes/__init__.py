"""Complete runs that a newcomer can start by name, and the models they train.

A recipe is data: values for the plan, and functions that read and augment images. `recipes.get("digits")`
loads that one recipe, and no torch.
"""

from __future__ import annotations

from importlib import import_module

from fivefold.errors import UsageError, suggest
from fivefold.recipes.recipe import Recipe

__all__ = ["Recipe", "get", "names"]

_NAMES = ("digits", "cifar10", "svhn", "folder", "photos")


def names() -> tuple[str, ...]:
    """The recipes that `get` knows; each is a module of this package."""
    return _NAMES


def get(name: str) -> Recipe:
    """The recipe called `name`. Raises `UsageError` for an unknown one."""
    if name not in _NAMES:
        raise UsageError(f"unknown recipe {name!r}{suggest(name, _NAMES)}")
    found = import_module(f"fivefold.recipes.{name}").RECIPE
    assert isinstance(found, Recipe), name
    return found
