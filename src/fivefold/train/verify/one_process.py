"""One process that trains an unmodified net: a program that shares no code with what is verified.

    python .../one_process.py      one request per line of JSON on standard input, one answer per line

It imports torch, numpy and the standard library, never Fivefold. It builds the net itself, from the same seed
as the other side, so hooks, closures and caches are real ones; nothing is copied. A request says

    path       folders to import from                      seed      of torch, numpy and random
    net        how to build it                             dtype     "float64" or "float32"
    loss       how to build it; with_net: from the net     optimizer lr, momentum, weight_decay of SGD
    batch      how to make batch number i, or a file       state     what else of a net is of interest
    event      what is called with an event                steps     see below
    masks      seed of random masks; null: torch's own     evaluate  numbers of batches to run in eval mode
    nudged     whether to do everything once more, with every number moved to the neighbouring one, or by
               such a part of itself
    answer     file for the results                        apart     whether a process of its own answers
    device     where the net computes, "cpu" by default     threads   of torch, 1 by default
    round      dtype that the state is rounded to before every step, or null
    states     file with the states that the steps start from, as an answer has them, or null: from where the
               one before ended. The state of a step is `weights`, `buffers` and `momentum` by name
    moved      seed by which every number of the inputs is moved to a neighbouring one, or null

`net`, `loss`, `batch`, `state` and `event` are {module, function, arguments}. A step is

    events         called in order before it               batch     number of its batch
    zero, update   whether gradients are cleared before,   evaluate  number of a batch that is run in eval
                   and the optimiser steps after it                  mode before it, or null
    micro_batches  lists of samples, or null for all at once
    clip           the most that the norm of the net's gradients may be, or null

Micro-batches run forward in order, their outputs are put back in the order of the batch, and there is one
loss and one backward: batch norm sees a micro-batch at a time, a hook of a parameter the whole gradient once.

The answer is {"error": null}, or {"error": text, "kind": name of the exception, "where": when, "trace": ...}.
The file holds {"steps": [record], "evaluated": [outputs], "nudged": null or the same again}. A record has
`loss`, `outputs`, `gradients`, `buffers`, `weights` by name, and `state`; what has no gradient has None. It
also has `before`, the state that the step started from, and says whether the net `draws` random numbers, and
whether some of them are `uncontrolled`: no masks.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import json
import math
import os
import random
import struct
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Masks", "OneProcess", "answered", "cast_net", "flat", "main", "neighbour", "uniform"]

_ALPHA_DROPPED = -1.7580993408473766  # -1.0507... x 1.6732..., what SELU saturates to
_DROPOUTS = {
    "dropout": (True, None, False), "dropout1d": (True, 2, False), "dropout2d": (True, 2, False),
    "dropout3d": (True, 2, False), "alpha_dropout": (False, None, True),
    "feature_alpha_dropout": (False, 2, True),
}  # fmt: skip
"""functions of torch's -> whether they train by default, dims of the mask (the rest broadcast), alpha"""
_RAND = torch.rand
_NOT_DRAWN = ("generator", "out", "names", "requires_grad")
"""with these, `torch.rand` draws from torch's generator"""


def uniform(index: np.ndarray[Any, Any], seed: int, step: int, module: str, call: int) -> Tensor:
    """Numbers in [0, 1), float32, for elements `index` of what a module's `call`-th random call draws."""
    text = struct.pack("<qqq", seed, step, call) + module.encode()
    digest = hashlib.blake2b(text, digest_size=8).digest()
    key = int.from_bytes(digest, "little") % 2**63
    z = index.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return torch.from_numpy((z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24))


