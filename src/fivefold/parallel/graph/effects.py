"""What a forward does besides returning something: part of the recording, carried out at every run.

    self.running.mul_(0.9).add_(0.1 * x.mean())      numbers of a buffer:        written
    self.running = 0.9 * self.running + ...          another buffer:             set
    self.calls += 1; self.cache["n"] = mask          attributes, lists, dicts:   set
    del self.hint                                                                dropped

What is set is what the recording has seen, with this run's tensors in the place of the recording's. Numbers
that are no tensor's are the same whenever the guards hold.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Container as Container_
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.parallel.graph.containers import Container, ContainerChange, Items, named
from fivefold.parallel.graph.refs import Constant, Ref, StateRef, Value
from fivefold.parallel.graph.values import ABSENT
from fivefold.parallel.trees import leaves
from fivefold.torch_private import FakeTensor

__all__ = ["Effects", "Set", "apply", "noted"]

_CLOSED = (str, bytes, type, types.ModuleType, nn.Module)
"""what holds no tensor of a recording"""


@dataclass(frozen=True, eq=False)
class Set:
    """A value that a container holds afterwards; `ABSENT` where it drops one."""

    container: Container
    key: Any
    value: Any
    """with a `Ref` or a `_Remade` for what is computed"""

    @property
    def path(self) -> str:
        """How a message names it."""
        return named(self.container, self.key)

    def among(self, made: Container_[int]) -> bool:
        """Whether it holds something computed, all of it `made`. Raises `UsageError` for a part of it."""
        wanted = {ref.index for ref in _refs_in(self.value) if isinstance(ref, Value)}
        there = {index for index in wanted if index in made}
        if there and there != wanted:
            raise UsageError(
                f"{self.path!r} holds tensors of several stages of a pipeline, which no rank has "
                "together: keep them in attributes of their own"
            )
        return bool(there)

    def refs(self) -> Iterator[Ref]:
        """What it holds of what is computed."""
        return _refs_in(self.value)

    @property
    def there(self) -> bool:
        """Whether the container holds tensors there already, as many as will be."""
        return len(self.now()) == len(list(self.refs()))

    def fits(self, shapes: Mapping[int, tuple[int, ...]]) -> bool:
        """Whether the tensors that are there have the shapes of those that will be."""
        will = [shapes[r.index] for r in self.refs() if isinstance(r, Value)]
        return not will or [tuple(leaf.shape) for leaf in self.now()] == will

    def now(self) -> list[Tensor]:
        """The tensors that the container holds there."""
        keys = self.container.keys()
        return leaves(self.container.values()[keys.index(self.key)] if self.key in keys else None)

    @property
    def plain(self) -> bool:
        """Whether it holds nothing computed."""
        return next(_refs_in(self.value), None) is None

    @property
    def registered(self) -> bool:
        """Whether it is a buffer of a module: whole on every rank, without a graph."""
        return isinstance(self.container, Items) and self.container.kind == "_buffers"


@dataclass(frozen=True, eq=False)
class _Remade:
    """Something that holds tensors of the net, to be made anew at every run."""

    like: Any
    """the same without what it holds"""
    items: Mapping[Any, Any]
    """by key, or by number"""


@dataclass
class Effects:
    """All effects of a forward, in the order in which they are carried out."""

    written: list[tuple[StateRef | Constant, Ref]] = field(
        default_factory=list[tuple[StateRef | Constant, Ref]]
    )
    """tensors whose numbers change in place, and what they become"""
    sets: list[Set] = field(default_factory=list[Set])

    def refs(self) -> Iterator[Ref]:
        """Everything computed that is wanted."""
        for _, ref in self.written:
            yield ref
        for one in self.sets:
            yield from _refs_in(one.value)

    def renamed(self, new: Callable[[Ref], Ref]) -> Effects:
        """The same with other refs."""
        return Effects(
            [(target, new(ref)) for target, ref in self.written],
            [dataclasses.replace(one, value=_mapped(one.value, new)) for one in self.sets],
        )

    def __bool__(self) -> bool:
        return bool(self.written or self.sets)


def noted(
    changes: Iterable[ContainerChange], ref: Callable[[Tensor], Ref], own: Callable[[Tensor], bool]
) -> list[Set]:
    """What has been set, given which containers have changed; `own` tensors are the recording's.

    Raises `UsageError` for what cannot be redone.
    """
    found: list[Set] = []
    for change in changes:
        container, before = change.container, change.before
        now = dict(zip(change.keys, change.values, strict=True))
        keys = [*now, *(key for key in before if key not in now)]
        whole = not isinstance(container, Items) and len(now) != len(before)
        for key in keys:
            if key is FakeTensor:  # what a library remembers of the recording's kind of tensor
                continue
            value = now.get(key, ABSENT)
            same = key in before and before[key] is value
            if whole or not same:
                kept = _kept(value, ref, own, named(container, key))
                found.append(Set(container, key, kept))
                _check(found[-1], value, own)
    return found


def _check(one: Set, value: Any, own: Callable[[Tensor], bool]) -> None:
    if isinstance(one.container, Items) and one.container.kind == "_parameters":
        raise UsageError(
            f"the net makes the parameter {one.path!r} in its forward, which an optimiser would not "
            "know: run one batch through the net before parallelize"
        )
    if isinstance(value, nn.Module) and any(map(own, value.parameters())):
        raise UsageError(
            f"the net makes the module {one.path!r} in its forward: run one batch through the net before "
            "parallelize"
        )


def _kept(
    value: Any, ref: Callable[[Tensor], Ref], own: Callable[[Tensor], bool], path: str
) -> Any:
    """A value with refs in the place of the recording's tensors."""
    if isinstance(value, Tensor):
        return ref(value) if own(value) else value
    if not _holds(value, own, set()):
        return value
    items = _items(value)
    if items is None:
        raise UsageError(
            f"the net leaves an object of {type(value).__name__} with tensors at {path!r}, which cannot "
            "be made again: leave tensors in lists, tuples, dicts or dataclasses"
        )
    return _Remade(
        _emptied(value), {key: _kept(item, ref, own, path) for key, item in items.items()}
    )


