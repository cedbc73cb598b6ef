"""Nets that cannot be made parallel as they are, each with what to do instead."""

from __future__ import annotations

import functools
import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fivefold.errors import UsageError

__all__ = ["check_net", "held", "refuse_joint_optimizers"]


def check_net(net: nn.Module, replicas: int = 1) -> None:
    """Raise `UsageError`, naming the module, for a net that Fivefold would compute wrongly on `replicas`."""
    if not isinstance(net, nn.Module):  # pyright: ignore - callers without a type checker
        raise UsageError(f"parallelize needs an nn.Module, got {type(net).__name__}")
    for name, module in net.named_modules():
        reason = _reason(module) or (_reason_of_replicas(module) if replicas > 1 else None)
        if reason:
            where = f"the module {name!r}" if name else "the net"
            raise UsageError(f"{where} {reason}")


def held(name: str, parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, if this rank has it. Raises `UsageError` if a stage of another rank does."""
    if parameter.is_meta:
        raise UsageError(
            f"the parameter {name!r} is in a stage of another rank: full_state_dict() gives all, "
            "named_parameters() what this rank holds"
        )
    return parameter


@functools.cache
def _watch_optimizers() -> weakref.WeakSet[nn.Module]:
    """Nets of which this rank has a part; optimisers are looked at when they step."""
    divided = weakref.WeakSet[nn.Module]()

    def check(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not isinstance(optimizer, torch.optim.LBFGS):
            return
        known = {id(parameter) for net in divided for parameter in net.parameters()}
        if any(id(p) in known for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                "LBFGS looks at all parameters of a net at once, and here each rank has some of them (a pipe "
                "axis, or memory.shard): use an optimiser that treats them one by one, or another layout"
            )

    register_optimizer_step_pre_hook(check)
    return divided


def refuse_joint_optimizers(net: nn.Module) -> None:
    """From now on, optimisers that look at all parameters together are refused for those of this net."""
    _watch_optimizers().add(net)


def _reason(module: nn.Module) -> str | None:
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None):
        return "is compiled: give the plain net to parallelize, without torch.compile"
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted: give the plain eager net to parallelize"
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "is wrapped for data parallelism already: give the plain net to parallelize"
    if type(module).__name__.startswith("FSDP"):
        return "is sharded by FSDP already: give the plain net to parallelize"
    if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
        return (
            "has parameters that ranks divide among them already: give the plain net to parallelize"
        )
    if isinstance(module, nn.SyncBatchNorm):
        return "is SyncBatchNorm: use plain BatchNorm, which Fivefold computes over the whole batch"
    if any(isinstance(p, UninitializedParameter) for p in module.parameters(recurse=False)):
        return "is lazy and has no shape yet: run one batch through the net before parallelize"
    return None


def _reason_of_replicas(module: nn.Module) -> str | None:
    if getattr(module, "max_norm", None) is not None and isinstance(
        module, (nn.Embedding, nn.EmbeddingBag)
    ):
        return (
            "is an embedding with max_norm, which changes the weights of the entries that it looks up: "
            "replicas see different samples and would drift apart; normalise its output instead"
        )
    return None
