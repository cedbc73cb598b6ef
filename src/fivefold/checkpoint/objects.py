"""How to keep an object: modules, optimisers, tensors, dicts, and anything with a state_dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fivefold.checkpoint.modules import KeptModule, named_parameters
from fivefold.checkpoint.state_adapter import (
    Path,
    SavedEntry,
    StateAdapter,
    StateEntry,
    check_size,
    shape_of,
)
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


# ---- Optimisers in checkpoints: what they keep for each parameter, by the parameter's name

_PLACEHOLDER = ""
"""the name of what a parallel model gives the optimiser of a rank that has nothing to train"""


class KeptOptimizer:
    """Keyed by parameter names, as torch's `get_optimizer_state_dict` does: "state", NAME, what is kept."""

    shared = True

    def __init__(self, name: str, optimizer: Optimizer, modules: Iterable[nn.Module]) -> None:
        self._name, self._optimizer = name, optimizer
        self._modules = list(modules)

    def _groups(self) -> list[dict[str, Any]]:
        """The parameter groups, with names and parameters for `params`."""
        known: dict[int, str] = {}
        for module in self._modules:
            for name, parameter in named_parameters(module):
                known.setdefault(id(parameter), name)
            if (placeholder := getattr(module, "placeholder", None)) is not None:
                known[id(placeholder)] = _PLACEHOLDER
        groups = self._optimizer.param_groups
        return [
            {
                **group,
                "params": {known.get(id(p), f"#{n}.{i}"): p for i, p in enumerate(group["params"])},
            }
            for n, group in enumerate(groups)
        ]

    def entries(self) -> Iterator[StateEntry]:
        """What there is to save now."""
        state = cast("dict[Tensor, dict[str, Any]]", self._optimizer.state)
        for number, group in enumerate(self._groups()):
            group["params"].pop(_PLACEHOLDER, None)
            for name, parameter in group["params"].items():
                for key, value in state.get(parameter, {}).items():
                    path = ("state", name, key)
                    if isinstance(value, Tensor):
                        yield StateEntry(path, value.detach(), rests=True)
                    else:
                        yield StateEntry(path, encoded(value, f"{self._name}.{'.'.join(path)}"))
            for key, value in group.items():
                told = list(value) if key == "params" else encoded(value, f"{self._name}.{key}")
                yield StateEntry(("param_groups", number, key), told)

    def missing(self, saved: Mapping[Path, SavedEntry]) -> Iterable[str]:
        """Names that it has and the checkpoint has not."""
        groups = {path[1] for path in saved if path[0] == "param_groups"}
        here = range(len(self._optimizer.param_groups))
        return (
            [] if groups == set(here) else [f"{len(here)} parameter groups (it has {len(groups)})"]
        )

    def names(self) -> Iterable[str] | None:
        """Names of which it holds the state."""
        every = [name for group in self._groups() for name in group["params"]]
        return [f"state.{name}" for name in every if name != _PLACEHOLDER]

    def name_of(self, path: Path) -> str | None:
        """Which of `names` a path belongs to."""
        return f"state.{path[1]}" if path[0] == "state" else None

    def targets(self, saved: Mapping[Path, SavedEntry]) -> dict[Path, Tensor | None]:
        """Tensors to be filled, None for values."""
        found: dict[Path, Tensor | None] = {
            path: None for path in saved if path[0] == "param_groups" and path[2] != "params"
        }
        parameters = {n: p for group in self._groups() for n, p in group["params"].items()}
        for path, held in saved.items():
            if path[0] == "state" and path[1] in parameters:
                found[path] = self._target(path, held, parameters[path[1]])
        return found

    def _target(self, path: Path, saved: SavedEntry, parameter: Tensor) -> Tensor | None:
        """A new tensor in the layout of the parameter that it belongs to."""
        if saved.size is None:
            return None
        own = cast("dict[Tensor, dict[str, Any]]", self._optimizer.state).get(parameter, {})
        there = own.get(str(path[2]))
        if isinstance(there, Tensor) and (there.size(), there.dtype) == (saved.size, saved.dtype):
            return there.detach()
        # Counts of steps lie on the CPU, also where the parameter is a single number on a GPU.
        if saved.size == parameter.size() and path[2] != "step":
            return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False).detach()
        if is_dtensor(parameter) and saved.size.numel() > 1:
            raise UsageError(
                f"{self._name}.{path[1]}.{path[2]} is {shape_of(saved.size)}, unlike its parameter, which "
                "ranks hold in parts: make a step of the optimiser before loading, or do not use fully_shard"
            )
        return torch.zeros(saved.size, dtype=saved.dtype)

    def restore(self, read: Mapping[Path, Any]) -> None:
        """Take what was read."""
        groups, state, numbers = self._groups(), dict[int, dict[str, Any]](), dict[str, int]()
        packed: list[dict[str, Any]] = []
        for number, group in enumerate(groups):
            told = {str(p[2]): v for p, v in read.items() if p[:2] == ("param_groups", number)}
            first = len(numbers)
            numbers.update({name: first + i for i, name in enumerate(group["params"])})
            packed.append({**decoded(told), "params": [numbers[name] for name in group["params"]]})
        for path, value in read.items():
            if path[0] == "state":
                held = value if isinstance(value, Tensor) else decoded(value)
                state.setdefault(numbers[str(path[1])], {})[str(path[2])] = held
        state = dict(sorted(state.items()))  # in the order of the parameters, as always
        self._optimizer.load_state_dict({"state": state, "param_groups": packed})
        self._keep_dtypes(groups, read)

    def _keep_dtypes(self, groups: list[dict[str, Any]], read: Mapping[Path, Any]) -> None:
        """`load_state_dict` casts what is kept to the dtype of the parameter; it stays as it was saved."""
        own = cast("dict[Tensor, dict[str, Any]]", self._optimizer.state)
        parameters = {n: p for group in groups for n, p in group["params"].items()}
        for path, value in read.items():
            if path[0] == "state" and isinstance(value, Tensor):
                held = own[parameters[path[1]]]
                if held[str(path[2])].dtype != value.dtype:
                    held[str(path[2])] = value.to(held[str(path[2])].device)