def _emptied(value: Any) -> Any:
    if isinstance(value, tuple):
        return type(value)
    made = copy.copy(value)
    (made if isinstance(made, (dict, list, collections.deque)) else vars(made)).clear()
    return made


def _items(value: Any) -> Mapping[Any, Any] | None:
    """What something holds; None for what is not known."""
    if isinstance(value, dict):
        return dict(dict.items(value))  # what it holds, not what a mapping of the user's makes up
    if isinstance(value, (list, tuple, collections.deque)):
        return dict(enumerate(value))
    return dict(vars(value)) if hasattr(value, "__dict__") else None


def _holds(value: Any, own: Callable[[Tensor], bool], seen: set[int]) -> bool:
    if isinstance(value, Tensor):
        return own(value)
    if id(value) in seen or isinstance(value, _CLOSED) or callable(value):
        return False
    seen.add(id(value))
    items = _items(value)
    return items is not None and any(_holds(item, own, seen) for item in items.values())


def _refs_in(value: Any) -> Iterator[Ref]:
    if isinstance(value, (Value, StateRef, Constant)):
        yield value
    elif isinstance(value, _Remade):
        for item in value.items.values():
            yield from _refs_in(item)


def _mapped(value: Any, new: Callable[[Ref], Ref]) -> Any:
    if isinstance(value, (Value, StateRef, Constant)):
        return new(value)
    if isinstance(value, _Remade):
        return _Remade(value.like, {key: _mapped(item, new) for key, item in value.items.items()})
    return value


def _made(value: Any, tensor: Callable[[Ref], Tensor]) -> Any:
    """A value of this run."""
    if isinstance(value, (Value, StateRef, Constant)):
        return tensor(value)
    if not isinstance(value, _Remade):
        return value
    like, items = value.like, {key: _made(item, tensor) for key, item in value.items.items()}
    if isinstance(like, type):
        kind: Any = like
        return kind._make(items.values()) if hasattr(kind, "_make") else kind(items.values())
    made = copy.copy(like)
    if isinstance(made, (list, collections.deque)):
        made.extend(items.values())
    elif isinstance(made, dict):
        made.update(items)
    else:
        vars(made).update(items)
    return made


def apply(
    sets: Iterable[Set], part: Callable[[Ref], Tensor], whole: Callable[[Ref], Tensor]
) -> None:
    """Carry out what is set: `part` gives a tensor as this rank has it, `whole` all of it."""
    contents: dict[int, tuple[Container, dict[Any, Any]]] = {}
    for one in sets:
        container = one.container
        if id(container) not in contents:
            held = dict(zip(container.keys(), container.values(), strict=True))
            contents[id(container)] = (container, held)
        held = contents[id(container)][1]
        if one.value is ABSENT:
            held.pop(one.key, None)
        elif one.registered and isinstance(one.value, (Value, StateRef, Constant)):
            held[one.key] = whole(one.value).detach().clone()
        else:
            held[one.key] = _made(one.value, part)
    for container, held in contents.values():
        container.put(list(held), list(held.values()))
