"""What a kind of object has to offer so that a checkpoint can keep it.

    object ── entries ──► paths, tensors, values ──► checkpoint ──► targets, values ──► restore ── object

Paths use the names of the plain net, for the optimiser too: layouts may change between save and load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from fivefold.errors import UsageError

__all__ = ["Path", "SavedEntry", "StateAdapter", "StateEntry", "check_size", "shape_of"]

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class StateEntry:
    """One tensor or value of a checkpoint."""

    path: Path
    value: Any
    """a tensor itself, or a copy of anything else"""
    rests: bool = False
    """the tensor stays as it is until an optimiser makes a step"""


@dataclasses.dataclass(frozen=True)
class SavedEntry:
    """What a checkpoint holds under one path."""

    path: Path
    size: torch.Size | None
    """None: no tensor"""
    dtype: torch.dtype | None


class StateAdapter(Protocol):
    """An object under its name in the checkpoint; paths begin behind that name."""

    shared: bool
    """whether all ranks hold the same values, or a part each: then they are stored once"""

    def entries(self) -> Iterator[StateEntry]:
        """What there is to save now. Tensors are the object's own."""
        ...

    def missing(self, saved: Mapping[Path, SavedEntry]) -> Iterable[str]:
        """Names that this object has and the checkpoint has not."""
        ...

    def names(self) -> Iterable[str] | None:
        """Names of which it holds the state; a checkpoint must not have others. None: any will do."""
        ...

    def name_of(self, path: Path) -> str | None:
        """Which of `names` a path belongs to; None if to none in particular."""
        ...

    def targets(self, saved: Mapping[Path, SavedEntry]) -> dict[Path, Tensor | None]:
        """What to read: tensors to be filled, None for values."""
        ...

    def restore(self, read: Mapping[Path, Any]) -> None:
        """Take what was read for `targets`."""
        ...


def check_size(name: str, tensor: Tensor | None, saved: SavedEntry) -> None:
    """Raise `UsageError` unless a tensor, or a value, has the size that it had when it was saved."""
    here = None if tensor is None else tensor.size()
    if here != saved.size:
        raise UsageError(
            f"{name} is {shape_of(here)}, in the checkpoint {shape_of(saved.size)}: it is of another model; "
            "build the model as it was when it was saved"
        )


def shape_of(size: torch.Size | None) -> str:
    """A size for people."""
    return "no tensor" if size is None else "x".join(map(str, size)) or "a single number"
