"""Optimisers in checkpoints: what they keep for each parameter, by the parameter's name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fivefold.checkpoint.modules import named_parameters
from fivefold.checkpoint.state_adapter import Path, SavedEntry, StateEntry, shape_of
from fivefold.checkpoint.values import decoded, encoded
from fivefold.errors import UsageError
from fivefold.torch_private import is_dtensor

__all__ = ["KeptOptimizer"]

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
