"""What a model calls that mixes samples or draws random numbers, answered for the global batch.

While a `ParallelModel` runs its net, a torch function mode watches the calls. Batch norm is answered with
the statistics of all ranks, dropout with masks that follow the global sample; everything else passes. The
net itself stays as it is: no module is replaced, functional calls and subclasses are covered.

Activation checkpointing calls modules again during backward, where no mode reaches; so every module is
entered through a wrapper that brings the mode along.

    net(x) ──┬─ conv2d ───────────────► torch
             ├─ batch_norm (training) ─► norms.global_batch_norm(group of the data axis)
             └─ dropout (training) ───► randomness.drop(key of seed, step, node, global sample)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fivefold.errors import UsageError, warn
from fivefold.parallel import randomness
from fivefold.parallel.norms import (
    batch_norm_names,
    global_batch_norm,
    global_instance_norm,
    laid_out,
)
from fivefold.parallel.trained import begun
from fivefold.torch_private import in_backward

__all__ = [
    "DROPOUTS",
    "Share",
    "draws_mask",
    "dropout_arguments",
    "exact",
    "is_quiet",
    "quietly",
    "warn_layout",
    "watched_modules",
]


@dataclass
class Share:
    """Which samples a rank computes in one step, and what identifies the step."""

    rows: int
    """samples of this rank; 0 means that a stand-in of one row is computed instead"""
    origin: int
    """index of its first sample in the global batch"""
    total: int
    """samples of the global batch"""
    seed: int
    step: int
    group: dist.ProcessGroup | None
    """whose batch-norm statistics are joined; None leaves each rank its own"""
    draws: bool = True
    """whether random masks are ours; not outside `step`, where nothing is there any more when backward runs
    a checkpointed part again and needs the same masks"""
    samples: Tensor | None = None
    """indices of the samples in the global batch, where they do not follow each other from `origin` on"""
    bounds: tuple[int, ...] = ()
    """the first sample of every replica, and the total"""
    masks: Mapping[int, bool | None] = field(default_factory=dict[int, bool | None])
    """of random calls by key, where it is known: whether the samples are on the leading dim of what is drawn
    (True), or nowhere in it (False); None: elsewhere"""
    known: bool = False
    """whether the net was recorded, so that it takes the same way on all ranks"""
    hooked: frozenset[str] = frozenset()
    """parameters of the net whose hooks are called at the end of the step"""
    keys: Keys = field(init=False)

    def __post_init__(self) -> None:
        self.keys = Keys(self.seed, self.step)

    def next_key(self) -> int:
        """The key of the next random call of the module that is running."""
        return (self.keys if _here.replay is None else _here.replay).draw(_here.module)


class _Here(threading.local):
    """What this thread is running."""

    module: str = ""
    replay: Replay | None = None
    noted: list[str] | None = None


_here = _Here()


def watched_modules(net: nn.Module) -> dict[str, nn.Module]:
    """The modules of a net by name: any of them may be checkpointed and run again during backward."""
    return dict(net.named_modules())


@contextmanager
def exact(watched: dict[str, nn.Module], share: Share) -> Generator[_Mode]:
    """Within the block, the watched modules see the global batch; where the mode is entered, all calls do."""
    mode = _Mode(share)
    before = {name: module.__dict__.get("forward") for name, module in watched.items()}
    for name, module in watched.items():
        module.__dict__["forward"] = _entered(name, module.forward, mode)
    try:
        yield mode
    finally:
        for name, module in watched.items():
            own = before[name]
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


def _entered(name: str, forward: Callable[..., Any], mode: _Mode) -> Callable[..., Any]:
    keys = mode.share.keys

    def enter(*args: Any, **kwargs: Any) -> Any:
        outer, inside = (_here.module, _here.replay), mode.active()
        _here.module = name
        if not inside:
            _here.replay = keys.replay(name) if in_backward() else None
        if _here.replay is None:
            keys.begin(name)
        try:
            with nullcontext() if inside else mode:
                return forward(*args, **kwargs)
        finally:
            _here.module, _here.replay = outer

    return enter


class _Mode(TorchFunctionMode):
    """Routes the calls in `_NORMS` and `_DRAWS`; warns once about random calls that it cannot make exact."""

    def __init__(self, share: Share) -> None:
        super().__init__()
        self.share = share
        self._threads = threading.local()

    def active(self) -> bool:
        """Whether this thread is inside the mode."""
        return getattr(self._threads, "depth", 0) > 0

    def __enter__(self) -> Self:
        self._threads.depth = getattr(self._threads, "depth", 0) + 1
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._threads.depth -= 1
        super().__exit__(*exc)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        answer = _NORMS.get(func) or _DRAWS.get(func)
        if not self.share.draws and answer in _MASKS:
            answer = _layout_dependent if draws_mask(func, args, kwargs) else None
        return func(*args, **kwargs) if answer is None else answer(self.share, func, args, kwargs)


def _named(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _batch_norm(share: Share, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a: dict[str, Any] = {"training": False, "momentum": 0.1, "eps": 1e-5}
    a.update(_named(batch_norm_names(func), args, kwargs))
    if not a["training"]:
        return _laid_out(func, args, kwargs)
    if share.group is None:
        return _of_own(
            share, func, args, kwargs, 'parallel.batch_norm = "replica" normalises these alone'
        )
    x = a["input"]
    held = [one for one in (x, a.get("weight"), a.get("bias")) if one is not None]
    if not share.known and torch.is_grad_enabled() and not any(one.requires_grad for one in held):
        # What goes another way on another rank may need a gradient there, which meets the others' backward.
        x = begun(x)
    return global_batch_norm(
        x, a.get("running_mean"), a.get("running_var"), a.get("weight"), a.get("bias"),
        momentum=a["momentum"], eps=a["eps"], group=share.group, counted=share.rows > 0,
    )  # fmt: skip


_INSTANCE_NORM = (
    "input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps",
)  # fmt: skip


def _instance_norm(share: Share, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a = _named(_INSTANCE_NORM, args, kwargs)
    if not a.get("use_input_stats", True) or a.get("running_mean") is None or share.group is None:
        why = "the net normalises over samples, which replicas cannot where the net cannot be recorded"
        return _of_own(share, func, args, kwargs, why)
    return global_instance_norm(a, share.rows, share.total, share.group)


def _of_own(
    share: Share, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], why: str
) -> Any:
    """A norm of this rank's own samples. What torch refuses, and may not of all samples, is told."""
    try:
        return _laid_out(func, args, kwargs)
    except ValueError as problem:
        if share.rows == share.total:
            raise
        raise UsageError(
            f"{problem}, on a rank with {share.rows} of {share.total} samples: {why}. Use larger batches, or "
            "drop the last one of an epoch"
        ) from problem