class Masks:
    """Random masks as documented: a function of seed, step, module, its call, global sample and element.

    torch's dropout functions, `Tensor.bernoulli_`, `torch.rand` and `torch.rand_like` are replaced while
    it is entered. Which module calls is read from the stack. What is checkpointed runs again in backward,
    with the state that torch's generator had before: so the state at each draw tells which draw it is.
    """

    def __init__(self, net: nn.Module, seed: int, step: int) -> None:
        self._names = {id(module): name for name, module in net.named_modules()}
        self._seed, self._step = seed, step
        self._calls: Counter[str] = Counter()
        self._drawn: dict[bytes, tuple[str, int, np.ndarray[Any, Any]]] = {}
        self._samples = np.zeros(0, dtype=np.int64)
        self.count = 0
        """how often torch's generator was moved on"""

    def begin(self, samples: Sequence[int]) -> None:
        """A forward of some samples of the batch begins; calls are counted anew."""
        self._samples = np.asarray(samples, dtype=np.int64)
        self._calls.clear()

    def _module(self) -> str:
        frame = sys._getframe(1)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        while frame is not None:
            if frame.f_code.co_name == "forward":
                name = self._names.get(id(frame.f_locals.get("self")))
                if name is not None:
                    return name
            frame = frame.f_back
        return ""

    def _draw(self, shape: Sequence[int], common: bool) -> Tensor:
        state = torch.get_rng_state().numpy().tobytes()
        _RAND(1)  # so that the next draw finds another state
        self.count += 1
        again = torch._C._current_graph_task_id() != -1  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        if not again or state not in self._drawn:
            module = self._module()
            self._drawn[state] = module, self._calls[module], self._samples
            self._calls[module] += 1
        module, call, samples = self._drawn[state]
        rows, count = len(samples), math.prod(shape)
        index = np.arange(count, dtype=np.int64)
        if not common and shape and shape[0] % rows == 0 and shape[0] >= rows:
            each = count // rows
            index = (samples[:, None] * each + np.arange(each)[None]).reshape(-1)
        return uniform(index, self._seed, self._step, module, call).view(tuple(shape))

    def _dropped(self, x: Tensor, p: float, inplace: bool, dims: int | None, alpha: bool) -> Tensor:
        shape = [*x.shape] if dims is None else [*x.shape[:dims], *[1] * (x.dim() - dims)]
        kept = (self._draw(shape, isinstance(x, nn.Parameter)) >= p).to(x.device, x.dtype)
        factor, shift = kept / (1.0 - p) if p < 1.0 else kept * 0.0, None
        if alpha and p < 1.0:
            a = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * _ALPHA_DROPPED**2))
            factor, shift = kept * a, (1.0 - kept - p) * (a * _ALPHA_DROPPED)
        made = x.mul_(factor) if inplace else x * factor
        return made if shift is None else made.add_(shift) if inplace else made + shift

    def _dropout(
        self, plain: Callable[..., Tensor], default: bool, dims: int | None, alpha: bool
    ) -> Callable[..., Tensor]:
        def dropout(
            input: Tensor,  # noqa: A002 - torch's name
            p: float = 0.5,
            training: bool = default,
            inplace: bool = False,
        ) -> Tensor:
            if not training or not 0.0 < p <= 1.0:
                return plain(input, p, training, inplace)
            return self._dropped(input, float(p), inplace, dims, alpha)

        return dropout

    @contextmanager
    def entered(self) -> Generator[None]:
        """Within the block, masks are these."""

        def bernoulli(noise: Tensor, p: Any = 0.5, **_: Any) -> Tensor:
            chance = p.cpu() if isinstance(p, Tensor) else p
            return noise.copy_(self._draw(noise.shape, common=False) < chance)

        def rand(plain: Callable[..., Tensor], empty: Callable[..., Tensor]) -> Callable[..., Any]:
            def drawn(*args: Any, **options: Any) -> Tensor:
                if any(options.get(name) for name in _NOT_DRAWN):
                    return plain(*args, **options)
                made = empty(*args, **options)
                common = any(isinstance(one, nn.Parameter) for one in (*args, options.get("input")))
                return made.copy_(self._draw(made.shape, common))

            return drawn

        functions: list[tuple[Any, str, Any]] = [
            (F, name, self._dropout(getattr(F, name), default, dims, alpha))
            for name, (default, dims, alpha) in _DROPOUTS.items()
        ]
        functions += [
            (Tensor, "bernoulli_", bernoulli),
            (torch, "rand", rand(_RAND, torch.empty)),
            (torch, "rand_like", rand(torch.rand_like, torch.empty_like)),
        ]
        before = [getattr(place, name) for place, name, _ in functions]
        for place, name, function in functions:
            setattr(place, name, function)
        try:
            yield
        finally:
            for (place, name, _), function in zip(functions, before, strict=True):
                setattr(place, name, function)


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested tuples, lists, dicts and dataclasses by their paths; None is a leaf."""
    if isinstance(tree, Mapping):
        pairs = list(tree.items())
    elif dataclasses.is_dataclass(tree):
        pairs = [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    elif isinstance(tree, list | tuple):
        names: Sequence[Any] = getattr(tree, "_fields", range(len(tree)))
        pairs = list(zip(names, tree, strict=True))
    else:
        return {path: tree}
    found: dict[str, Any] = {}
    for name, value in pairs:
        found.update(flat(value, f"{path}.{name}" if path else str(name)))
    return found


def _mapped(function: Callable[..., Any], *trees: Any) -> Any:
    """A tree like the first one, its leaves made from those of all."""
    first = trees[0]
    if isinstance(first, Mapping):
        return {k: _mapped(function, *(t[k] for t in trees)) for k in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        made = {n: _mapped(function, *(getattr(t, n) for t in trees)) for n in names}
        return dataclasses.replace(first, **made)
    if isinstance(first, list | tuple):
        made = [_mapped(function, *each) for each in zip(*trees, strict=True)]
        return type(first)(*made) if hasattr(first, "_fields") else type(first)(made)
    return function(*trees)


def _called(what: Mapping[str, Any] | Callable[..., Any], *more: Any) -> Any:
    if not isinstance(what, Mapping):  # of a caller in this process
        return what(*more)
    function = getattr(importlib.import_module(what["module"]), what["function"])
    return function(*what.get("arguments", ()), *more)


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


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def _generators(device: torch.device) -> list[bytes]:
    """The states of all global generators, torch's first."""
    _, keys, position, *_ = np.random.get_state()  # noqa: NPY002
    told = [torch.get_rng_state().numpy().tobytes(), np.asarray(keys).tobytes()]
    told.append(repr((position, random.getstate())).encode())
    if device.type == "cuda":
        told.append(torch.cuda.get_rng_state(device).numpy().tobytes())
    return told


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _moved(leaf: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """A copy of a leaf, which a net may change; floating-point numbers in `dtype`, if there is one."""
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.to(device, dtype if dtype and leaf.is_floating_point() else leaf.dtype, copy=True)


def neighbour(leaf: Any, generator: torch.Generator, part: float = 0.0) -> Any:
    """A leaf whose floating-point numbers are each moved to a neighbouring one, up or down at random.

    With `part` they are moved by so much of themselves instead.
    """
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    up = torch.rand(leaf.shape, generator=generator, dtype=torch.float32) < 0.5
    if part:
        return leaf * torch.where(up, 1.0 + part, 1.0 - part).to(leaf)
    return torch.nextafter(leaf, torch.where(up, math.inf, -math.inf).to(leaf))


def _moved_weights(weights: Tensor, generator: torch.Generator, part: float) -> Tensor:
    """Neighbouring weights; those of exactly zero stay.

    A norm whose weight starts at zero leaves ReLUs exactly on their kink. The neighbour of zero opens them.
    """
    return torch.where(weights == 0, weights, neighbour(weights, generator, part))


class OneProcess:
    """A net as a request describes it, trained from its first step to its last.

    Whatever the user's code raises passes through; `where` tells what was going on.
    """

    def __init__(self, told: Mapping[str, Any], nudged: bool | float = False) -> None:
        self.where = "building the net"
        self._part = 0.0 if isinstance(nudged, bool) else nudged
        self._seeded: list[bytes] = []
        self._draws = self._uncontrolled = False
        _seed(told["seed"])
        self._told = told
        self._generator = torch.Generator().manual_seed(told["seed"]) if nudged else None
        self._device = torch.device(told.get("device", "cpu"))
        self.net: nn.Module = _called(told["net"])
        if self._device.type != "cpu":
            self.net.to(self._device)
        self._dtype = getattr(torch, told.get("cast", ""), None)
        if self._dtype is not None:
            cast_net(self.net, self._dtype)
        self.where = "building the loss"
        given = (
            [self.net] if isinstance(told["loss"], Mapping) and told["loss"].get("with_net") else []
        )
        self.loss: Callable[..., Any] = _called(told["loss"], *given)
        if isinstance(self.loss, nn.Module) and (self._dtype or self._device.type != "cpu"):
            self.loss.to(self._device, self._dtype)
        self._own = dict(self.loss.named_parameters()) if isinstance(self.loss, nn.Module) else {}
        if self._generator is not None:
            for parameter in self.net.parameters():
                parameter.data.copy_(_moved_weights(parameter.data, self._generator, self._part))
        self.optimizer = torch.optim.SGD(
            [*self.net.parameters(), *self._own.values()], **told["optimizer"]
        )
        self._states: list[Any] | None = told.get("states")
        if isinstance(self._states, str):
            self._states = torch.load(self._states, weights_only=True)
        self._files: list[Any] = []
        if isinstance(told["batch"], Mapping) and "file" in told["batch"]:
            self._files = torch.load(told["batch"]["file"], weights_only=True)

    def results(self) -> dict[str, Any]:
        """Records of all steps, and outputs in eval mode after them."""
        self.net.train()
        steps = [self._step(number, step) for number, step in enumerate(self._told["steps"])]
        self.where = "evaluation"
        return {"steps": steps, "evaluated": [self._evaluate(i) for i in self._told["evaluate"]]}

    def _step(self, number: int, step: Mapping[str, Any]) -> dict[str, Any]:
        self.where = f"step {number}"
        before = self._begin(number)
        if step.get("evaluate") is not None:
            self._evaluate(step["evaluate"])
        for event in step.get("events", ()):
            _called(self._told["event"], self.net, self.loss, event)
        if step.get("zero", True):
            self.optimizer.zero_grad()
        inputs, targets = self._batch(step["batch"])
        _seed(self._told["seed"] + 1 + number)
        self._seeded = _generators(self._device)
        seed = self._told.get("masks")
        masks = None if seed is None else Masks(self.net, seed, number)
        outputs, loss = self._trained(inputs, targets, step.get("micro_batches"), masks)
        gradients = {name: _copy(p.grad) for name, p in self._parameters().items()}
        if step.get("clip"):
            nn.utils.clip_grad_norm_(self.net.parameters(), step["clip"])
        if step.get("update", True):
            self.optimizer.step()
        state = self._told.get("state")
        return {
            "loss": _copy(loss),
            "outputs": outputs,
            "gradients": gradients,
            "buffers": {name: _copy(buffer) for name, buffer in self.net.named_buffers()},
            "weights": {name: _copy(p) for name, p in self._parameters().items()},
            "state": None if state is None else _called(state, self.net, self.loss),
            "before": before,
            "draws": self._draws,
            "uncontrolled": self._uncontrolled,
        }

    @torch.no_grad()
    def _begin(self, number: int) -> dict[str, Any]:
        """The state that a step starts from, where a request asks for one."""
        if self._states is not None:
            self._load(self._states[number])
        rounded = self._told.get("round")
        if rounded is not None:
            to = functools.partial(_moved, device=self._device, dtype=getattr(torch, rounded))
            self._load(_mapped(to, self._state()))
        return self._state() if "cast" in self._told else {}

    def _state(self) -> dict[str, Any]:
        trained = {n: p for n, p in self._parameters().items() if p.requires_grad}
        held = {n: self.optimizer.state[p].get("momentum_buffer") for n, p in trained.items()}
        return {
            "weights": {n: _copy(p) for n, p in self._parameters().items()},
            "buffers": {n: _copy(b) for n, b in self.net.named_buffers()},
            # Before the first step zeros, which torch's SGD treats as it treats none.
            "momentum": {
                n: torch.zeros_like(trained[n]) if m is None else _copy(m) for n, m in held.items()
            },
        }

    def _load(self, state: Mapping[str, Any]) -> None:
        for name, parameter in self._parameters().items():
            parameter.data.copy_(state["weights"][name])
            if name in state["momentum"]:
                momentum = state["momentum"][name].to(parameter.device, parameter.dtype, copy=True)
                self.optimizer.state[parameter]["momentum_buffer"] = momentum
        for name, buffer in self.net.named_buffers():
            if name in state["buffers"]:  # else the net has made it in its first forward
                buffer.copy_(state["buffers"][name])

    def _note_draws(self, masks: Masks | None) -> None:
        """What the forward of a step has done to generators, beside moving on torch's for every mask."""
        count, now = 0 if masks is None else masks.count, _generators(self._device)
        state = torch.get_rng_state()
        torch.set_rng_state(torch.frombuffer(bytearray(self._seeded[0]), dtype=torch.uint8))
        for _ in range(count):
            _RAND(1)
        expected = [torch.get_rng_state().numpy().tobytes(), *self._seeded[1:]]
        torch.set_rng_state(state)
        self._uncontrolled = now != expected
        self._draws = count > 0 or self._uncontrolled

    def _parameters(self) -> dict[str, Tensor]:
        of_loss = {f"loss:{name}": parameter for name, parameter in self._own.items()}
        return {**dict(self.net.named_parameters()), **of_loss}

    def _batch(self, number: int) -> tuple[Any, Any]:
        if self._files:
            inputs, targets = self._files[number]
        else:
            inputs, targets = _called(self._told["batch"], number)
        generator = self._generator
        if self._told.get("moved") is not None:
            generator = torch.Generator().manual_seed(self._told["moved"] + number)
        if generator is not None:
            inputs = _mapped(
                functools.partial(neighbour, generator=generator, part=self._part), inputs
            )
        if self._dtype is None and self._device.type == "cpu":
            return inputs, targets
        move = functools.partial(_moved, device=self._device, dtype=self._dtype)
        return _mapped(move, inputs), _mapped(move, targets)

    def _call(self, inputs: Any) -> Any:
        if isinstance(inputs, dict):
            return self.net(**inputs)
        return self.net(*inputs) if isinstance(inputs, tuple) else self.net(inputs)

    def _trained(
        self, inputs: Any, targets: Any, micro_batches: Any, masks: Masks | None
    ) -> tuple[dict[str, Any], Tensor]:
        rows = next(leaf.shape[0] for leaf in flat(inputs).values() if isinstance(leaf, Tensor))
        entered = nullcontext if masks is None else masks.entered
        made: list[Any] = []
        with entered():
            for samples in micro_batches or [list(range(rows))]:
                if masks is not None:
                    masks.begin(samples)
                take = functools.partial(_some, samples=samples, rows=rows)
                made.append(self._call(inputs if micro_batches is None else _mapped(take, inputs)))
        self._note_draws(masks)
        joined = _Joined(micro_batches or ())
        outputs = made[0] if len(made) == 1 else _mapped(joined, *made)
        told = {path: _copy(leaf) for path, leaf in flat(outputs).items()}
        loss = self.loss(outputs, targets)
        once = nullcontext() if len(made) == 1 else _hooks_once(self._parameters().values())
        with entered(), _LaidOut(), once:  # what is checkpointed runs again
            loss.backward()
        return told, loss

    @torch.no_grad()
    def _evaluate(self, number: int) -> dict[str, Any]:
        self.net.eval()
        _seed(self._told["seed"])
        outputs = self._call(self._batch(number)[0])
        self.net.train()
        return {path: _copy(leaf) for path, leaf in flat(outputs).items()}


@contextmanager
def _hooks_once(parameters: Iterable[Tensor]) -> Generator[None]:
    """Raise `ValueError` if a hook sees parts of a gradient, as reentrant checkpoints go backward apart."""
    kinds, called = ("_backward_hooks", "_post_accumulate_grad_hooks"), list[Tensor]()
    hooked = [p for p in parameters if any(getattr(p, kind, None) for kind in kinds)]
    ours = [p.register_post_accumulate_grad_hook(called.append) for p in hooked]
    yield
    for hook in ours:
        hook.remove()
    if len(called) > len(set(map(id, called))):
        raise ValueError("with use_reentrant=True, hooks of parameters see a micro-batch at a time")


class _LaidOut(TorchDispatchMode):
    """Gives the backward of batch and instance norm contiguous tensors.

    Where a dim has one element, torch's kernel for CPUs may take memory in one order for another.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_batch_norm_backward.default:
            args = tuple(a.contiguous() if isinstance(a, Tensor) else a for a in args)
        return func(*args, **(kwargs or {}))


def _some(leaf: Any, samples: list[int], rows: int) -> Any:
    """Some samples of an input; what is no tensor of `rows` samples is the same for all."""
    by_sample = isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == rows
    return leaf[samples] if by_sample else leaf


class _Joined:
    """Puts the outputs of micro-batches back in the order of the batch."""

    def __init__(self, micro_batches: Sequence[Sequence[int]]) -> None:
        self._counts = [len(samples) for samples in micro_batches]
        self._order = torch.tensor([i for samples in micro_batches for i in samples]).argsort()

    def __call__(self, *each: Any) -> Any:
        """One output, from what each micro-batch has. Raises `ValueError` if they cannot be put together."""
        if not isinstance(each[0], Tensor):
            if any(leaf != each[0] for leaf in each):
                raise ValueError(f"micro-batches return different values: {each}")
            return each[0]
        for leaf, count in zip(each, self._counts, strict=True):
            if not leaf.dim() or leaf.shape[0] != count:
                shape = tuple(leaf.shape)
                raise ValueError(f"an output of {shape} lacks the {count} samples of a micro-batch")
        return torch.cat(each)[self._order]


def answered(told: Mapping[str, Any]) -> dict[str, Any]:
    """What a request asks for, or what went wrong."""
    run: OneProcess | None = None
    try:
        sys.path[:0] = [folder for folder in told.get("path", ()) if folder not in sys.path]
        torch.set_default_dtype(getattr(torch, told.get("dtype", "float64")))
        torch.set_num_threads(told.get("threads", 1))
        run = OneProcess(told)
        found: dict[str, Any] = {**run.results(), "nudged": None}
        if told.get("nudged"):
            run = OneProcess(told, nudged=told["nudged"])
            found["nudged"] = run.results()
        torch.save(found, told["answer"])
    except Exception as problem:  # noqa: BLE001 - the user's code may raise anything
        return {
            "error": str(problem),
            "kind": type(problem).__name__,
            "where": "the request" if run is None else run.where,
            "trace": traceback.format_exc(),
        }
    return {"error": None}


def main() -> None:
    """Answer requests until standard input ends. What a net prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.path.pop(0)  # our own folder, whose names are not for others
    for line in sys.stdin:
        request = json.loads(line)
        answers.write((_apart if request.get("apart") else _said)(request) + "\n")
        answers.flush()


def _said(request: dict[str, Any]) -> str:
    return json.dumps(answered(request))


def _apart(request: dict[str, Any]) -> str:
    """What a process of its own says, which begins with torch and nothing else. If it dies, so do we."""
    here, there = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which only wait for work
        child = os.fork()
    if not child:
        try:
            with os.fdopen(there, "w") as pipe:
                pipe.write(_said(request))
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(there)
    with os.fdopen(here) as pipe:
        said = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not said:
        sys.exit(code if code >= 0 else 128 - code)
    return said


if __name__ == "__main__":
    main()
