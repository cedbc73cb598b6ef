"""Nets that cannot be made parallel as they are, each with what to do instead."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fivefold.errors import PlanError, UsageError, warn
from fivefold.plan import Memory, Plan
from fivefold.torch_private import is_dtensor, watch_total_norm

__all__ = ["check_net", "held", "refuse_joint"]


def check_net(net: nn.Module, replicas: int = 1) -> None:
    """Raise `UsageError`, naming the module, for a net that Fivefold would compute wrongly on `replicas`."""
    if not isinstance(net, nn.Module):  # pyright: ignore - callers without a type checker
        raise UsageError(f"parallelize needs an nn.Module, got {type(net).__name__}")
    for name, module in net.named_modules():
        reason = _reason(module) or (_reason_of_replicas(module) if replicas > 1 else None)
        if reason:
            where = f"the module {name!r}" if name else "the net"
            raise UsageError(f"{where} {reason}")


def net_of(net: object, plan: Plan) -> tuple[nn.Module, str]:
    """The net, and the name of the method that is called in place of its forward; empty for none.

    Raises `UsageError` for a method with which the plan does not go.
    """
    owner, name = getattr(net, "__self__", None), getattr(net, "__name__", "")
    if isinstance(net, nn.Module) or not isinstance(owner, nn.Module):
        return cast(nn.Module, net), ""  # `check_net` looks at it
    if name in {"forward", "__call__"}:
        return owner, ""
    memory = plan.memory
    others = {
        "memory.budget": memory.budget,
        "memory.recompute": memory.recompute not in {0, "none"},
        "parallel.compile": plan.parallel.compile,
    }
    for what, there in others.items():
        if there:
            raise UsageError(
                f"{what} is for nets that are called by their forward, not by {name}: leave it out, or let "
                "forward do what is trained"
            )
    check_method(owner, name, plan)
    return owner, name


def check_method(net: nn.Module, name: str, plan: Plan) -> None:
    """Raise `UsageError` for what is no method of a net, or cannot be called under a plan."""
    if not callable(getattr(net, name, None)):
        raise UsageError(f"{type(net).__name__} has no method {name!r}")
    if plan.layout.pipe > 1:
        raise UsageError(
            f"a pipe axis cuts what the net's forward computes, so {name} cannot be called: use other axes"
        )
    if plan.layout.data > 1 and plan.memory.shard == "parameters":
        raise UsageError(
            'memory.shard = "parameters" gathers parameters as modules are called by their forward, so '
            f'{name} cannot be called: use "optimizer"'
        )


def uncompiled(net: nn.Module, memory: Memory) -> tuple[nn.Module, bool]:
    """The plain net of one that is compiled as a whole, and whether Fivefold has to compile it."""
    plain = getattr(net, "_orig_mod", None) if type(net).__name__ == "OptimizedModule" else net
    if not isinstance(plain, nn.Module):
        return net, False
    if plain is net and getattr(net, "_compiled_call_impl", None) is None:
        return net, False
    plain._compiled_call_impl = None  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    if memory.budget or memory.recompute not in {0, "none"}:
        warn(f"the net is compiled: Fivefold runs the plain net, since {_KEEPS}")
        return plain, False
    warn(
        "the net is compiled: Fivefold takes the plain net, and compiles what ranks compute between "
        "messages, as with parallel.compile = true; options of torch.compile are not used"
    )
    return plain, True


_KEEPS = "memory.budget and memory.recompute decide what is kept for backward, and so do compilers"


def check_compiled(plan: Plan) -> None:
    """Refuse to compile what is told to be computed again."""
    if plan.parallel.compile and (plan.memory.budget or plan.memory.recompute not in {0, "none"}):
        raise PlanError(f"parallel.compile cannot be used here, since {_KEEPS}: set one of them")


def check_loss(loss: object) -> None:
    """Raise `UsageError` for what cannot be called as loss(outputs, targets)."""
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise UsageError(f"loss={loss.__name__} is a class: make one, loss={loss.__name__}()")
    if loss is not None and not callable(loss):
        raise UsageError(
            f"loss is called as loss(outputs, targets), which {loss!r:.60} cannot be: give a loss of "
            "torch's, such as torch.nn.CrossEntropyLoss(), or a function"
        )


def check_scaler(scaler: object) -> None:
    """Raise `UsageError` for a third argument of `step` that scales no gradients: another input, say."""
    if scaler is not None and not callable(getattr(scaler, "scale", None)):
        raise UsageError(
            f"step takes inputs and targets; its third argument is a torch.amp.GradScaler, not a "
            f"{type(scaler).__name__}: several inputs are a tuple, step((a, b), y), and so are targets"
        )


def held(name: str, parameter: nn.Parameter) -> nn.Parameter:
    """The parameter, if this rank has it. Raises `UsageError` if a stage of another rank does."""
    if parameter.is_meta:
        raise UsageError(
            f"the parameter {name!r} is in a stage of another rank: full_state_dict() gives all, "
            "named_parameters() what this rank holds"
        )
    return parameter


_UNDIVIDED = (torch.optim.Rprop, torch.optim.Adafactor, torch.optim.Muon)
"""Optimisers of torch that raise on parts of tensors; Muon adds products of parts up in bfloat16, which moves
its updates by as much as a third."""


class _Parts:
    """Nets of which this rank has a part. What looks at all of a net's parameters at once is refused."""

    def __init__(self) -> None:
        self.nets = weakref.WeakSet[nn.Module]()
        self.staged = weakref.WeakSet[nn.Module]()
        self.replaced: dict[int, weakref.ref[Tensor]] = {}
        """parameters as they were before replicas divided them"""
        register_optimizer_step_pre_hook(self._check_optimizer)
        watch_total_norm(self._check_norm)

    def _check_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        given = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) in self.replaced and self.replaced[id(p)]() is p for p in given):
            raise UsageError(
                f"{type(optimizer).__name__} was made before parallelize, and holds parameters as they were "
                "before replicas divided them (memory.shard): make it afterwards, of model.parameters()"
            )
        fused = isinstance(optimizer, torch.optim.Adagrad) and optimizer.defaults.get("fused")
        if (fused or isinstance(optimizer, _UNDIVIDED)) and any(is_dtensor(p) for p in given):
            raise UsageError(
                f"torch's {type(optimizer).__name__}{' (fused)' * bool(fused)} cannot step parameters that "
                'replicas divide among them as one process does: use another one, or memory.shard = "none"'
            )
        if not isinstance(optimizer, torch.optim.LBFGS):
            return
        known = {id(parameter) for net in self.nets for parameter in net.parameters()}
        if any(id(p) in known for p in given):
            raise UsageError(
                "LBFGS looks at all parameters of a net at once, and here each rank has some of them (a pipe "
                "axis, or memory.shard): use an optimiser that treats them one by one, or another layout"
            )

    def _check_norm(self, tensors: Sequence[Tensor]) -> None:
        known = {id(p.grad) for net in self.staged for p in net.parameters() if p.grad is not None}
        if any(id(each) in known for each in tensors):
            raise UsageError(
                "torch.nn.utils sees the gradients of this rank's stages alone, whose norm is not that of "
                "the net: use fivefold.clip_grad_norm_(model, max_norm), which returns the norm of all"
            )


