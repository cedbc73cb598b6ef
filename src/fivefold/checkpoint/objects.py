"""What is saved of an object, and how it gets it back.

    object ── entries ──► paths, tensors, values ──► checkpoint ──► targets, values ──► restore ── object

Paths use the names of the plain net, for the optimiser too: layouts may change between save and load.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from fivefold.checkpoint.values import decoded, encoded, leaves
from fivefold.errors import UsageError

__all__ = ["Entry", "Kept", "Path", "Saved", "Stateful", "kept"]

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tensor or value of a checkpoint."""

    path: Path
    value: Any
    """a tensor itself, or a copy of anything else"""
    rests: bool = False
    """the tensor stays as it is until an optimiser makes a step"""


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a checkpoint holds under one path."""

    path: Path
    size: torch.Size | None
    """None: no tensor"""
    dtype: torch.dtype | None


@runtime_checkable
class Stateful(Protocol):
    """Schedulers, scalers, loaders, and whatever else keeps a state."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that `load_state_dict` needs."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from there."""
        ...


@runtime_checkable
class _Counting(Protocol):
    """A module that counts its steps: `ParallelModel`, whose random masks are a function of them."""

    module: nn.Module
    steps: int


class Kept(Protocol):
    """An object under its name in the checkpoint; paths begin behind that name."""

    shared: bool
    """whether all ranks hold the same values, or a part each: then they are stored once"""

    def entries(self) -> Iterator[Entry]:
        """What there is to save now. Tensors are the object's own."""
        ...

    def missing(self, saved: Mapping[Path, Saved]) -> Iterable[str]:
        """Names that this object has and the checkpoint has not."""
        ...

    def names(self) -> Iterable[str] | None:
        """Names of which it holds the state; a checkpoint must not have others. None: any will do."""
        ...

    def targets(self, saved: Mapping[Path, Saved]) -> dict[Path, Tensor | None]:
        """What to read: tensors to be filled, None for values."""
        ...

    def restore(self, read: Mapping[Path, Any]) -> None:
        """Take what was read for `targets`."""
        ...


def kept(name: str, thing: object, modules: Mapping[str, nn.Module]) -> Kept:
    """How to keep `thing`; `modules` give the parameters of an optimiser their names.

    Raises `UsageError` where there is no way.
    """
    if isinstance(thing, nn.Module):
        return _Module(name, thing)
    if isinstance(thing, Optimizer):
        return _Optimizer(name, thing, modules.values())
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


# ---- modules


def plain(module: nn.Module) -> nn.Module:
    """The user's net within wrappers that add a prefix to every name."""
    if isinstance(module, DistributedDataParallel):
        return plain(cast(nn.Module, module.module))
    inner = getattr(module, "_orig_mod", None)  # of torch.compile
    return plain(inner) if isinstance(inner, nn.Module) else module


