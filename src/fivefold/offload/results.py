"""Validations: what one came to, those that are under way, and where a validator stands between calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fivefold.offload.snapshot import Snapshot
from fivefold.offload.validator_client import ValidationRun
from fivefold.parallel import ParallelModel

__all__ = ["Result", "Stand", "UnderWay"]


@dataclass(frozen=True)
class Result:
    """What a validation came to: equal on every rank."""

    epoch: int
    step: int
    """both as they were told to `submit`: of the weights that were evaluated"""
    figures: Mapping[str, float]
    sums: tuple[float, ...]
    """over all test batches"""
    by_helpers: int = field(default=0, compare=False)
    """how many of the test batches helpers evaluated; the rest was left to the ranks"""
    _snapshot: Snapshot | None = field(default=None, repr=False, compare=False)
    _model: ParallelModel | None = field(default=None, repr=False, compare=False)
    _weights: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def known(cls, *, weights: Mapping[str, Any], **told: Any) -> Result:
        """One of another process: its fields, and what its `state_dict` gave."""
        return cls(**told, _weights=weights)

    def kept(self) -> Result:
        """The same, with a copy of the weights if it has none yet. Collective as `state_dict`."""
        if self._snapshot is None and self._weights is None and self._model is not None:
            return replace(self, _weights=self.state_dict())
        return self

    def state_dict(self) -> dict[str, Any]:
        """The plain net's state_dict that was evaluated, whole, on the CPU.

        Collective where the layout divides the net. With a delay of 0 there is no copy: ask before the next
        step changes the weights.
        """
        if self._weights is not None:
            return dict(self._weights)
        if self._snapshot is not None:
            return self._snapshot.state_dict()
        assert self._model is not None
        state = self._model.full_state_dict()
        return {name: value.detach().to("cpu", copy=True) for name, value in state.items()}


@dataclass(eq=False)
class UnderWay:
    """A validation that was submitted, and whose result was not given yet."""

    epoch: int
    step: int
    test_epoch: int
    snapshot: Snapshot | None
    work: ValidationRun | None = None
    """on the first rank, where helpers evaluate"""
    total: list[float] | None = None
    """where the ranks have evaluated already"""

    def state_dict(self) -> dict[str, Any]:
        """What `Validator.load_state_dict` needs. Collective where ranks hold parts of the net."""
        assert self.snapshot is not None, "what outlasts a call has one"
        told = {"epoch": self.epoch, "step": self.step, "test_epoch": self.test_epoch}
        return {**told, "total": self.total, "weights": self.snapshot.tensors()}


@dataclass(frozen=True)
class Stand:
    """Where a validator stands between two calls."""

    under_way: tuple[UnderWay, ...] = ()
    count: int = 0
    """validations submitted so far"""
    step: int | None = None
    """of the last one; -1 before the first; None where no state has told so far"""