@functools.cache
def _parts() -> _Parts:
    return _Parts()


def refuse_joint(net: nn.Module, before: Mapping[str, Tensor], *, staged: bool) -> None:
    """From now on, what looks at all parameters together is refused for those of this net.

    `before` are its parameters before ranks divided them, by name.
    """
    parts = _parts()
    parts.nets.add(net)
    if staged:
        parts.staged.add(net)
    now = dict(net.named_parameters())
    parts.replaced = {n: ref for n, ref in parts.replaced.items() if ref() is not None}
    parts.replaced |= {id(p): weakref.ref(p) for name, p in before.items() if is_dtensor(now[name])}


def _reason(module: nn.Module) -> str | None:
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None):
        return (
            "is compiled: give parallelize the plain net, and set parallel.compile = true; or compile the "
            "whole net, not a part"
        )
    if isinstance(module, torch.jit.ScriptModule):
        return "is scripted: give the plain eager net to parallelize"
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        return "is wrapped for data parallelism already: give the plain net to parallelize"
    if type(module).__name__.startswith("FSDP"):
        return "is sharded by FSDP already: give the plain net to parallelize"
    if any(is_dtensor(parameter) for parameter in module.parameters(recurse=False)):
        return (
            "has parameters that ranks divide among them already: give the plain net to parallelize"
        )
    if isinstance(module, nn.SyncBatchNorm):
        return "is SyncBatchNorm: use plain BatchNorm, which Fivefold computes over the whole batch"
    if any(p.is_meta for p in module.parameters(recurse=False)):
        return (
            "has parameters without numbers (on the meta device), as a net has that stages hold already: "
            "give parallelize a net of its own, with numbers, and each net once"
        )
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
