"""Whether a recording still holds: everything that a forward can read is as the recording saw it.

What is compared, before every step: the values in all containers that `reach` has found (those of modules,
of their lists, dicts and objects, of closures, classes and globals); of tensors shape, dtype, device and
whether they are trained, but not their numbers; numbers of tensors that the forward has looked at; and what
torch itself is set to. Values that are the same objects as before cost some 20 ns each; others are compared
by what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from fivefold.parallel.graph.containers import Bag, Container, ContainerChange, Items, Row, named
from fivefold.parallel.graph.reach import Reach, gathers
from fivefold.parallel.graph.values import stayed

__all__ = ["Guards", "Looked", "settings"]


@dataclass(frozen=True)
class Looked:
    """Numbers that a forward has taken from parameters, buffers or constants alone."""

    again: Callable[[], Any]
    """what they are now"""
    value: Any
    where: str


def settings(device: torch.device) -> tuple[Any, ...]:
    """What torch is set to, as far as a forward can see it."""
    casts = torch.is_autocast_enabled(device.type)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.get_autocast_dtype(device.type) if casts else None,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


@dataclass(eq=False, slots=True)
class _Expected:
    """A container, and what it shall hold."""

    container: Container
    owner: Any
    """the dict or list itself, where it is one"""
    keys: list[Any]
    values: list[Any]


class Guards:
    """What a recording has seen, given what the forward could reach and what it has `changed` of that."""

    def __init__(
        self,
        reach: Reach,
        changed: Sequence[ContainerChange],
        looked: Sequence[Looked],
        device: torch.device,
    ) -> None:
        drawn = {id(change.container) for change in changed}
        self._dicts: list[_Expected] = []
        self._rows: list[_Expected] = []
        self._others: list[_Expected] = []
        empty: list[_Expected] = []
        for held in reach.held:
            container = held.container
            if container.generates and id(container) not in drawn:
                continue
            owner = getattr(container, "owner", None)
            entry = _Expected(container, owner, held.keys, list(held.values))
            if isinstance(container, (Items, Row, Bag)) and not owner:
                empty.append(entry)
            elif isinstance(container, Items):
                self._dicts.append(entry)
            elif isinstance(container, Row):
                self._rows.append(entry)
            else:
                self._others.append(entry)
        # Most containers are empty, hooks that are not there: one look at all of them.
        self._empty: list[Any] = [entry.owner for entry in empty]
        self._empty_entries = empty
        self._by_owner = {
            id(entry.owner): entry
            for entry in (*self._dicts, *self._rows, *empty)
            if entry.owner is not None
        }
        self._tensors = [
            (found, found.tensor.requires_grad, found.tensor.shape)
            for found in reach.tensors
            if isinstance(found.container, Items) and not found.inner
        ]
        self._looked, self._device = list(looked), device
        self._settings = settings(device)

    def broken(self) -> str | None:
        """What is not as the recording saw it, as a message names it; None if all is."""
        if settings(self._device) != self._settings:
            return "autocast, the default dtype or another setting of torch"
        return self._changed() or self._retrained() or self._renumbered()

    def _changed(self) -> str | None:
        if any(self._empty):
            new = [entry for entry in self._empty_entries if entry.owner]
            for entry in new:
                if not (isinstance(entry.owner, dict) and all(map(gathers, entry.owner.values()))):
                    return named(entry.container, next(iter(entry.owner)))
        for entry in self._dicts:
            owner, values = entry.owner, entry.values
            same = len(owner) == len(values) and all(map(is_, owner.values(), values))
            if not same and (found := self._different(entry)):
                return found
        for entry in self._rows:
            owner, values = entry.owner, entry.values
            same = len(owner) == len(values) and all(map(is_, owner, values))
            if not same and (found := self._different(entry)):
                return found
        return next(filter(None, map(self._different, self._others)), None)

    def _retrained(self) -> str | None:
        """Whether a parameter was frozen or thawed, or a tensor got another shape, in place."""
        for found, trained, shape in self._tensors:
            tensor: Tensor = found.container.owner[found.key]  # pyright: ignore[reportAttributeAccessIssue]
            if tensor.requires_grad != trained or tensor.shape != shape:
                return found.path
        return None

    def _renumbered(self) -> str | None:
        return next((one.where for one in self._looked if one.again() != one.value), None)

    def _different(self, entry: _Expected) -> str | None:
        """Look closely at a container. What is equal is taken over, so that the next look is quick."""
        container = entry.container
        keys, now = container.keys(), container.values()
        if keys != entry.keys:
            apart = [key for key in (*keys, *entry.keys) if (key in keys) != (key in entry.keys)]
            return named(container, apart[0]) if apart else container.path
        for key, one, other in zip(keys, entry.values, now, strict=True):
            # A program holds a shared tensor itself, and looks up the others anew.
            if one is not other and (
                (container.shared and isinstance(one, Tensor)) or not self._equal(one, other)
            ):
                return named(container, key)
        entry.values[:] = now
        return None

    def _equal(self, one: Any, other: Any) -> bool:
        """As `stayed`; a list or dict in the place of another that held the same is followed from now on."""
        if stayed(one, other):
            return True
        entry = self._by_owner.get(id(one))
        if (
            entry is None
            or type(one) is not type(other)
            or not isinstance(entry.container, (Items, Row))
        ):
            return False
        new = list(dict.values(other)) if isinstance(other, dict) else list(other)
        if (isinstance(other, dict) and list(other) != entry.keys) or len(new) != len(entry.values):
            return False
        if not all(map(self._equal, entry.values, new)):
            return False
        entry.owner = entry.container.owner = other
        entry.values[:] = new
        self._by_owner[id(other)] = entry
        self._empty = [empty.owner for empty in self._empty_entries]
        return True
