"""The calls of a running forward, noted one by one; see `record` for what they are put together to.

A function mode sees every call of torch's public functions. `writer` has what it writes.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fivefold.parallel.graph.containers import ContainerChange, Items, named
from fivefold.parallel.graph.functional import Functional, assigned
from fivefold.parallel.graph.guards import Looked
from fivefold.parallel.graph.names import asks_in_place, base_name
from fivefold.parallel.graph.numbers import Check, Unknown, assumed, known
from fivefold.parallel.graph.refs import Constant, Slot, StateRef, Value, filled
from fivefold.parallel.graph.tape import depends
from fivefold.parallel.graph.values import is_plain
from fivefold.parallel.graph.writer import Writer, tensors_of
from fivefold.parallel.graph.writes import Writes, user_line
from fivefold.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    has_own_backward,
    is_functorch_wrapped_tensor,
    pytree,
    saved_tensor_hooks,
    without_modes,
)

__all__ = ["WHOLE_MODULES", "CallRecorder"]

WHOLE_MODULES = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
"""Taken as one operation: they read their own buffers' numbers, or are known by their module only."""

_NORMS = frozenset({"batch_norm", "instance_norm"})
_NORM_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training")
_TORCH_NORM_ARGUMENTS = ("input", "weight", "bias", "running_mean", "running_var", "training")
_RESHAPED_IN_PLACE = frozenset({
    "unsqueeze", "squeeze", "t", "transpose", "swapaxes", "swapdims", "resize", "resize_as", "as_strided",
    "set",
})  # fmt: skip
_REFUSED = {
    "backward": "calls backward in its forward",
    "retain_grad": "asks to keep the gradient of a tensor within the net (retain_grad)",
    "grad_fn": "looks at the graph of autograd (grad_fn)",
}
_CHECKPOINTED = "checkpoints (torch.utils.checkpoint)"
_NUMBERS = (
    "depends on the numbers of a tensor (an if, a loop, .item(), nonzero), so what it computes is not known "
    "beforehand. Let it depend on shapes or options, or use torch.where"
)


@dataclass(frozen=True)
class Look:
    """At what is not of the recording."""

    real: Callable[[str], Tensor]
    """a parameter or buffer by its name"""
    changes: Callable[[], Sequence[ContainerChange]]
    """what the forward has changed of what it can reach"""


@dataclass(frozen=True)
class Hook:
    """A hook that the forward has registered on a value."""

    value: int
    hook: Callable[[Tensor], Tensor | None]
    there: Callable[[], bool]
    """whether it has not been removed"""


class CallRecorder(Writer):
    """Notes calls as nodes. Arguments are those of `Writer`, and what there is to `look` at."""

    def __init__(
        self,
        named: Sequence[tuple[Tensor, StateRef]],
        inputs: Sequence[Tensor],
        writes: Writes,
        device: torch.device,
        look: Look,
        *,
        modules: Sequence[nn.Module],
    ) -> None:
        super().__init__(named, inputs, writes, device)
        self.statistics: set[str] = set()
        """names of buffers that norms update by themselves"""
        self.looked: list[Looked] = []
        self.hooks: list[Hook] = []
        self.failed = ""
        """the module that raised"""
        self._look = look
        self._again_known = 0
        self._counted: list[tuple[str, int]] = []
        """running statistics that are updated, and how many nodes there were before"""
        self.twice: set[str] = set()
        """those that are updated in a part which one process runs twice"""
        self.reentrant = False
        """whether such a part runs without gradients first"""
        self.as_before = False
        """whether it does so here"""
        self._saving = saved_tensor_hooks()
        self._saves: list[None] = []
        """for each tensor that checkpointed parts saved for backward since the last node"""
        self._saved_by = 0
        """how many nodes there were then"""
        self._options: dict[nn.Module, tuple[Any, ...]] = {
            m: _options(m) for m in modules if isinstance(m, WHOLE_MODULES)
        }
        self._generators = {
            id(value) for module in modules for value in vars(module).values()
            if isinstance(value, torch.Generator)
        }  # fmt: skip

    # ---- seeing calls

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._silent:
            return func(*args, **kwargs)
        name, kind = base_name(func), getattr(func, "__name__", "")
        if name in _REFUSED:
            self.refuse(_REFUSED[name])
        if kind == "__set__":
            return self._set_attribute(func, name, args)
        if name == "grad":
            return self._grad(func, args, kwargs)
        if name == "register_hook":
            return self._hooked(func, args)
        return self._seen(func, name, args, kwargs)

    def _seen(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = tensors_of((args, kwargs))
        if saved_tensor_hooks() != self._saving:
            self.refuse(
                "saves tensors for backward by hooks (saved_tensors_hooks, save_on_cpu), which a recording "
                "would drop: leave them out, memory.recompute of the plan saves memory"
            )
        self._check(name, func, args, given)
        generator = kwargs.get("generator")
        if generator is not None and id(generator) not in self._generators:
            self.refuse(
                "draws from a generator (torch.Generator) that no module holds: each run would go on where "
                "the last one ended. Make it once, as an attribute of a module"
            )
        if name == "as_strided" and args and isinstance(self.ref(args[0]), Value):
            self.refuse(
                "looks at the memory of what it computes (as_strided), which lies otherwise where ranks hold "
                "parts: use unfold, narrow or a view"
            )
        graded = {id(leaf) for leaf in given if leaf.requires_grad}
        self._writes.changed.clear()
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException as problem:
            return self._number(func, name, args, kwargs, problem)
        except DynamicOutputShapeException as problem:
            self.refuse(
                f"has a result whose shape depends on numbers ({name}): what each rank has to compute "
                "cannot be planned. Keep the shape, as torch.where and masked_fill do",
                problem,
            )
        self._follow(func, name, args, kwargs, given, result, graded)
        return result

    def _follow(  # noqa: PLR0917 - one call, and what came of it
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        given: list[Tensor],
        result: Any,
        graded: set[int],
    ) -> None:
        """Note a call that was made."""
        made, changed = tensors_of(result), self._changed(given)
        if changed and name not in _NORMS:
            self._note_changing(func, name, args, kwargs, changed, made, graded)
        elif made:
            self._note(func, name, args, kwargs, made, graded)
        self._settle_saved()

    def opaque(self, apply: Callable[..., Any], name: str, args: tuple[Any, ...]) -> Any:
        """A call whose inside is not looked at: an autograd function of the user's."""
        given = tensors_of(args)
        self.check_seen(given)
        graded = {id(leaf) for leaf in given if leaf.requires_grad}
        before = set(self._states)
        self._writes.changed.clear()
        self._writes.read.clear()
        self._silent = True
        try:
            result = apply(*args)
        finally:
            self._silent = False
        if self._writes.read & (before - {self._writes.storage(leaf) for leaf in given}):
            self.refuse(
                f"uses a tensor in {name} that is not among its arguments, so that its gradient cannot "
                "be followed: pass it as an argument of the autograd function"
            )
        self._follow(apply, name, args, {}, given, result, graded)
        return result

    def as_one(self, module: nn.Module, kind: type, x: Tensor) -> Tensor:
        """A module as one operation: its result has the shape and dtype of what it is given."""
        if self._options.get(module) != _options(module):
            self.refuse(
                "has options (training, momentum, eps) that the forward sets before it is called, which are "
                "read when it runs: set them between steps"
            )
        self._silent = True
        try:
            result = x * 1
            trained = next((p for p in module.parameters() if p.requires_grad), None)
            if trained is not None:  # a checkpoint behind it asks whether it has a gradient
                result = result + trained.sum().to(x.dtype) * 0
        finally:
            self._silent = False
        ref, shape = self.ref(x), tuple(x.shape)
        if module.training and getattr(module, "track_running_stats", False):
            scope = self.scopes[-1]
            for buffer, _ in module.named_buffers():
                self._count(f"{scope}.{buffer}".lstrip("."))
        self._emit(module, kind.__name__, ((Slot(0),), {}), [ref], [shape], [self._new(result)])
        if result.requires_grad:
            self._saves.append(None)
        self._settle_saved()
        return result

    def _check(self, name: str, func: Any, args: tuple[Any, ...], given: Sequence[Tensor]) -> None:
        self.check_seen(given)
        if any(map(is_functorch_wrapped_tensor, given)):
            self.refuse("uses torch.func (vmap, grad, jvp), whose calls cannot be followed")
        if name in _RESHAPED_IN_PLACE and asks_in_place(func, args, {}):
            self.refuse(
                f"changes the shape of a tensor in place ({name}_): use {name}, which gives another one"
            )
        if any(isinstance(leaf, Unknown) for leaf in pytree.tree_leaves(args)):
            self.refuse(_NUMBERS)

    def _changed(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Which operands a call has changed. Refuses if it has changed something else that is known."""
        found = self._writes.changed
        if not found:
            return []
        own = {id(leaf): leaf for leaf in given if self._writes.storage(leaf) in found}
        covered = {self._writes.storage(leaf) for leaf in own.values()}
        if any(storage in self._states for storage in found - covered):
            self.refuse("changes a tensor in a way that cannot be followed")
        return list(own.values())

    # ---- what takes numbers out of tensors, hooks, attributes

    def _number(self, func: Any, name: str, args: Any, kwargs: Any, problem: Exception) -> Any:
        """What a call returns that takes numbers out of tensors."""
        placed, given, refs = self._placed(args, kwargs)
        sources = [known(ref, self.nodes, self._look.real, self.statistics) for ref in refs]

        def apply(*tensors: Tensor) -> Any:
            args, kwargs = filled(placed, tensors)
            return func(*args, **kwargs)

        if all(source is not None for source in sources):

            def again() -> Any:
                with without_modes():
                    return apply(*(source() for source in sources if source is not None))

            found = again()
            self.looked.append(
                Looked(again, found, f"numbers that the net has looked at ({user_line()})")
            )
            return found
        unknown = Unknown(given, apply, self._checked, lambda: self.refuse(_NUMBERS))
        if name == "item":
            return unknown
        if name in {"__bool__", "bool", "equal", "allclose", "is_nonzero"}:
            return self._checked(unknown)
        return self.refuse(_NUMBERS, problem)

    def _checked(self, unknown: Unknown) -> bool:
        """Note an assert, and go on as if it held."""
        found = assumed()
        if found is None:
            self.refuse(_NUMBERS)
        wanted, where = found
        refs = [self.ref(tensor) for tensor in unknown.tensors]
        slots = tuple(Slot(number) for number in range(len(refs)))
        shapes = [tuple(tensor.shape) for tensor in unknown.tensors]
        check = Check(unknown.compute, wanted, where)
        self._emit(check, "check", (slots, {}), refs, shapes, [])
        return wanted

    def _grad(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.autograd.grad:
            self.refuse("differentiates in its forward (torch.autograd.grad)")
        if isinstance(self._refs.get(id(args[0])), (StateRef, Constant)):
            self.refuse("looks at the gradient of a parameter in its forward")
        return func(*args, **kwargs)

    def _hooked(self, func: Any, args: tuple[Any, ...]) -> Any:
        """`y.register_hook(hook)`: part of the recording, as it is when the forward is over."""
        ref = self.ref(args[0])
        if not isinstance(ref, Value):
            self.refuse("registers a hook on a parameter or an outer tensor in its forward")
        handle = func(*args)

        def there() -> bool:
            hooks = handle.hooks_dict_ref()
            return hooks is not None and handle.id in hooks

        self.hooks.append(Hook(ref.index, args[1], there))
        return handle

    def _set_attribute(self, func: Any, name: str, args: tuple[Any, ...]) -> Any:
        """`x.data = y`, and other attributes of tensors."""
        target, value = args
        if name == "requires_grad":
            return func(*args)
        if name != "data":
            self.refuse(f"sets .{name} of a tensor in its forward")
        if value.shape != target.shape or value.dtype != target.dtype:
            self.refuse("gives a tensor another shape or dtype by .data")
        before, after = self.ref(target), self.ref(value)
        self._check_kept(target)
        func(*args)
        self._views.pop(id(target), None)  # it shares memory with another tensor now
        self._bind(target, self._renumber(before, after, target))
        return None

    # ---- noting calls that leave their operands alone

    def _note(  # noqa: PLR0917 - one call, and what came of it
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        made: Sequence[Tensor],
        graded: set[int],
    ) -> None:
        placed, operands, refs = self._placed(args, kwargs)
        if name in _NORMS:
            self._check_statistics(func, args, kwargs)
        if len(made) == 1 and not name.endswith("_"):
            own = [ref for leaf, ref in zip(operands, refs, strict=True) if leaf is made[0]]
            if own and not isinstance(own[0], Value):  # `weight.to(dtype)` is the weight
                return
        shapes = [tuple(leaf.shape) for leaf in operands]
        before = {self._writes.storage(leaf): leaf for leaf in reversed(operands)}
        ends = any(id(leaf) in graded for leaf in operands) and not any(
            t.requires_grad for t in made
        )
        self._emit(
            func, name, placed, refs, shapes, [self._new(leaf) for leaf in made],
            stops=ends or has_own_backward(func, name),
        )  # fmt: skip
        for leaf in made:
            parent = before.get(self._writes.storage(leaf))
            if parent is not None and parent is not leaf:
                self._viewed(leaf, parent, func, name, args, kwargs, made)
        if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in made):
            self._used.update(before)

    def _check_statistics(self, func: Any, args: Any, kwargs: Any) -> None:
        """Running statistics that a functional norm updates have to be tensors of the net's own."""
        order = _TORCH_NORM_ARGUMENTS if func in _TORCH_NORMS else _NORM_ARGUMENTS
        given = {**dict(zip(order, args, strict=False)), **kwargs}
        if not given.get("training", given.get("use_input_stats", "instance" in func.__name__)):
            return
        for which in ("running_mean", "running_var"):
            tensor = given.get(which)
            ref = self.ref(tensor) if isinstance(tensor, Tensor) else None
            if isinstance(ref, Value):
                self.refuse(
                    "has a norm whose running statistics are part of another tensor, or were computed in "
                    "the same forward: give it buffers of its own"
                )
            if isinstance(ref, StateRef):
                self._count(ref.name)

    def _count(self, name: str) -> None:
        """A norm updates running statistics."""
        self.statistics.add(name)
        self._counted.append((name, len(self.nodes)))
        if self._again > 1 or (self._again and not self._again_known):
            self.refuse(
                f"{_CHECKPOINTED} a part that updates {name}, which is then counted several times"
            )

    def check_counted(self) -> None:
        """Refuse statistics whose updates one process would make in another order."""
        counted = Counter(name for name, _ in self._counted)
        for name in sorted(self.twice):
            if counted[name] > 1:
                self.refuse(
                    f"{_CHECKPOINTED} parts that update {name} several times, in an order of its own"
                )

    @contextmanager
    def again(self, *, known: bool = True, early_stop: bool | None = None) -> Generator[None]:
        """The block is checkpointed: one process runs it again in backward. Refuses what it would do twice.

        `known`: by the same calls. `early_stop`: whether only until all is there that was saved for backward;
        None: all of it, even if nothing was.
        """
        if not torch.is_grad_enabled():  # nor is it run again in backward
            yield
            return
        before, first = self._done(), len(self.nodes)
        self._again += 1
        self._again_known = known
        outside = self._saving
        self._saves.clear()
        # Autograd's graph keeps these two, and no collector sees what they keep. Nobody asks for the tensors:
        # a forward that differentiates is refused.
        note = functools.partial(_note_saved, self._saves)
        try:
            with saved_tensors_hooks(note, lambda saved: saved):
                self._saving = saved_tensor_hooks()
                yield
        finally:
            self._again -= 1
            self._saving = outside
        self._settle_saved()
        until = len(self.nodes) if early_stop is None else self._runs_again(first, early_stop)
        for index in range(until, len(self.nodes)):
            self.nodes[index] = replace(self.nodes[index], again=False)
        self.twice.update(name for name, at in self._counted if first <= at < until)
        states, changed = self._done()
        for state, old in zip(states, before[0], strict=False):
            if state != old:
                self._refuse_twice(state[0])
        for key, (change, values) in changed.items():
            old = before[1][key][1] if key in before[1] else change.before
            for name, value in values.items():
                if value is not old.get(name) and not self._once(change, old.get(name), value):
                    self._refuse_twice(named(change.container, name))
            if values.keys() != old.keys() and not isinstance(change.container, Items):
                self._refuse_twice(change.container.path)

    def _runs_again(self, first: int, early_stop: bool) -> int:
        """Up to where one process runs a part again that asks for what was saved for backward."""
        if self._saved_by <= first:
            return first
        if not early_stop:
            return len(self.nodes)
        # An instance norm saves its input before it updates its statistics.
        late = self.nodes[self._saved_by - 1].name.lower().startswith("instance")
        return self._saved_by - late

    def _settle_saved(self) -> None:
        """A call has become nodes: what it saved is theirs."""
        if self._saves:
            self._saves.clear()
            self._saved_by = len(self.nodes)

    def _done(
        self,
    ) -> tuple[list[tuple[str, int]], dict[int, tuple[ContainerChange, dict[Any, Any]]]]:
        """What the forward has done so far besides computing."""
        states = [
            (ref.name, self._states[self._writes.storage(tensor)])
            for tensor, ref in self.named
            if isinstance(ref, StateRef)
        ]
        changes = {
            id(change.container): (change, dict(zip(change.keys, change.values, strict=True)))
            for change in self._look.changes()
        }
        return states, changes

    def _once(self, change: ContainerChange, before: Any, now: Any) -> bool:
        """Whether something that is set once is the same when it is set again by the same forward."""
        if before is None:
            return True
        if not isinstance(change.container, Items):
            return False
        if isinstance(before, Tensor) and isinstance(now, Tensor):
            return not depends(self.ref(now), self.ref(before), self.nodes)
        return is_plain(before) and is_plain(now) and before == now

    def _refuse_twice(self, what: str) -> NoReturn:
        self.refuse(
            f"{_CHECKPOINTED} a part that changes {what!r}, which one process does twice: keep that out "
            "of it, or let memory.recompute save the memory"
        )

    # ---- noting calls that change operands

    def _note_changing(  # noqa: PLR0917 - one call, and what came of it
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        changed: list[Tensor],
        made: list[Tensor],
        graded: set[int],
    ) -> None:
        target = changed[0]
        first = args[0] if args else kwargs.get("input")
        alone = len({self._writes.storage(tensor) for tensor in changed}) == 1 and first is target
        if name == "__setitem__" and alone:
            changed, function, name = [target], assigned, "assigned"
        elif kwargs.get("out") is not None:
            changed, function = self._out(kwargs, changed), func
            kwargs = {key: value for key, value in kwargs.items() if key != "out"}
        elif alone and asks_in_place(func, args, kwargs) and len(made) == 1 and made[0] is target:
            changed, function = [target], func  # rules take the variant that makes a new tensor
        else:
            self._functional(func, name, args, kwargs, changed, made, graded)
            return
        placed, operands, refs = self._placed(args, kwargs)
        values = [self._value(tensor) for tensor in changed]
        self._emit(function, name, placed, refs, [tuple(t.shape) for t in operands], values)
        for tensor, value in zip(changed, values, strict=True):
            self._overwrite(tensor, Value(value), id(tensor) in graded)

    def _out(self, kwargs: dict[str, Any], changed: list[Tensor]) -> list[Tensor]:
        """What `f(x, out=y)` writes to."""
        out = tensors_of(kwargs["out"])
        if {id(tensor) for tensor in out} != {id(tensor) for tensor in changed}:
            self.refuse("writes into out=... and changes another operand as well")
        return out

    def _functional(  # noqa: PLR0917 - one call, and what came of it
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        changed: list[Tensor],
        made: list[Tensor],
        graded: set[int],
    ) -> None:
        """Any call that changes operands: on copies, which are results as well."""
        placed, operands, refs = self._placed(args, kwargs)
        written = [next(n for n, t in enumerate(operands) if t is one) for one in changed]
        others = [self._new(t) for t in made if all(t is not one for one in changed)]
        values = [self._value(tensor) for tensor in changed]
        slots = tuple(Slot(number) for number in range(len(operands)))
        call, shapes = Functional(func, placed, written), [tuple(t.shape) for t in operands]
        self._emit(call, f"{name} in place", (slots, {}), refs, shapes, [*others, *values])
        for tensor, value in zip(changed, values, strict=True):
            self._overwrite(tensor, Value(value), id(tensor) in graded)


def _note_saved(saves: list[None], _: Tensor) -> None:
    saves.append(None)


def _options(module: Any) -> tuple[Any, ...]:
    return module.training, module.momentum, module.eps, module.track_running_stats


_TORCH_NORMS = (torch.batch_norm, torch.instance_norm)