def _laid_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return laid_out(lambda x: func(x, *args[1:], **kwargs), args[0])
    others = {name: value for name, value in kwargs.items() if name != "input"}
    return laid_out(lambda x: func(x, **others), kwargs["input"])


_DROPOUT = ("input", "p", "training", "inplace")
DROPOUTS: dict[Any, tuple[int | None, Callable[..., Tensor]]] = {
    F.dropout: (None, randomness.drop),
    F.dropout1d: (2, randomness.drop),
    F.dropout2d: (2, randomness.drop),
    F.dropout3d: (2, randomness.drop),
    F.alpha_dropout: (None, randomness.alpha_drop),
    F.feature_alpha_dropout: (2, randomness.alpha_drop),
}
"""function -> (dims of the mask that follow the input's; the rest broadcast), what is done with it"""


def dropout_arguments(func: Any, args: Sequence[Any], kwargs: Any) -> dict[str, Any] | None:
    """The arguments of one of `DROPOUTS` by name; None if it draws no mask."""
    trains = func in (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
    a: dict[str, Any] = {"p": 0.5, "training": trains, "inplace": False}
    a.update(_named(_DROPOUT, tuple(args), kwargs))
    return a if a["training"] and 0.0 < float(a["p"]) <= 1.0 else None


def draws_mask(func: Any, args: Sequence[Any], kwargs: Any) -> bool:
    """Whether a call takes the next key of its module."""
    if func in DROPOUTS:
        return dropout_arguments(func, args, kwargs) is not None
    if func in {torch.rand, torch.rand_like}:
        return not any(kwargs.get(name) for name in ("generator", "out", "names", "requires_grad"))
    return func is Tensor.bernoulli_


def _dropout(share: Share, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    a = dropout_arguments(func, args, kwargs)
    if a is None:
        return func(*args, **kwargs)
    x, p = cast(Tensor, a["input"]), float(a["p"])
    dims, apply = DROPOUTS[func]
    shape = x.shape if dims is None else torch.Size([*x.shape[:dims], *(1,) * (x.dim() - dims)])
    kept = _draw(share, shape, x.device, common=isinstance(x, nn.Parameter)) >= p
    return apply(x, kept, p, bool(a["inplace"]))


def _bernoulli(share: Share, _func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`noise.bernoulli_(keep)`: how stochastic depth is written."""
    noise, keep = cast(Tensor, args[0]), kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    return noise.copy_(_draw(share, noise.shape, noise.device) < keep)


def _rand(share: Share, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.rand(...)`, `torch.rand_like(x)`: how others write stochastic depth."""
    if not draws_mask(func, args, kwargs):
        return _layout_dependent(share, func, args, kwargs)
    common = any(isinstance(one, nn.Parameter) for one in (*args, kwargs.get("input")))
    made = (torch.empty if func is torch.rand else torch.empty_like)(*args, **kwargs)
    drawn = _draw(share, made.shape, made.device, common, unless_known=func.__name__)
    return made.copy_(drawn)


def _draw(
    share: Share,
    shape: torch.Size,
    device: torch.device,
    common: bool = False,
    unless_known: str = "",
) -> Tensor:
    """Numbers in [0, 1) that follow the samples; with `common` (weights, say) the same on all ranks.

    `unless_known`: what to tell of where it is only assumed that the samples are on the leading dim, as they
    may be.
    """
    rows, key = max(share.rows, 1), share.next_key()
    divided = share.rows != share.total
    if common or not shape:
        follows: bool | None = False
    elif key in share.masks:
        follows = share.masks[key]
    else:
        follows = (shape[0] % rows == 0 and shape[0] >= rows) or None
        if divided and unless_known:
            warn_layout(unless_known)
    if follows is None and divided:
        warn_layout(f"a mask of shape {tuple(shape)}, whose leading dim is not the samples,")
    if not follows:
        return randomness.uniform(shape, 0, key, device)
    if share.samples is not None:
        whole = torch.Size((share.total, shape.numel() // rows))
        return randomness.uniform(whole, 0, key, device)[share.samples].view(shape)
    return randomness.uniform(shape, share.origin * (shape.numel() // rows), key, device)


def _layout_dependent(
    share: Share, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if share.rows != share.total:
        warn_layout(f"{getattr(func, '__name__', func)}")
    return func(*args, **kwargs)


def _attention(share: Share, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention draws its dropout inside one kernel, out of our reach."""
    position = 4 if func is F.scaled_dot_product_attention else 10
    p = kwargs.get("dropout_p", args[position] if len(args) > position else 0.0)
    drops = float(p) > 0.0 and kwargs.get("training", True)
    return (_layout_dependent if drops else _pass)(share, func, args, kwargs)


def _recurrent(share: Share, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Recurrent layers draw the dropout between them inside the kernel; it is their only float argument."""
    at = next((i for i, argument in enumerate(args) if isinstance(argument, float)), None)
    drops = at is not None and args[at] > 0.0 and args[at + 1]
    return (_layout_dependent if drops else _pass)(share, func, args, kwargs)


def _pass(_share: Share, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


@contextmanager
def quietly() -> Generator[list[str]]:
    """Within the block this thread only notes what it would tell about layouts, in the list that is given."""
    before, _here.noted = _here.noted, list[str]()
    try:
        yield _here.noted
    finally:
        _here.noted = before


def is_quiet() -> bool:
    """Whether this thread is within `quietly`."""
    return _here.noted is not None


def warn_layout(what: str) -> None:
    """Tell that `what` makes a run depend on its layout."""
    if _here.noted is not None:
        _here.noted.append(what)
        return
    attention = (
        "; dropout=0.0 for the attention (layer.self_attn.dropout of a TransformerEncoderLayer) and "
        "nn.Dropout elsewhere make it equal"
    )
    warn(
        f"{what} draws random numbers in the model that do not follow the global sample: the run is "
        "valid, but not equal to a run under another layout, as one with nn.Dropout or torch.rand is"
        + (attention if "attention" in what else ""),
    )


_Answers = dict[Any, Callable[[Share, Any, tuple[Any, ...], dict[str, Any]], Any]]
_NORMS: _Answers = {
    F.batch_norm: _batch_norm,
    torch.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
}
_MASKS = (_dropout, _bernoulli, _rand)
_DRAWS: _Answers = {
    **dict.fromkeys(DROPOUTS, _dropout),
    Tensor.bernoulli_: _bernoulli,
    **dict.fromkeys((torch.rand, torch.rand_like), _rand),
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _attention,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrent),
    **dict.fromkeys(
        (
            torch.randn, torch.randn_like, torch.randint, torch.randint_like,
            torch.randperm, torch.bernoulli, torch.normal, torch.multinomial, torch.poisson, torch.binomial,
            torch.dropout, torch.dropout_, torch.alpha_dropout, torch.feature_dropout, torch.native_dropout,
            Tensor.bernoulli, Tensor.multinomial, Tensor.normal_, Tensor.uniform_, Tensor.random_,
            Tensor.exponential_, Tensor.log_normal_, Tensor.cauchy_, Tensor.geometric_, F.gumbel_softmax,
            F.rrelu, F.fractional_max_pool2d, F.fractional_max_pool3d,
        ),
        _layout_dependent,
    ),
}  # fmt: skip


# ---- The keys of a step's random calls, in order; and the same keys again where a part of the net runs twice
#
# Activation checkpointing runs a part of the net once more during backward. It has to draw what it drew the
# first time, so a step notes where in the sequence of draws each module began:
#
#     forward    body ──► block1 ─ draw 0, draw 1 ──► block2 ─ draw 2, draw 3 ──► head ─ draw 4
#                         begins at 0                 begins at 2
#     backward   block2 runs again: draws 2, 3        block1 runs again: draws 0, 1


@dataclass
class Keys:
    """Keys that are functions of (seed, step, node, number of the node's call), as they are drawn."""

    seed: int
    step: int
    drawn: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """node and key of every draw so far"""
    _calls: Counter[str] = field(default_factory=Counter[str])
    _begins: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def begin(self, module: str) -> None:
        """Note that a module starts to run in the forward pass."""
        self._begins.setdefault(module, []).append(len(self.drawn))

    def draw(self, node: str) -> int:
        """The key of the next random call of `node` in the forward pass."""
        key = randomness.key_of(self.seed, self.step, node, self._calls[node])
        self._calls[node] += 1
        self.drawn.append((node, key))
        return key

    def replay(self, module: str) -> Replay:
        """What `module` draws when it runs again in the backward pass."""
        return Replay(self, module, self._begins.get(module, []))


class Replay:
    """The draws of a checkpointed module that runs again."""

    def __init__(self, keys: Keys, module: str, begins: list[int]) -> None:
        self._keys, self._module, self._begins = keys, module, begins
        self._position = begins[0] if begins else 0

    def draw(self, node: str) -> int:
        """The key that the same call drew in the forward pass.

        Raises `UsageError` if that cannot be told: the module ran several times, or runs otherwise now.
        """
        drawn, position = self._keys.drawn, self._position
        known = position < len(drawn) and drawn[position][0] == node
        if len(self._begins) != 1 or not known:
            raise UsageError(
                f"the module {self._module!r} is checkpointed, draws random numbers, and ran "
                f"{len(self._begins)} times in the forward pass: which of its masks to draw again cannot be "
                "told. Checkpoint a module that runs once and contains the repetition, or give each "
                "repetition a module of its own"
            )
        self._position += 1
        return drawn[position][1]
