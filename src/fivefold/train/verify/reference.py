"""One process that trains the unmodified model on the whole batch: what every layout has to equal.

Plain forward, plain loss, plain backward, plain SGD with momentum; nothing of `fivefold.parallel` takes part,
with one exception. Random masks are a function of (seed, step, node, global sample) under every layout,
`data=1` included. A net that draws random numbers is therefore run with those masks instead of torch's.
Whether it draws any is not guessed from its modules but seen from the generators.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from fivefold.errors import UsageError
from fivefold.parallel.intercept import Share, exact, watched_modules
from fivefold.parallel.sharded import placed, whole
from fivefold.parallel.trees import call_with, leaves, map_tensors, rows_of
from fivefold.train.verify.measure import Snapshot

__all__ = [
    "OneProcess",
    "State",
    "cast_net",
    "cast_tree",
    "default_dtype",
    "seeded",
    "sgd",
    "snapshot",
]


@dataclass(frozen=True)
class State:
    """Where a step starts: names to tensors. The momentum of every trainable parameter is there, zeros
    before the first step, which torch's SGD treats as it treats none.
    """

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    momentum: Mapping[str, Tensor]

    @classmethod
    def of(cls, net: nn.Module, optimizer: torch.optim.SGD, dtype: torch.dtype) -> State:
        """A copy of what `net` and `optimizer` hold now; floating-point numbers are rounded to `dtype`."""

        def kept(value: Tensor) -> Tensor:
            return cast_tree(value.detach(), dtype).clone()

        trained = {n: p for n, p in net.named_parameters() if p.requires_grad}
        held = {n: optimizer.state[p].get("momentum_buffer") for n, p in trained.items()}
        return cls(
            {name: kept(p) for name, p in net.named_parameters()},
            {name: kept(b) for name, b in net.named_buffers()},
            {
                n: torch.zeros_like(kept(trained[n])) if m is None else kept(m)
                for n, m in held.items()
            },
        )

    @torch.no_grad()
    def load(self, net: nn.Module, optimizer: torch.optim.SGD) -> None:
        """Put `net` and `optimizer` back to this state, without gradients."""
        optimizer.zero_grad(set_to_none=True)
        for name, parameter in net.named_parameters():
            parameter.copy_(placed(self.weights[name], parameter))
            if name in self.momentum:
                momentum = self.momentum[name].to(parameter.device, parameter.dtype, copy=True)
                optimizer.state[parameter]["momentum_buffer"] = placed(momentum, parameter)
        for name, buffer in net.named_buffers():
            if name in self.buffers:  # else the net has made it in its first forward
                buffer.copy_(self.buffers[name])


class OneProcess:
    """The reference: a copy of `net` in `dtype`, with a plain loss and a plain optimiser.

    `draws` tells, once a step has run, whether the net draws random numbers; `uncontrolled`, whether it
    draws some that do not follow the global sample.
    """

    def __init__(
        self, net: nn.Module, loss: Callable[..., Any], dtype: torch.dtype, seed: int
    ) -> None:
        self.net = cast_net(copy.deepcopy(net), dtype).train()
        self.optimizer = sgd(self.net)
        self.draws = self.uncontrolled = False
        self.micro_batches: Callable[[int], list[Tensor]] | None = None
        """from the number of samples to the indices of each micro-batch; None: all at once"""
        self._loss = copy.deepcopy(loss).to(dtype) if isinstance(loss, nn.Module) else loss
        self.dtype, self._seed = dtype, seed

    def step(self, state: State, inputs: Any, targets: Any, number: int) -> Snapshot:
        """Train one step, the `number`-th, on the whole batch, starting from `state`."""
        inputs, targets = cast_tree(inputs, self.dtype), cast_tree(targets, self.dtype)
        with default_dtype(self.dtype):
            found, drew = self._attempt(state, inputs, targets, number)
            if drew and not self.draws:
                self.draws = True
                found, drew = self._attempt(state, inputs, targets, number)
        self.uncontrolled |= drew
        return found

    def _attempt(
        self, state: State, inputs: Any, targets: Any, number: int
    ) -> tuple[Snapshot, bool]:
        state.load(self.net, self.optimizer)
        inputs = map_tensors(torch.clone, inputs)  # a net may change them in place
        device = leaves(inputs)[0].device
        with seeded(self._seed, device), ExitStack() as until_backward:
            before = _generators(device)
            outputs = self._outputs(inputs, number, until_backward)
            drew = before != _generators(device)
            loss = self._loss(outputs, targets)
            loss.backward()
        self.optimizer.step()
        return snapshot(self.net, loss, outputs), drew

    def _outputs(self, inputs: Any, number: int, until_backward: ExitStack) -> Any:
        """What the net returns for all samples, micro-batch by micro-batch."""
        rows, device = rows_of(inputs, "inputs"), leaves(inputs)[0].device
        if self.micro_batches is None:
            # What is checkpointed runs again in backward, with the same masks.
            share = Share(rows, 0, rows, self._seed, number, group=None)
            mode = until_backward.enter_context(self._masks(share))
            return self._run(inputs, mode)
        parts = [part.to(device) for part in self.micro_batches(rows)]
        made: list[Any] = []
        for part in parts:
            share = Share(len(part), 0, rows, self._seed, number, group=None, samples=part)
            with self._masks(share) as mode:
                made.append(self._run(map_tensors(itemgetter(part), inputs), mode))
        order = torch.cat(parts).argsort()
        return tree_map(lambda *each: _in_order(each, parts, order), *made)

    def _masks(self, share: Share) -> AbstractContextManager[Any]:
        return exact(watched_modules(self.net), share) if self.draws else nullcontext()

    def _run(self, inputs: Any, mode: Any) -> Any:
        with mode or nullcontext():
            return call_with(self.net, inputs)


def _in_order(each: tuple[Any, ...], parts: list[Tensor], order: Tensor) -> Any:
    """One output of all micro-batches, samples in the order of the batch."""
    if not isinstance(each[0], Tensor):
        return each[0]
    for leaf, part in zip(each, parts, strict=True):
        if not leaf.dim() or len(leaf) != len(part):
            raise UsageError(
                f"an output of shape {tuple(leaf.shape)} does not have the {len(part)} samples of a "
                "micro-batch on its leading dim, so it cannot be compared"
            )
    return torch.cat(each)[order]


def snapshot(net: nn.Module, loss: Tensor, outputs: Any) -> Snapshot:
    """Copies of what a step has left in `net`, with its loss and outputs."""
    found = leaves(outputs)
    names = ["output"] if len(found) == 1 else [f"output {i}" for i in range(len(found))]
    return Snapshot(
        loss={"loss": loss.detach().clone()},
        outputs={n: leaf.detach().clone() for n, leaf in zip(names, found, strict=True)},
        gradients={
            n: None if p.grad is None else whole(p.grad).clone() for n, p in net.named_parameters()
        },
        buffers={n: b.detach().clone() for n, b in net.named_buffers()},
        weights={n: whole(p.detach()).clone() for n, p in net.named_parameters()},
    )


def sgd(net: nn.Module) -> torch.optim.SGD:
    """The optimiser of both sides. Momentum and decay move a weight whose gradient is zero, but not one
    whose gradient is missing, so that the updated weights tell these apart.
    """
    trained = [p for p in net.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.01, momentum=0.9, weight_decay=5e-4)


def cast_net(net: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same net with its numbers in `dtype`, complex ones in the complex type of that precision."""
    matching = torch.complex128 if dtype == torch.float64 else torch.complex64
    tensors = (*net.parameters(), *net.buffers())
    if not any(tensor.is_complex() for tensor in tensors):
        return net.to(dtype)
    for tensor in tensors:  # Module.to(dtype) would drop the imaginary parts
        wanted = matching if tensor.is_complex() else dtype
        if tensor.is_complex() or tensor.is_floating_point():
            tensor.data = tensor.data.to(wanted)
    return net


def cast_tree(tree: Any, dtype: torch.dtype) -> Any:
    """The same tree with its floating-point tensors in `dtype`."""
    return map_tensors(lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf, tree)


@contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None]:
    """Within the block all global generators start from `seed`; afterwards they go on where they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def _generators(device: torch.device) -> tuple[object, ...]:
    """The state of all global generators, to be compared."""
    _, keys, position, *_ = np.random.get_state()  # noqa: NPY002
    torchs = [torch.get_rng_state()]
    if device.type == "cuda":
        torchs.append(torch.cuda.get_rng_state(device))
    return (
        *(state.numpy().tobytes() for state in torchs),
        np.asarray(keys).tobytes(), position, random.getstate(),
    )  # fmt: skip


@contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """A net that makes tensors of its own, `torch.zeros(n)`, makes them in the dtype it is run in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
