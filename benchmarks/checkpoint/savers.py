"""The contenders' ways to save, each as a competent user would write it today.

`save` is called after an optimiser's step and returns when training may go on; `drain` returns when the
save is where it is going to be. Files go to SHARED, the parallel file system, unless told otherwise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.nn.parallel import DistributedDataParallel
from workload import Training

__all__ = ["SAVERS", "Saver"]

SHARED, LOCAL = "SHARED", "LOCAL"


class Saver(Protocol):
    """A contender's side of a checkpoint."""

    def save(self, step: int) -> None:
        """Take a checkpoint of the state after this step."""
        ...

    def drain(self) -> None:
        """Wait until it is complete."""
        ...

    def tidy(self) -> None:
        """Remove older ones; not timed."""
        ...


class Nothing:
    """No checkpoints at all."""

    def __init__(self, run: Training) -> None:
        pass

    def save(self, step: int) -> None:
        """Nothing."""

    def drain(self) -> None:
        """Nothing."""

    def tidy(self) -> None:
        """Nothing."""


class RankZero:
    """torch.save on rank 0, the others wait: what most scripts do."""

    def __init__(self, run: Training) -> None:
        self._run = run
        self._path = Path(os.environ[SHARED]) / "checkpoint.pt"

    def save(self, step: int) -> None:
        """Gather what is divided, write, and let the others wait."""
        state = self._state()
        if dist.get_rank() == 0:
            begun = self._path.with_suffix(".tmp")
            torch.save({**state, "step": step}, begun)
            begun.replace(self._path)
        dist.barrier()

    def _state(self) -> dict[str, Any]:
        net, optimiser = self._run.net, self._run.optimiser
        if isinstance(net, DistributedDataParallel):
            return {"model": net.module.state_dict(), "optim": optimiser.state_dict()}
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optim = get_state_dict(net, optimiser, options=whole)
        return {"model": model, "optim": optim}

    def drain(self) -> None:
        """It is there already."""

    def tidy(self) -> None:
        """It replaces the one before."""


class Distributed:
    """torch.distributed.checkpoint: every rank writes its part, and training waits."""

    def __init__(self, run: Training) -> None:
        self._run = run
        self._latest = 0

    def save(self, step: int) -> None:
        """All ranks at once, into a new directory."""
        self._latest = step
        dcp.save(self._state(), checkpoint_id=self._path(step))

    def _state(self) -> dict[str, Any]:
        model, optim = get_state_dict(self._run.net, self._run.optimiser)
        return {"model": model, "optim": optim}

    def _path(self, step: int) -> str:
        return f"{os.environ[SHARED]}/step-{step}"

    def drain(self) -> None:
        """It is there already."""

    def tidy(self) -> None:
        """Keep the latest."""
        if dist.get_rank() == 0:
            for path in Path(os.environ[SHARED]).glob("step-*"):
                if path.name != f"step-{self._latest}":
                    shutil.rmtree(path)


class Later(Distributed):
    """dcp.async_save: a copy is taken, the rest goes on beside training."""

    def __init__(self, run: Training, options: Callable[[], dict[str, Any]]) -> None:
        super().__init__(run)
        # A group of its own, as its documentation asks for: training's collectives go on meanwhile.
        self._group: Any = dist.new_group(backend="gloo")
        self._options = options()
        self._future: Future[Any] | None = None

    def save(self, step: int) -> None:
        """Begin one, when the one before has ended."""
        self.drain()
        self._latest = step
        response = dcp.async_save(
            self._state(),
            checkpoint_id=self._path(step),
            process_group=self._group,
            **self._options,
        )
        self._future = response if isinstance(response, Future) else response.upload_completion

    def drain(self) -> None:
        """Wait for the background; its failure is raised here."""
        if self._future is not None:
            self._future.result()
            self._future = None


def _staged() -> dict[str, Any]:
    # The buffers of a stager that is kept are used again; pinned memory and streams are of GPUs.
    kept = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    return {
        "async_stager": DefaultStager(kept),
        "planner": DefaultSavePlanner(enable_plan_caching=True),
    }


class Gemini:
    """lm-resiliency 0.2.0: copies in memory, one's own and a peer's, which a lost node leaves intact."""

    def __init__(self, run: Training) -> None:
        from lm_resiliency.checkpointing import (  # pyright: ignore[reportMissingImports]
            InMemoryCheckpointManager,
            InMemoryCkptConfig,
        )

        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        config: Any = InMemoryCkptConfig(
            replication_jump=per_node,  # the peer is on another node
            disk_flush_interval=0,
            disk_folder=os.environ[LOCAL],
            pin_memory=False,
        )
        self._manager: Any = InMemoryCheckpointManager(config)
        self._run = run

    def save(self, step: int) -> None:
        """Copy, and begin to send to the peer."""
        kept = [*self._run.net.parameters(), *self._run.net.buffers()]
        for state in self._run.optimiser.state.values():
            kept += [value for value in state.values() if isinstance(value, torch.Tensor)]
        self._manager.save_tensors([t.detach() for t in kept], step)

    def drain(self) -> None:
        """Wait for the peer's copy."""
        if not self._manager.finalize_replication(timeout_s=120.0):
            raise RuntimeError("lm-resiliency: the peer has no complete copy")

    def tidy(self) -> None:
        """Its buffers are used again."""


def _processes() -> dict[str, Any]:
    return {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}


SAVERS: dict[str, Callable[[Training], Saver]] = {
    "none": Nothing,
    "rank0": RankZero,
    "dcp": Distributed,
    "dcp-thread": lambda run: Later(run, dict[str, Any]),
    "dcp-process": lambda run: Later(run, _processes),
    "dcp-staged": lambda run: Later(run, _staged),
    "lm-resiliency": Gemini,
}
