"""The names of the plain net around a net that ranks compute together: parameters, state, copies."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, Self

from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.parallel.pipeline.net import PipelinedNet
from fivefold.parallel.refuse import held
from fivefold.parallel.sharded import whole
from fivefold.torch_private import is_dtensor

__all__ = ["Wrapped"]


class StateDict(dict[str, Any]):
    """A state_dict of which other ranks may hold a part. Pickled it is an OrderedDict, as torch has it."""

    def __init__(self, whole: Mapping[str, Any]) -> None:
        super().__init__((name, value) for name, value in whole.items() if not _elsewhere(value))
        self._elsewhere = frozenset(whole).difference(self)

    def __missing__(self, name: str) -> NoReturn:
        if name not in self._elsewhere:
            raise KeyError(name)
        raise UsageError(
            f"{name!r} is in a stage of another rank: full_state_dict() gives all, on every rank"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())


class Wrapped(nn.Module):
    """A net, `.module`, that is computed by others. On a `pipe` axis a rank holds a part of it."""

    module: nn.Module
    _stages: PipelinedNet | None
    placeholder: nn.Parameter | None
    """on a `pipe` axis: a number that stays zero, for optimisers of ranks that have nothing to train"""

    def _rest(self) -> None:
        """Leave parameters as they are between steps: the optimiser's."""
        raise NotImplementedError

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The plain net's state_dict, with its own keys; on a `pipe` axis what this rank holds of it.

        Where replicas divide parameters among them (`memory.shard`), these are DTensors. Raises
        `UsageError` for the key of what another rank holds.
        """
        self._rest()
        return StateDict(self.module.state_dict(*args, **kwargs))

    def full_state_dict(self, of: nn.Module | None = None) -> dict[str, Any]:
        """The plain net's whole state_dict, on every rank. Collective.

        What this rank holds whole is not copied, as in `nn.Module.state_dict`: clone what is to stay.

        `of`: instead, that of a copy of `.module` with the same names, such as an average of it.
        """
        self._rest()
        held_here = (self.module if of is None else of).state_dict()
        state = {
            name: whole(value) if isinstance(value, Tensor) else value
            for name, value in held_here.items()
        }
        if self._stages is None:
            return state
        # What modules add (get_extra_state), and buffers that came later, all ranks have.
        held = {name: value for name, value in state.items() if name in self._stages.holders}
        return state | self._stages.everywhere(held)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load a state_dict of the plain net, whole or from `state_dict`; a rank takes what it holds."""
        self._rest()
        loaded, own = dict(state_dict), self.module.state_dict()
        elsewhere = {name: value for name, value in own.items() if _elsewhere(value)}
        if loaded.keys().isdisjoint(elsewhere):  # this rank's part
            loaded |= elsewhere
        loaded |= {name: value for name, value in elsewhere.items() if name in loaded}
        return self.module.load_state_dict(loaded, *args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """As `named_parameters`; on a `pipe` axis `placeholder` too where a rank has nothing to train.

        Optimisers take no empty list, and GradScaler no optimiser without gradients.
        """
        found = [parameter for _, parameter in self.named_parameters(recurse=recurse)]
        if self.placeholder is not None and not any(p.requires_grad for p in found):
            found.append(self.placeholder)
        return iter(found)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The plain net's parameters under their own names; on a `pipe` axis those that this rank holds."""
        self._rest()
        found = self.module.named_parameters(*args, **kwargs)
        return ((name, value) for name, value in found if not value.is_meta)

    def get_parameter(self, target: str) -> nn.Parameter:
        """A parameter of the plain net. Raises `UsageError` where another rank of the `pipe` axis has it."""
        self._rest()
        return held(target, self.module.get_parameter(target))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The plain net's buffers under their own names; on a `pipe` axis those that this rank holds."""
        found = self.module.named_buffers(*args, **kwargs)
        return ((name, value) for name, value in found if not value.is_meta)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """What moves and converts a module; of what other ranks hold only the dtype follows."""

        def here(value: Tensor) -> Tensor:
            if is_dtensor(value) and fn(value.to_local()[:0]).dtype != value.dtype:
                raise UsageError(
                    "replicas divide the parameters among them (memory.shard), which keep the dtype they "
                    "have: convert the net before parallelize"
                )
            if not value.is_meta:
                return fn(value)
            return value.to(fn(value.new_empty(0, device="cpu")).dtype)

        return super()._apply(here, recurse)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse("copied")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickled")


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        f"a parallel model is at one with its ranks and cannot be {what}: use its net, as in "
        "AveragedModel(model.module), whose weights model.full_state_dict(of=average.module) gathers; with "
        "memory.shard a net of its own that loads full_state_dict()"
    )


def _elsewhere(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta
