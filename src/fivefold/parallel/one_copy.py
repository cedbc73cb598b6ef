"""One copy of the weights and of the optimiser's state for all ranks that share a device.

Between steps every rank sees the same memory. What it writes there itself, outside of an optimiser's step,
it alone sees (`comm.SharedCopies`), as if the weights were its own; they share it when they meet next.

    meet      share what scripts have changed meanwhile: all have to have written the same
    step      every tensor is updated once, by its owner, in the memory of all: the optimiser finds
              nothing but the tensors of its rank, and is called as ever
    settle    what the optimiser has come to keep is put where all see it

So an optimiser that is not one of `_BY_TENSOR`, which treat tensors one by one, and any other way to train
compute what they would without: each rank then writes to copies of its own.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fivefold import comm
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import pieces
from fivefold.parallel.pieces import Piece
from fivefold.torch_private import is_aliased, step_hooks
from fivefold.trace import Tag

__all__ = ["OneCopy", "one_copy"]

_log = logging.getLogger(__name__)

_BY_TENSOR = (
    "ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam",
    "RMSprop", "Rprop", "SGD",
)  # fmt: skip
"""optimisers of torch whose update of a tensor needs nothing of others; Muon came with torch 2.9"""
_CALL_BYTES = 64 << 10
"""of a tensor take as long to be updated as what an optimiser does once for each"""
_LEAST_BYTES = 16 << 20
"""of parameters, from where on they are shared unless the plan says otherwise: below, meetings take about as
long as what is saved of an update, see benchmarks/share
"""
_REMEDY = 'set instances.weights = "own"'


def one_copy(model: nn.Module, mesh: Mesh) -> OneCopy | None:
    """One copy of a parallel model's parameters for the ranks of each device, if the plan has several there.

    Collective. Raises `UsageError` if the plan asks for it where it cannot be.
    """
    instances = mesh.plan.instances
    alone = instances.per_device == 1 or mesh.size == 1 or mesh.predicts
    if alone or instances.weights == "own" or mesh.plan.memory.shard != "none":
        return None
    named = [(name, p) for name, p in model.named_parameters() if p.numel()]
    if any(not p.is_cpu for _, p in named):
        return _unshared(instances.weights, "only memory of the host is shared")
    told = [(name, str(p.dtype), [*p.shape], [*p.stride()]) for name, p in named]
    group = mesh.neighbours(zlib.crc32(json.dumps(told).encode()))
    if group.size() == 1 or not named:
        return None
    if not comm.shares_memory(group):
        return _unshared(instances.weights, "the ranks of a device do not share memory")
    apart = torch.tensor([not is_aliased(p) and type(p.data) is Tensor for _, p in named])
    of_all = comm.all_gather(apart, group, Tag.CONTROL).all(0).tolist()
    movable = [one for one, may in zip(named, of_all, strict=True) if may]
    enough = sum(p.nbytes for _, p in movable) >= _LEAST_BYTES
    if not movable or (instances.weights == "auto" and not enough):
        return None
    if len(movable) < len(named) and mesh.rank == 0:
        left = next(name for (name, _), may in zip(named, of_all, strict=True) if not may)
        _log.warning(
            "%d of %d parameters, such as %r, stay each instance's own: other tensors lie in their memory",
            len(named) - len(movable), len(named), left,
        )  # fmt: skip
    return OneCopy(model, movable, group)


def _unshared(asked: str, why: str) -> None:
    if asked == "shared":
        raise UsageError(f'instances.weights = "shared": {why}; {_REMEDY}')


@dataclass(frozen=True)
class _Kept:
    """A tensor that an optimiser keeps, as this rank sees it and as all do."""

    own: Tensor
    shared: Tensor
    copies: comm.SharedCopies


@dataclass(frozen=True)
class _Part:
    """Who updates what of an optimiser: numbers of parameters."""

    signs: list[tuple[int, bool]]
    """which parameters it had when that was decided, and whether they were trained"""
    mine: list[int]
    others: list[int]
    divided: dict[int, Piece]
    """of which each rank updates a piece"""


class OneCopy:
    """Some parameters that the ranks of a group hold once. Making it is collective."""

    def __init__(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup,
    ) -> None:
        self._model = weakref.ref(model)
        self._group = group
        self._parameters = [parameter for _, parameter in named]
        self._weights = comm.SharedCopies([p.detach() for p in self._parameters], group)
        for parameter, own in zip(self._parameters, self._weights.own, strict=True):
            parameter.data = own
        self._numbers = {id(parameter): n for n, parameter in enumerate(self._parameters)}
        """of the parameters that still lie in the memory of all"""
        self._owners: dict[int, int] = {}
        self._wholes: dict[int, dict[str, Any]] = {}
        self._stepped: dict[int, dict[str, Any]] = {}
        """what an optimiser has kept for pieces in the step under way"""
        self._owned_bytes = [0] * group.size()
        self._kept: weakref.WeakKeyDictionary[Optimizer, dict[int, dict[str, _Kept]]] = (
            weakref.WeakKeyDictionary()
        )
        """by optimiser, number of a parameter and key"""
        self._parts: weakref.WeakKeyDictionary[Optimizer, _Part] = weakref.WeakKeyDictionary()
        _live.append(weakref.ref(self))
        _install()

    def has_some(self, optimizer: Optimizer) -> bool:
        """Whether an optimiser updates any of the parameters, and the ranks can still meet."""
        held = (id(p) for of in optimizer.param_groups for p in of["params"])
        return comm.shares_memory(self._group) and any(known in self._numbers for known in held)

    @property
    def first(self) -> bool:
        """Whether this rank speaks for all."""
        return self._group.rank() == 0

    # ---- meet

    def meet(self, optimizer: Optimizer) -> None:
        """Share what scripts have changed since the last step, and decide who updates what. Collective.

        Raises `UsageError` if ranks have changed different things.
        """
        changed = [(memory, runs) for memory in self._memories() if (runs := memory.changed())]
        left = [*self._moved_away()]
        self._note_wholes(optimizer)
        told = [int(bool(changed)), zlib.crc32(str(left).encode())]
        every = comm.all_gather(torch.tensor(told), self._group, Tag.CONTROL)
        if len({*every[:, 1].tolist()}) > 1:
            _refuse("gave parameters other memory than others did")
        if every[:, 0].any():
            self._share(changed)
        for number in left:
            self._leave(number)
        self._divide(optimizer)

    def _memories(self) -> Iterator[Any]:
        yield self._weights.memory
        found = {id(one.copies): one.copies for of in self._every_kept() for one in of.values()}
        for copies in found.values():
            yield copies.memory

    def _every_kept(self) -> Iterator[dict[str, _Kept]]:
        for kept in self._kept.values():
            yield from kept.values()

    def _moved_away(self) -> Iterator[int]:
        """Parameters that a script has given other memory: they are each rank's own from now on."""
        for number in self._numbers.values():
            parameter, own = self._parameters[number], self._weights.own[number]
            same = parameter.data_ptr() == own.data_ptr() and parameter.stride() == own.stride()
            if not same or parameter.shape != own.shape or parameter.dtype != own.dtype:
                yield number

    def _note_wholes(self, optimizer: Optimizer) -> None:
        """What is kept for large parameters as wholes, before the first rank is through with its step."""
        self._wholes = {
            number: {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in optimizer.state.get(parameter, {}).items()
                if not (isinstance(value, Tensor) and value.shape == parameter.shape)
            }
            for number, parameter in enumerate(self._parameters)
            if parameter.nbytes >= pieces.LEAST_BYTES and id(parameter) in self._numbers
        }

    def _leave(self, number: int) -> None:
        """A parameter is each rank's own from now on, and what is kept for it."""
        parameter = self._parameters[number]
        del self._numbers[id(parameter)]
        for optimizer, known in self._kept.items():
            state = optimizer.state.get(parameter, {})
            for key, kept in known.pop(number, {}).items():
                # In memory of its own: others write to its pages while this rank updates it.
                if state.get(key) is kept.own:
                    state[key] = kept.own.clone()

    def _share(self, changed: Sequence[tuple[Any, Sequence[tuple[int, int]]]]) -> None:
        if self.first:
            for memory, runs in changed:
                for run in runs:
                    memory.share(*run)
        self._told(0)  # the first one is through
        differs = any(memory.differs(*run) for memory, runs in changed for run in runs)
        if self._told(int(differs)).any():
            _refuse("wrote to weights, or to what an optimiser keeps, what others did not")
        for memory, runs in changed:
            for run in runs:
                memory.forget(*run)

    def _told(self, *numbers: int) -> Tensor:
        """(ranks, numbers): what all say; all have come to here."""
        return comm.all_gather(torch.tensor(numbers), self._group, Tag.CONTROL)

    def _divide(self, optimizer: Optimizer) -> None:
        """Give tensors that have no owner yet to the ranks that have least, the largest first."""
        held = [p for group in optimizer.param_groups for p in group["params"]]
        signs = [(id(p), p.requires_grad) for p in held if id(p) in self._numbers]
        part = self._parts.get(optimizer)
        if part is not None and part.signs == signs:
            return
        numbers = [self._numbers[known] for known, _ in signs]
        divided = self._divided(
            optimizer, [self._numbers[known] for known, trained in signs if trained]
        )
        numbers = [n for n in numbers if n not in divided]
        new = [n for n in numbers if n not in self._owners and self._parameters[n].requires_grad]
        for number in sorted(new, key=lambda n: -self._parameters[n].nbytes):
            owner = self._owned_bytes.index(min(self._owned_bytes))
            self._owners[number] = owner
            self._owned_bytes[owner] += self._parameters[number].nbytes + _CALL_BYTES
        mine = [n for n in numbers if self._owners.get(n, 0) == self._group.rank()]
        others = [n for n in numbers if self._owners.get(n, 0) != self._group.rank()]
        self._parts[optimizer] = _Part(signs, mine, others, divided)

    def _divided(self, optimizer: Optimizer, numbers: Sequence[int]) -> dict[int, Piece]:
        """The large parameters, if the optimiser treats elements one by one: each rank takes a piece."""
        if type(optimizer).__name__ not in pieces.BY_ELEMENT:
            return {}
        rank, ranks = self._group.rank(), self._group.size()
        return {
            n: Piece(self._parameters[n], self._weights.shared[n], rank, ranks)
            for n in numbers
            if self._parameters[n].nbytes >= pieces.LEAST_BYTES and n not in self._owners
        }

    def instead(self, optimizer: Optimizer) -> Iterator[tuple[int, list[Tensor]]]:
        """What this rank updates instead of parameters, by their `id`: nothing, or a piece."""
        part = self._parts[optimizer]
        for number in part.others:
            yield id(self._parameters[number]), []
        for number, piece in part.divided.items():
            yield id(self._parameters[number]), [] if piece.held is None else [piece.held]

    # ---- step

    def open(self, optimizer: Optimizer) -> None:
        """Let the optimiser write into the memory of all."""
        known = self._kept.setdefault(optimizer, {})
        for number in self._parts[optimizer].mine:
            parameter = self._parameters[number]
            parameter.data = self._weights.shared[number]
            if (state := optimizer.state.get(parameter)) and number in known:
                for key, kept in known[number].items():
                    if state.get(key) is kept.own:
                        state[key] = kept.shared
        for number, piece in self._parts[optimizer].divided.items():
            if piece.held is not None:
                kept, own = known.get(number, {}), optimizer.state.get(self._parameters[number], {})
                elements = {
                    key: kept[key].shared if key in kept and kept[key].own is value else value
                    for key, value in own.items()
                    if piece.is_of_elements(value)
                }
                opened = piece.open(elements)
                if own:
                    optimizer.state[piece.held] = {
                        key: opened[key] if key in opened else self._wholes[number][key]
                        for key in own
                    }

    def close(self, optimizer: Optimizer) -> None:
        """Have parameters and state as this rank sees them again."""
        known = self._kept[optimizer]
        for number in self._parts[optimizer].mine:
            parameter = self._parameters[number]
            parameter.data = self._weights.own[number]
            if (state := optimizer.state.get(parameter)) and number in known:
                for key, kept in known[number].items():
                    if state.get(key) is kept.shared:
                        state[key] = kept.own
        for number, piece in self._parts[optimizer].divided.items():
            if piece.held is not None:
                self._stepped[number] = optimizer.state.pop(piece.held, {})
                piece.held.grad = None

    def rest(self) -> None:
        """Take back what a failed step of an optimiser has left."""
        for step in [step for step in _steps.values() if self in step.copies]:
            _end(step.optimizer)

    # ---- settle

    def settle(self, optimizer: Optimizer) -> None:
        """Put what the optimiser has come to keep where all see it. Collective; all have made their step."""
        known, part = self._kept[optimizer], self._parts[optimizer]
        new = [n for n in part.mine if not self._is_kept(optimizer, n, known.get(n, {}))]
        grown = [n for n in part.divided if not self._is_put(n, part.divided[n], known.get(n, {}))]
        every = self._told(len(new), len(grown))
        for rank, count in enumerate(every[:, 0].tolist()):
            if count:
                self._publish(optimizer, known, new if rank == self._group.rank() else [], rank)
        if every[0, 1]:
            self._publish_grown(optimizer, known, grown)
        for number in (*part.others, *part.divided):
            parameter, kept = self._parameters[number], known.get(number)
            if kept:
                state = optimizer.state.get(parameter, {})
                if any(state.get(key) is not one.own for key, one in kept.items()):
                    told = {key: one.own for key, one in kept.items()}
                    optimizer.state[parameter] = {**state, **told}
        _sort(optimizer)

    def _is_kept(self, optimizer: Optimizer, number: int, kept: dict[str, _Kept]) -> bool:
        """Whether the memory of all holds the state of a parameter of this rank; new values go there."""
        state = optimizer.state.get(self._parameters[number], {})
        if state.keys() != kept.keys():
            return False
        for key, value in state.items():
            one = kept[key]
            if value is not one.own:
                if not isinstance(value, Tensor) or _form(value) != _form(one.own):
                    return False
                one.shared.copy_(value)
                state[key] = one.own
        return True

    def _publish(
        self,
        optimizer: Optimizer,
        known: dict[int, dict[str, _Kept]],
        numbers: Sequence[int],
        source: int,
    ) -> None:
        """What one rank keeps for some parameters goes into new memory of all. Collective."""
        states = {n: optimizer.state.get(self._parameters[n], {}) for n in numbers}
        told = json.dumps([(n, list(state)) for n, state in states.items()])
        text = comm.broadcast_text(told, self._group, torch.device("cpu"), source=source)
        keys: list[tuple[int, list[str]]] = json.loads(text)
        for number, _ in keys:
            known.pop(number, None)
        if not any(of for _, of in keys):
            return
        tensors = [value for state in states.values() for value in state.values()]
        self._keep(optimizer, known, keys, tensors, source)

    def _keep(
        self,
        optimizer: Optimizer,
        known: dict[int, dict[str, _Kept]],
        keys: Sequence[tuple[int, list[str]]],
        tensors: Sequence[Tensor],
        source: int,
    ) -> None:
        assert all(isinstance(tensor, Tensor) for tensor in tensors), "as those of `_BY_TENSOR` are"
        places = [(number, key) for number, of in keys for key in of]
        copies = comm.SharedCopies(tensors, self._group, source=source)
        for (number, key), own, shared in zip(places, copies.own, copies.shared, strict=True):
            known.setdefault(number, {})[key] = _Kept(own, shared, copies)
        for number, of in keys:
            if of:
                optimizer.state[self._parameters[number]] = {
                    key: one.own for key, one in known[number].items()
                }

    def _is_put(self, number: int, piece: Piece, kept: dict[str, _Kept]) -> bool:
        """Whether the memory of all has room for what was kept for a piece, which is put there then."""
        state = self._stepped.get(number, {})
        if piece.held is None:
            return True
        if state.keys() != kept.keys():
            return False
        if not all(piece.fits(value, kept[key].own) for key, value in state.items()):
            return False
        for key, value in state.items():
            piece.put(value, kept[key].shared, first=self.first)
        return True

    def _publish_grown(
        self, optimizer: Optimizer, known: dict[int, dict[str, _Kept]], numbers: Sequence[int]
    ) -> None:
        """New memory for what pieces have, by the first rank, which has one of each; all put theirs there."""
        divided, cpu = self._parts[optimizer].divided, torch.device("cpu")
        told = json.dumps([(n, list(self._stepped[n])) for n in numbers])
        keys: list[tuple[int, list[str]]] = json.loads(comm.broadcast_text(told, self._group, cpu))
        for number, _ in keys:
            known.pop(number, None)
        if not any(of for _, of in keys):
            return
        tensors = [
            divided[number].grown(self._stepped[number][key])
            for number, of in (keys if self.first else [])
            for key in of
        ]
        self._keep(optimizer, known, keys, tensors, 0)
        for number, of in keys:
            if of and not self._is_put(number, divided[number], known[number]):
                raise AssertionError("all ranks keep the same for their pieces")
        self._told(0)

    # ---- forked children

    def refuse_here(self) -> None:
        """In a forked child, where weights would go on changing with the parent's training."""
        model = self._model()
        for module in () if model is None else model.modules():
            module.register_forward_pre_hook(_refuse_forked)
            module.register_state_dict_pre_hook(_refuse_forked)


def _sort(optimizer: Optimizer) -> None:
    """Have the state in the order of the parameters, as in one process."""
    every = [p for group in optimizer.param_groups for p in group["params"]]
    sorted_ = [parameter for parameter in every if parameter in optimizer.state]
    if [*map(id, sorted_)] != [*map(id, optimizer.state)]:
        for parameter in sorted_:
            optimizer.state[parameter] = optimizer.state.pop(parameter)


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _refuse(did: str) -> NoReturn:
    raise UsageError(
        f"ranks that share a device share their weights, and one {did}, outside of an optimiser's step: do "
        f"the same on all of them, or {_REMEDY}"
    )


def _refuse_forked(*_: Any) -> NoReturn:
    raise UsageError(
        "this process is a forked copy of a rank that shares its weights with others: here they would change "
        f"while the parent trains. Compute in the parent, or {_REMEDY}"
    )


# ---- steps of optimisers, as torch tells of them


@dataclass
class _Step:
    """An optimiser's step under way."""

    optimizer: Optimizer
    copies: Sequence[OneCopy]
    hidden: list[tuple[dict[str, Any], list[Tensor]]] = field(
        default_factory=list[tuple[dict[str, Any], list[Tensor]]]
    )
    """parameter groups, and what was in them"""

    def begin(self) -> None:
        for group in self.optimizer.param_groups:
            self.hidden.append((group, group["params"]))
        instead = dict(pair for copy in self.copies for pair in copy.instead(self.optimizer))
        for copy in self.copies:
            copy.open(self.optimizer)
        for group, every in self.hidden:
            group["params"] = [one for p in every for one in instead.get(id(p), [p])]

    def end(self) -> None:
        for group, every in self.hidden:
            group["params"] = every
        for copy in self.copies:
            copy.close(self.optimizer)


_live: list[weakref.ref[OneCopy]] = []
"""in the order in which they were made, as on all ranks"""
_steps: dict[int, _Step] = {}
"""under way, by number of the optimiser"""
_known: weakref.WeakKeyDictionary[Optimizer, Sequence[OneCopy]] = weakref.WeakKeyDictionary()
"""those that have made a step, and what they hold: a model that a script has let go of would not be gone on
all ranks at the same step
"""


@functools.cache
def _install() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    for known in _live:
        if (copy := known()) is not None:
            copy.refuse_here()


def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _end(optimizer)
    _live[:] = [known for known in _live if known() is not None]
    copies = [copy for known in _live if (copy := known()) and copy.has_some(optimizer)]
    if not copies:
        return
    if why := _joint(optimizer, args, kwargs):
        if copies[0].first:
            _note_own(type(optimizer).__name__, why)
        return
    for copy in copies:
        copy.meet(optimizer)
    if optimizer not in _known:
        optimizer.register_state_dict_pre_hook(_end)
    _known[optimizer] = copies
    step = _steps[id(optimizer)] = _Step(optimizer, copies)
    step.begin()


def _end(optimizer: Optimizer) -> None:
    """Take back what a failed step has left."""
    if step := _steps.pop(id(optimizer), None):
        step.end()


def _after(optimizer: Optimizer, *_: Any) -> None:
    if step := _steps.pop(id(optimizer), None):
        step.end()
        for copy in step.copies:
            copy.settle(optimizer)


def _joint(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a step of an optimiser cannot be divided by tensors, or nothing."""
    kind = type(optimizer)
    if kind is not getattr(torch.optim, kind.__name__, None) or kind.__name__ not in _BY_TENSOR:
        return "may look at several tensors at a time"
    if kwargs.get("closure") is not None or any(callable(arg) for arg in args[1:]):
        return "is given a closure"
    if getattr(optimizer, "grad_scale", None) is not None:
        return "takes a GradScaler's scale out of gradients, which all processes have"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return "is differentiable"
    held = (p.grad for group in optimizer.param_groups for p in group["params"])
    if any(grad is not None and grad.layout != torch.strided for grad in held):
        return "updates by sparse gradients"
    if any(not (hook.__module__ or "").startswith("fivefold.") for hook in step_hooks(optimizer)):
        return "has hooks, which see its parameters"
    return ""


@functools.cache
def _note_own(kind: str, why: str) -> None:
    _log.warning(
        "%s %s: instances of a device each update weights and state of their own with it", kind, why
    )