_CHECKPOINTED = "_checkpoint_wrapped_module."
"""what torch's wrapper for activation checkpointing puts into names"""


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a net under their own names, shared ones under each."""
    for name, parameter in plain(module).named_parameters(remove_duplicate=False):
        yield name.replace(_CHECKPOINTED, ""), parameter


class _Module:
    shared = True

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, plain(module)
        if any(type(m).__name__ == "FullyShardedDataParallel" for m in module.modules()):
            raise UsageError(
                f"{name} is wrapped by FullyShardedDataParallel, whose parameters have lost their names: use "
                "torch.distributed.fsdp.fully_shard (FSDP2)"
            )

    def _state(self) -> dict[str, Any]:
        return {
            key.replace(_CHECKPOINTED, ""): value
            for key, value in self._module.state_dict().items()
        }

    def entries(self) -> Iterator[Entry]:
        rests = {name for name, _ in named_parameters(self._module)}
        for key, value in self._state().items():
            if isinstance(value, Tensor):
                yield Entry((key,), value.detach(), key in rests)
            else:
                yield Entry((key,), encoded(value, f"{self._name}.{key}"))
        if isinstance(self._module, _Counting):
            yield Entry((_STEPS,), self._module.steps)

    def missing(self, saved: Mapping[Path, Saved]) -> Iterable[str]:
        return [key for key in self._state() if (key,) not in saved]

    def names(self) -> Iterable[str] | None:
        return [*self._state(), _STEPS]

    def targets(self, saved: Mapping[Path, Saved]) -> dict[Path, Tensor | None]:
        found: dict[Path, Tensor | None] = {}
        for key, value in self._state().items():
            tensor = value.detach() if isinstance(value, Tensor) else None
            _check_size(f"{self._name}.{key}", tensor, saved[(key,)])
            found[(key,)] = tensor
        if isinstance(self._module, _Counting) and (_STEPS,) in saved:
            found[(_STEPS,)] = None
        return found

    def restore(self, read: Mapping[Path, Any]) -> None:
        state = {str(path[0]): value for path, value in read.items()}
        steps = state.pop(_STEPS, None)
        real = self._module.state_dict()
        named = {key.replace(_CHECKPOINTED, ""): key for key in real}
        # Tensors were filled where they lie; this is for extra state, and for hooks of the module. On a
        # `pipe` axis a rank has some of the names only.
        self._module.load_state_dict(
            {
                named[key]: value if isinstance(value, Tensor) else decoded(value)
                for key, value in state.items()
            },
            strict=False,
        )
        if isinstance(self._module, _Counting) and steps is not None:
            self._module.steps = int(steps)


_STEPS = "_steps"
"""where the steps of a counting module are stored"""


def _check_size(name: str, tensor: Tensor | None, saved: Saved) -> None:
    here = None if tensor is None else tensor.size()
    if here != saved.size:
        raise UsageError(
            f"{name} is {_shape(here)}, in the checkpoint {_shape(saved.size)}: it is of another model; "
            "build the model as it was when it was saved"
        )


def _shape(size: torch.Size | None) -> str:
    return "no tensor" if size is None else "x".join(map(str, size)) or "a single number"


# ---- optimisers


class _Optimizer:
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
        groups = self._optimizer.param_groups
        return [
            {
                **group,
                "params": {known.get(id(p), f"#{n}.{i}"): p for i, p in enumerate(group["params"])},
            }
            for n, group in enumerate(groups)
        ]

    def entries(self) -> Iterator[Entry]:
        state = cast("dict[Tensor, dict[str, Any]]", self._optimizer.state)
        for number, group in enumerate(self._groups()):
            for name, parameter in group["params"].items():
                for key, value in state.get(parameter, {}).items():
                    path = ("state", name, key)
                    if isinstance(value, Tensor):
                        yield Entry(path, value.detach(), rests=True)
                    else:
                        yield Entry(path, encoded(value, f"{self._name}.{'.'.join(path)}"))
            for key, value in group.items():
                told = list(value) if key == "params" else encoded(value, f"{self._name}.{key}")
                yield Entry(("param_groups", number, key), told)

    def missing(self, saved: Mapping[Path, Saved]) -> Iterable[str]:
        groups = {path[1] for path in saved if path[0] == "param_groups"}
        here = range(len(self._optimizer.param_groups))
        return (
            [] if groups == set(here) else [f"{len(here)} parameter groups (it has {len(groups)})"]
        )

    def names(self) -> Iterable[str] | None:
        return [f"state.{name}" for group in self._groups() for name in group["params"]]

    def targets(self, saved: Mapping[Path, Saved]) -> dict[Path, Tensor | None]:
        found: dict[Path, Tensor | None] = {
            path: None for path in saved if path[0] == "param_groups" and path[2] != "params"
        }
        parameters = {n: p for group in self._groups() for n, p in group["params"].items()}
        for path, held in saved.items():
            if path[0] == "state" and path[1] in parameters:
                found[path] = self._target(path, held, parameters[path[1]])
        return found

    def _target(self, path: Path, saved: Saved, parameter: Tensor) -> Tensor | None:
        """A new tensor in the layout of the parameter that it belongs to."""
        if saved.size is None:
            return None
        own = cast("dict[Tensor, dict[str, Any]]", self._optimizer.state).get(parameter, {})
        there = own.get(str(path[2]))
        if isinstance(there, Tensor) and (there.size(), there.dtype) == (saved.size, saved.dtype):
            return there.detach()
        if saved.size == parameter.size():
            return torch.zeros_like(parameter, dtype=saved.dtype, requires_grad=False).detach()
        if isinstance(parameter, DTensor) and saved.size.numel() > 1:
            raise UsageError(
                f"{self._name}.{path[1]}.{path[2]} is {_shape(saved.size)}, unlike its parameter, which "
                "ranks hold in parts: make one step of the optimiser before loading, or load without fully_shard"
            )
        return torch.zeros(saved.size, dtype=saved.dtype)

    def restore(self, read: Mapping[Path, Any]) -> None:
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


# ---- everything else


class _Tensor:
    shared = True

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()

    def entries(self) -> Iterator[Entry]:
        yield Entry((), self._tensor)

    def missing(self, saved: Mapping[Path, Saved]) -> Iterable[str]:  # noqa: ARG002
        return []

    def names(self) -> Iterable[str] | None:
        return None

    def targets(self, saved: Mapping[Path, Saved]) -> dict[Path, Tensor | None]:
        _check_size("the tensor", self._tensor, saved[()])
        return {(): self._tensor}

    def restore(self, read: Mapping[Path, Any]) -> None:
        """It was filled where it lies."""


class _Other:
    shared = False

    def __init__(self, name: str, thing: Stateful) -> None:
        self._name, self._thing = name, thing

    def entries(self) -> Iterator[Entry]:
        for path, value in leaves(self._thing.state_dict()):
            if isinstance(value, Tensor):
                yield Entry(path, value.detach())
            else:
                yield Entry(path, encoded(value, f"{self._name}.{'.'.join(map(str, path))}"))

    def missing(self, saved: Mapping[Path, Saved]) -> Iterable[str]:  # noqa: ARG002
        return []

    def names(self) -> Iterable[str] | None:
        return None

    def targets(self, saved: Mapping[Path, Saved]) -> dict[Path, Tensor | None]:
        own = dict(leaves(self._thing.state_dict()))
        found: dict[Path, Tensor | None] = {}
        for path, held in saved.items():
            there = own.get(path)
            if held.size is None:
                found[path] = None
            elif isinstance(there, DTensor) and there.size() == held.size:
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
