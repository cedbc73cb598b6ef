"""Running statistics of two opposite chains, which see every other micro-batch each.

One process would update them micro-batch by micro-batch. So both ranks that hold a stage note what every
micro-batch gives, tell each other at the end of a step, and apply all of it in the order of micro-batches.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold import comm
from fivefold.errors import UsageError
from fivefold.parallel.graph.hooks import Hooked
from fivefold.parallel.graph.refs import StateRef
from fivefold.parallel.graph.tape import Tape
from fivefold.parallel.norms import uses_batch
from fivefold.parallel.pipeline.schedules import PAIRED
from fivefold.parallel.program.rule import Statistics
from fivefold.torch_private import has_own_backward
from fivefold.trace import Tag

__all__ = ["Notes", "check_counted", "check_effects", "check_linear", "check_norms", "check_values"]


class Notes:
    """What the micro-batches of one step gave to the running statistics of one stage."""

    def __init__(self) -> None:
        self._found: dict[int, list[Statistics]] = defaultdict(list)
        self._open: int | None = None

    def begin(self, micro: int) -> None:
        """What is noted from now on belongs to a micro-batch."""
        self._open = micro

    def end(self) -> None:
        """Nothing is noted any more: what is recomputed gives its statistics once."""
        self._open = None

    def __call__(self, statistics: Statistics) -> None:
        """Note what a norm is due."""
        if self._open is not None:
            self._found[self._open].append(statistics)

    def apply(self, opposite: dist.ProcessGroup | None) -> None:
        """Update the running statistics. `opposite` are the two ranks that hold the stage, None if one does.

        Collective over `opposite`. Both have seen the same number of micro-batches: they take turns.
        """
        micros = sorted(self._found)
        own = [self._found[micro] for micro in micros]
        if opposite is not None and own and own[0]:
            own = self._of_both(own, micros, opposite)
        for statistics in own:
            for one in statistics:
                one.apply()
        self._found.clear()

    def _of_both(
        self, own: list[list[Statistics]], micros: list[int], opposite: dist.ProcessGroup
    ) -> list[list[Statistics]]:
        numbers = [torch.cat([_flat(one) for one in statistics]) for statistics in own]
        order = torch.tensor(micros, dtype=torch.float64, device=numbers[0].device)
        told = torch.cat([torch.cat(numbers), order])
        every = comm.all_gather(told, opposite, Tag.BATCH_NORM)
        rows: list[tuple[int, list[Statistics]]] = []
        for told in every:
            found, theirs = told[: -len(micros)].view(len(micros), -1), told[-len(micros) :]
            for micro, row in zip(theirs.tolist(), found, strict=True):
                rows.append((int(micro), _with_numbers(own[0], row)))
        return [statistics for _, statistics in sorted(rows, key=lambda item: item[0])]


def _flat(one: Statistics) -> Tensor:
    return torch.cat([one.mean, one.var]).double()


def _with_numbers(like: list[Statistics], row: Tensor) -> list[Statistics]:
    """The same norms with what another micro-batch gave."""
    found: list[Statistics] = []
    at = 0
    for one in like:
        size = one.mean.numel()
        mean, var = row[at : at + size].to(one.mean), row[at + size : at + 2 * size].to(one.var)
        at += 2 * size
        found.append(
            Statistics(one.running_mean, one.running_var, one.batches, one.momentum, mean, var)
        )
    return found


def check_effects(tape: Tape) -> None:
    """Raise `UsageError` for what a forward leaves behind that two chains would leave out of order."""
    effects = tape.effects
    computed = [one.path for one in effects.sets if not one.plain]
    computed += [ref.name for ref, _ in effects.written if isinstance(ref, StateRef)]
    if computed:
        raise UsageError(
            f"the net changes {computed[0]!r} in its forward, which schedules of two directions "
            f"({', '.join(sorted(PAIRED))}) cannot keep in order: use another schedule"
        )
    hook = next((node for node in tape.nodes if isinstance(node.function, Hooked)), None)
    if hook is not None:
        raise UsageError(
            f"a hook that the forward registers on a tensor ({hook.where}) sees every other micro-batch in "
            f"schedules of two directions ({', '.join(sorted(PAIRED))}): use another schedule"
        )


def check_counted(tape: Tape, micro_batches: int) -> None:
    """Raise `UsageError` for running statistics that one process counts once more while it goes backward."""
    if tape.twice and micro_batches > 1:
        raise UsageError(
            f"a part that updates {min(tape.twice)!r} is checkpointed (torch.utils.checkpoint): one process "
            "counts statistics again while it goes backward, an order that stages do not have with several "
            "micro-batches. Keep it out of the checkpoint and let memory.recompute save the memory, or set "
            "pipeline.micro_batches = 1"
        )


def check_linear(tape: Tape) -> None:
    """Raise `UsageError` for what the user does to gradients before these are divided by the denominator."""
    nodes = tape.nodes
    found = next(
        (
            n
            for n in nodes
            if isinstance(n.function, Hooked) or has_own_backward(n.function, n.name)
        ),
        None,
    )
    if found is not None:
        what = "a hook of a tensor" if isinstance(found.function, Hooked) else found.name
        raise UsageError(
            f"{what} ({found.where}) would see gradients that are not divided yet: with a pipe axis, the "
            "denominator of a loss with share(outputs, targets) is known when all micro-batches are done. "
            "Put hooks on parameters, choose a loss without share, or a layout without pipe"
        )


def check_norms(net: nn.Module) -> None:
    """Raise `UsageError` for running statistics that two chains would update apart."""
    kinds = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
    for name, module in net.named_modules():
        if isinstance(module, kinds) and module.track_running_stats:
            raise UsageError(
                f"the module {name!r} keeps running statistics of an instance norm, which schedules of two "
                f"directions ({', '.join(sorted(PAIRED))}) cannot keep in order: use another schedule"
            )


def check_values(tape: Tape, micro_batches: int, share: float) -> None:
    """Raise `UsageError` for a batch norm of one value per channel, which has no variance.

    For replicas by themselves, each with `share` of what was recorded: together a value of each is enough.
    """
    for node in tape.nodes:
        if uses_batch(node) and math.prod(node.shapes[0]) * share == node.shapes[0][1]:
            raise UsageError(
                f"{node.where} expects more than 1 value per channel when training, and gets an input of "
                f"shape {node.shapes[0]} from one of {micro_batches} micro-batches: use larger batches, "
                "fewer pipeline.micro_batches, or drop the last batch of an epoch"
            )
