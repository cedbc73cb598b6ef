"""Gradients of a stage whose parameters the replicas divide among them (`memory.shard`).

They are gathered when a step begins, and their gradients scattered when all micro-batches are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fivefold import comm
from fivefold.parallel.pipeline.gradients import StageGradients, scaled
from fivefold.parallel.reduce import Alone
from fivefold.parallel.sharded import Shards
from fivefold.trace import Tag

__all__ = ["ShardedStages", "StageShards"]


class StageShards(StageGradients):
    """As `StageGradients`, for the parameters `names` of `net`; `everyone` holds all ranks of `replicas`."""

    def __init__(
        self,
        net: nn.Module,
        names: Sequence[str],
        replicas: DeviceMesh,
        everyone: dist.ProcessGroup,
    ) -> None:
        super().__init__(list, everyone)
        self._shards, self._device = (
            Shards(net, names, replicas),
            torch.device(replicas.device_type),
        )

    def begin(self) -> None:
        """Start a step: make the parameters whole. Collective."""
        self._shards.begin()

    def launch(self) -> None:
        """Sums wait for `finish`: the parameters of other stages are still at work."""

    def finish(self, scale: Tensor | None = None) -> None:
        """Sum the gradients, each rank its part, and divide the parameters again. Collective."""
        scaled(self._shards.parameters(), scale)
        used = self._shards.finish()
        counts = torch.tensor(used, dtype=torch.float32, device=self._device)
        self._shards.forget(comm.all_reduce(counts, self._group, Tag.GRADIENTS).tolist())

    def rest(self) -> None:
        """Divide the parameters again, without sums."""
        self._shards.rest()


class ShardedStages(Alone):
    """The stages of a rank, which complete their gradients themselves: a `Reducer` for what is left."""

    def __init__(self, stages: Iterable[StageGradients]) -> None:
        self._stages = [stage for stage in stages if isinstance(stage, StageShards)]

    def forward(self, run: Callable[[], Any], *, step: bool) -> Any:
        """What `run` returns, a forward pass outside a step, with whole parameters. Collective."""
        assert not step, "stages begin their steps themselves"
        for stage in self._stages:
            stage.begin()
        try:
            return run()
        finally:
            self.rest()

    def rest(self) -> None:
        """Divide the parameters again."""
        for stage in self._stages:
            stage.rest()
