"""How to keep an object: modules, optimisers, tensors, dicts, and anything with a state_dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fivefold.checkpoint.modules import KeptModule
from fivefold.checkpoint.optimizers import KeptOptimizer
from fivefold.checkpoint.state_adapter import Path, SavedEntry, StateAdapter, StateEntry, check_size
from fivefold.checkpoint.values import decoded, encoded, leaves
from fivefold.errors import UsageError
from fivefold.torch_private import is_dtensor

__all__ = ["Stateful", "adapter_of"]


@runtime_checkable
class Stateful(Protocol):
    """Schedulers, scalers, loaders, and whatever else keeps a state."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from there."""
        ...


def adapter_of(name: str, thing: object, modules: Mapping[str, nn.Module]) -> StateAdapter:
    """How to keep `thing`; `modules` give the parameters of an optimiser their names.

    Raises `UsageError` where there is no way.
    """
    if isinstance(thing, nn.Module):
        return KeptModule(name, thing)
    if isinstance(thing, Optimizer):
        return KeptOptimizer(name, thing, modules.values())
    if isinstance(thing, Tensor):
        return _Tensor(thing)
    if isinstance(thing, Stateful):
        return _Other(name, thing)
    if isinstance(thing, MutableMapping):
        return _Other(name, _Dict(cast("MutableMapping[str, Any]", thing)))
    raise UsageError(
        f"{name} is a {type(thing).__name__}, which cannot be restored: give an object with state_dict and "
        "load_state_dict, a module, an optimiser, a tensor, or a dict"
    )


class _Nameless:
    """What has no parts with names of their own: whatever was saved will do."""

    def missing(self, saved: Mapping[Path, SavedEntry]) -> Iterable[str]:  # noqa: ARG002
        return []

    def names(self) -> Iterable[str] | None:
        return None

    def name_of(self, path: Path) -> str | None:  # noqa: ARG002
        return None


class _Tensor(_Nameless):
    shared = True

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()

    def entries(self) -> Iterator[StateEntry]:
        yield StateEntry((), self._tensor)

    def targets(self, saved: Mapping[Path, SavedEntry]) -> dict[Path, Tensor | None]:
        check_size("the tensor", self._tensor, saved[()])
        return {(): self._tensor}

    def restore(self, read: Mapping[Path, Any]) -> None:
        """It was filled where it lies."""


class _Other(_Nameless):
    shared = False

    def __init__(self, name: str, thing: Stateful) -> None:
        self._name, self._thing = name, thing

    def entries(self) -> Iterator[StateEntry]:
        for path, value in leaves(self._thing.state_dict()):
            if isinstance(value, Tensor):
                yield StateEntry(path, value.detach())
            else:
                yield StateEntry(path, encoded(value, f"{self._name}.{'.'.join(map(str, path))}"))

    def targets(self, saved: Mapping[Path, SavedEntry]) -> dict[Path, Tensor | None]:
        own = dict(leaves(self._thing.state_dict()))
        found: dict[Path, Tensor | None] = {}
        for path, held in saved.items():
            there = own.get(path)
            if held.size is None:
                found[path] = None
            elif is_dtensor(there) and there.size() == held.size:
                found[path] = torch.zeros_like(there)
            else:
                found[path] = torch.zeros(held.size, dtype=held.dtype)
        return found

    def restore(self, read: Mapping[Path, Any]) -> None:
        state: dict[str, Any] = {}
        for path, value in read.items():
            inner = state
            for key in path[:-1]:
                inner = inner.setdefault(str(key), {})
            inner[str(path[-1])] = value if isinstance(value, Tensor) else decoded(value)
        self._thing.load_state_dict(state)


class _Dict:
    """A dict as an object with a state: its items."""

    def __init__(self, values: MutableMapping[str, Any]) -> None:
        self._values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self._values)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._values.clear()
        self._values.update(state_dict)
