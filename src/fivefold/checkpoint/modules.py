"""Modules in checkpoints: their state_dict, under the names of the plain net."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fivefold.checkpoint.state_adapter import Path, SavedEntry, StateEntry, check_size
from fivefold.checkpoint.values import decoded, encoded
from fivefold.errors import UsageError
from fivefold.torch_private import is_dtensor

__all__ = ["KeptModule", "named_parameters", "plain"]


@runtime_checkable
class _Counting(Protocol):
    """A module that counts its steps: `ParallelModel`, whose random masks are a function of them."""

    module: nn.Module
    steps: int


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


class KeptModule:
    """A module. Tensors are read into the memory where they lie."""

    shared = True

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, plain(module)
        if any(type(m).__name__ == "FullyShardedDataParallel" for m in module.modules()):
            raise UsageError(
                f"{name} is wrapped by FullyShardedDataParallel, whose parameters have lost their names: use "
                "torch.distributed.fsdp.fully_shard (FSDP2)"
            )

    def _state(self) -> dict[str, Any]:
        # What is on the meta device another rank has: averages of a net in stages are such modules.
        return {
            key.replace(_CHECKPOINTED, ""): value
            for key, value in self._module.state_dict().items()
            if not (isinstance(value, Tensor) and value.is_meta)
        }

    def entries(self) -> Iterator[StateEntry]:
        """What there is to save now."""
        rests = {name for name, _ in named_parameters(self._module)}
        for key, value in self._state().items():
            if isinstance(value, Tensor):
                yield StateEntry((key,), value.detach(), key in rests)
            else:
                yield StateEntry((key,), encoded(value, f"{self._name}.{key}"))
        if isinstance(self._module, _Counting):
            yield StateEntry((_STEPS,), self._module.steps)

    def missing(self, saved: Mapping[Path, SavedEntry]) -> Iterable[str]:
        """Names that it has and the checkpoint has not."""
        return [key for key in self._state() if (key,) not in saved]

    def names(self) -> Iterable[str] | None:
        """Names of which it holds the state."""
        return [*self._state(), _STEPS]

    def name_of(self, path: Path) -> str | None:
        """Which of `names` a path belongs to."""
        return str(path[0])

    def targets(self, saved: Mapping[Path, SavedEntry]) -> dict[Path, Tensor | None]:
        """Tensors to be filled, None for values."""
        found: dict[Path, Tensor | None] = {}
        for key, value in self._state().items():
            tensor = value.detach() if isinstance(value, Tensor) else None
            check_size(f"{self._name}.{key}", tensor, saved[(key,)])
            found[(key,)] = tensor
        if isinstance(self._module, _Counting) and (_STEPS,) in saved:
            found[(_STEPS,)] = None
        return found

    def restore(self, read: Mapping[Path, Any]) -> None:
        """Take what was read."""
        state = {str(path[0]): value for path, value in read.items()}
        steps = state.pop(_STEPS, None)
        own = self._module.state_dict()
        named = {key.replace(_CHECKPOINTED, ""): key for key in own}
        # Tensors were filled where they lie. What is left is extra state, and modules whose state_dict
        # gives copies; on a `pipe` axis a rank has some of the names only.
        left = {
            named[key]: value if isinstance(value, Tensor) else decoded(value)
            for key, value in state.items()
            if not _same_memory(own[named[key]], value)
        }
        if left:
            self._module.load_state_dict(left, strict=False)
        if isinstance(self._module, _Counting) and steps is not None:
            self._module.steps = int(steps)


_STEPS = "_steps"
"""where the steps of a counting module are stored"""


def _same_memory(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    here, there = (t.to_local() if is_dtensor(t) else t for t in (one, other))
    return here.data_ptr() == there.data_ptr()
