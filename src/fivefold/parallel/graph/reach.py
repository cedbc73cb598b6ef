"""Everything Python that a forward can read and write: found by walking from the net.

    net.__dict__ ─┬─ training, floats, strings ...          values
                  ├─ _parameters, _buffers, hooks           containers, and tensors in them
                  ├─ lists, dicts, objects                  containers
                  ├─ _modules                               the same of every submodule
                  └─ methods, hooks ── closures, defaults, and the globals that their code names

    reach = Reach(net)              what is there now
    ...                             the forward runs
    reach.changes()                 what it has assigned, appended, deleted
    reach.restore()                 as it was

Nothing of the walk runs code of the user's: it reads dictionaries, not attributes.
"""

from __future__ import annotations

import collections
import dis
import functools
import pickle
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn

__all__ = [
    "ABSENT", "Bag", "Change", "Container", "Found", "Held", "Items", "Reach", "Row", "Subset", "is_plain",
    "named", "stayed", "user_code",
]  # fmt: skip


class _Absent:
    """In the place of what is not there."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()

_SCALARS = (
    int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, torch.Size, range, slice,
    torch.layout, torch.memory_format, np.generic,
)  # fmt: skip
_FOREIGN = (
    "torch", "numpy", "fivefold", "functools", "collections", "logging", "threading", "typing",
)  # fmt: skip
"""packages whose functions and classes read nothing that a user changes"""
_CLOSED = (
    "torch.distributed", "torch.fx", "torch.jit", "torch.utils.data", "torch.optim", "torch.cuda", "torch._",
    "fivefold", "logging", "threading", "weakref", "concurrent", "asyncio", "multiprocessing", "_thread",
    "re", "pathlib", "_io",
)  # fmt: skip
"""packages into whose objects no walk goes"""
_PYTHON: Any = random._inst  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
_CACHED = type(functools.lru_cache(len))
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_DEEPEST = 6
_MOST = 200_000
"""values that are looked at"""


class Container(Protocol):
    """Something that holds values under keys, in an order."""

    path: str
    """how a message names it"""
    shared: bool
    """whether others than this net hold it too: it was reached through a function or a class"""
    generates: bool
    """whether it is the state of a generator of random numbers"""

    def keys(self) -> list[Any]:
        """Names, or numbers."""
        ...

    def values(self) -> list[Any]:
        """What is held now, in the order of `keys`."""
        ...

    def put(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """Hold just this."""
        ...


@dataclass(eq=False)
class Items:
    """A dict; that of an object holds its attributes: its `members`."""

    owner: dict[Any, Any]
    path: str
    shared: bool = False
    members: bool = False
    kind: str = ""
    """of a dict that every module has: `_buffers`, say"""
    generates: bool = False

    def keys(self) -> list[Any]:
        """See `Container`."""
        return list(dict.keys(self.owner))

    def values(self) -> list[Any]:
        """See `Container`."""
        return list(dict.values(self.owner))

    def put(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """See `Container`. Untouched keys keep their place."""
        kind: Any = (
            collections.OrderedDict
            if isinstance(self.owner, collections.OrderedDict)
            else dict[Any, Any]
        )
        if list(kind.keys(self.owner)) != list(keys):
            kind.clear(self.owner)
        for key, value in zip(keys, values, strict=True):
            kind.__setitem__(self.owner, key, value)


@dataclass(eq=False)
class Subset:
    """Some names of a dict that is none of the net's: the globals that its code names."""

    owner: dict[str, Any]
    names: list[str]
    path: str
    shared: bool = True
    generates: bool = False

    def keys(self) -> list[Any]:
        """See `Container`."""
        return self.names

    def values(self) -> list[Any]:
        """See `Container`."""
        return [self.owner.get(name, ABSENT) for name in self.names]

    def put(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """See `Container`."""
        for key, value in zip(keys, values, strict=True):
            if value is ABSENT:
                self.owner.pop(key, None)
            else:
                self.owner[key] = value


@dataclass(eq=False)
class _ClassItems:
    """The attributes of a class of the user's."""

    owner: type
    path: str
    shared: bool = True
    generates: bool = False

    def keys(self) -> list[Any]:
        return list(vars(self.owner))

    def values(self) -> list[Any]:
        return list(vars(self.owner).values())

    def put(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        wanted = dict(zip(keys, values, strict=True))
        for name in [name for name in vars(self.owner) if name not in wanted]:
            delattr(self.owner, name)
        for name, value in wanted.items():
            if vars(self.owner).get(name, ABSENT) is not value:
                setattr(self.owner, name, value)


@dataclass(eq=False)
class Row:
    """A list or a deque."""

    owner: Any
    path: str
    shared: bool = False
    generates: bool = False

    def keys(self) -> list[Any]:
        """See `Container`."""
        return list(range(len(self.owner)))

    def values(self) -> list[Any]:
        """See `Container`."""
        return list(self.owner)

    def put(self, keys: Sequence[Any], values: Sequence[Any]) -> None:  # noqa: ARG002 - numbers in order
        """See `Container`."""
        self.owner.clear()
        self.owner.extend(values)


@dataclass(eq=False)
class Bag:
    """A set, whose content counts as one value."""

    owner: set[Any]
    path: str
    shared: bool = False
    generates: bool = False

    def keys(self) -> list[Any]:
        """See `Container`."""
        return [0]

    def values(self) -> list[Any]:
        """See `Container`."""
        return [frozenset(self.owner)]

    def put(self, keys: Sequence[Any], values: Sequence[Any]) -> None:  # noqa: ARG002 - there is one
        """See `Container`."""
        self.owner.clear()
        self.owner.update(values[0])


@dataclass(eq=False)
class _Whole:
    """Something whose content is one value: a cell of a closure, an array, a generator."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    path: str
    shared: bool = False
    generates: bool = False

    def keys(self) -> list[Any]:
        return [0]

    def values(self) -> list[Any]:
        return [self.get()]

    def put(self, keys: Sequence[Any], values: Sequence[Any]) -> None:  # noqa: ARG002 - there is one
        self.set(values[0])


@dataclass(frozen=True)
class Change:
    """A container whose content has become another."""

    container: Container
    keys: list[Any]
    values: list[Any]
    before: dict[Any, Any]

    def names(self) -> list[str]:
        """The values that have changed, as messages name them."""
        now = dict(zip(self.keys, self.values, strict=True))
        changed = [
            key
            for key in {**self.before, **now}
            if not _untouched(self.before.get(key, ABSENT), now.get(key, ABSENT))
        ]
        return [named(self.container, key) for key in changed] or [self.container.path]


def named(container: Container, key: Any) -> str:
    """How a message names a value of a container."""
    if isinstance(container, Row) or (isinstance(container, Items) and not container.members):
        return f"{container.path}[{key!r}]"
    return container.path if isinstance(container, _Whole) else f"{container.path}{key}"


@dataclass
class Found:
    """A tensor, and where it is held."""

    tensor: Tensor
    container: Container
    key: Any
    path: str
    inner: tuple[int, ...] = ()
    """where it is in a tuple"""

    def now(self) -> Any:
        """What is there now."""
        if isinstance(self.container, Items):
            value = self.container.owner[self.key]
        else:
            value = self.container.values()[self.container.keys().index(self.key)]
        for number in self.inner:
            value = value[number]
        return value


@dataclass
class Held:
    """A container with what it held when it was reached."""

    container: Container
    keys: list[Any]
    values: list[Any]
    placed: list[Any] = field(default_factory=list[Any])
    """what stands there since `put_in_place`, or just what it held"""


class Reach:
    """All containers that a forward of `net` can reach, and what they hold now."""

    def __init__(self, net: nn.Module, others: Sequence[tuple[str, Any]] = ()) -> None:
        self.held: list[Held] = []
        self.tensors: list[Found] = []
        self.caches: list[tuple[Any, Any]] = []
        """functions that `functools.lru_cache` keeps results of, and what it has told of them"""
        self.truncated = False
        """whether there was more than is looked at"""
        self._seen: dict[int, Any] = {}
        self._globals: dict[int, Subset] = {}
        self._draws: set[str] = set()
        """global generators that code names"""
        self._count = 0
        self._todo: collections.deque[tuple[Any, str, bool]] = collections.deque()
        for name, thing in others:
            self._todo.append((thing, name, False))
        self._todo.appendleft((net, "", False))
        while self._todo:
            self._visit(*self._todo.popleft())
        for subset in self._globals.values():
            self._add(subset, follow=False)
        self._add_generators()

    # ---- walking

    def _visit(self, value: Any, path: str, shared: bool) -> None:  # noqa: C901 - one case per kind
        known = isinstance(value, (*_SCALARS, _Absent, Tensor, type, types.ModuleType))
        if known or id(value) in self._seen:
            return
        if self._count > _MOST:
            self.truncated = True
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._visit_module(value, path, shared)
        elif isinstance(value, dict):
            self._add(Items(cast(dict[Any, Any], value), path, shared))
            self._visit_object(value, path, shared)
        elif isinstance(value, (list, collections.deque)):
            self._add(Row(value, path, shared))
            self._visit_object(value, path, shared)
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                self._todo.append((item, f"{path}[{number}]", shared))
        elif isinstance(value, set):
            self._add(Bag(cast(set[Any], value), path, shared))
        elif isinstance(value, np.ndarray):
            self._add(_of_array(value, path, shared))
        elif callable(value) or isinstance(value, (property, classmethod)):
            self._visit_callable(value, path, shared)
        elif (generator := _of_generator(value, path)) is not None:
            self._add(generator)
        else:
            self._visit_object(value, path, shared)

    def _visit_module(self, module: nn.Module, path: str, shared: bool) -> None:
        prefix = f"{path}." if path else ""
        own = vars(module)
        self._add(Items(own, prefix, shared, members=True), skip=_INNER)
        for kind in _INNER:
            inner = own.get(kind)
            if isinstance(inner, dict) and id(inner) not in self._seen:
                self._seen[id(inner)] = inner
                if "hooks" in kind and any(
                    map(gathers, inner.values())
                ):  # not the user's: they come and go
                    continue
                self._add(Items(cast(dict[Any, Any], inner), prefix, shared, True, kind))
        for cls in type(module).__mro__:
            self._visit_class(cls)

    def _visit_class(self, cls: type) -> None:
        if not user_code(cls.__module__) or id(cls) in self._seen:
            return
        self._seen[id(cls)] = cls
        self._add(_ClassItems(cls, f"{cls.__qualname__}."), skip=_MAGIC)

    def _visit_callable(self, value: Any, path: str, shared: bool) -> None:
        if isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._todo.append((part, path, shared))
        elif isinstance(value, types.MethodType):
            self._todo.append((value.__self__, path, shared))
            self._todo.append((value.__func__, path, shared))
        elif isinstance(value, (staticmethod, classmethod, property)):
            self._visit_property(value, path)
        elif isinstance(value, _CACHED):
            self.caches.append((value, value.cache_info()))
            self._todo.append((value.__wrapped__, path, True))
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        else:
            self._visit_object(value, path, shared)
            for cls in type(value).__mro__:
                self._visit_class(cls)

    def _visit_property(self, value: Any, path: str) -> None:
        inner = (value.fget, value.fset) if isinstance(value, property) else (value.__func__,)
        for function in inner:
            if function is not None:
                self._todo.append((function, path, True))

    def _visit_function(self, function: types.FunctionType) -> None:
        if not user_code(function.__module__ or ""):
            return
        name = function.__qualname__
        for variable, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                self._add(_of_cell(cell, f"{variable} of {name}"))
        self._todo.append((function.__defaults__ or (), f"defaults of {name}", True))
        self._todo.append((function.__kwdefaults__ or {}, f"defaults of {name}", True))
        self._todo.append((vars(function), f"attributes of {name}", True))
        self._visit_globals(function)

    def _visit_globals(self, function: types.FunctionType) -> None:
        """The globals that a function names, and what it names of the user's modules."""
        names = list(_names_in(function.__code__))
        assigns = _assigns_globals(function.__code__)
        scopes = [(function.__globals__, names)]
        for name in names:
            module = function.__globals__.get(name)
            method = isinstance(module, (types.MethodType, types.BuiltinMethodType))
            if module is random or (method and module.__self__ is _PYTHON):
                self._draws.add("python")
            if module is np.random or (module is np and "random" in names):
                self._draws.add("numpy")
            if isinstance(module, types.ModuleType) and user_code(module.__name__):
                scopes.append((vars(module), [n for n in names if n in vars(module)]))
        for scope, wanted in scopes:
            where = scope.get("__name__", "globals")
            subset = self._globals.setdefault(id(scope), Subset(scope, [], f"{where}."))
            for name in wanted:
                value = scope.get(name, ABSENT)
                unknown = value is ABSENT and not assigns
                if name in subset.names or unknown or isinstance(value, types.ModuleType):
                    continue
                subset.names.append(name)
                self._todo.append((value, f"{where}.{name}", True))
                if isinstance(value, type):
                    self._visit_class(value)

    def _visit_object(self, value: Any, path: str, shared: bool) -> None:
        where = type(value).__module__
        if where.startswith(_CLOSED):
            return
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict) and own and id(own) not in self._seen:
            self._seen[id(own)] = own
            self._add(Items(cast(dict[Any, Any], own), f"{path}.", shared, members=True))

    def _add(
        self, container: Container, *, skip: frozenset[str] = frozenset(), follow: bool = True
    ) -> None:
        keys, values = container.keys(), container.values()
        held = Held(container, keys, values, values)
        self.held.append(held)
        self._count += len(values)
        for key, value in zip(keys, values, strict=True):
            path = named(container, key)
            for inner, tensor in _tensors_in(value):
                self.tensors.append(Found(tensor, container, key, path, inner))
            if follow and not (isinstance(key, str) and key in skip):
                self._todo.append((value, path, container.shared))

    def _add_generators(self) -> None:
        """Python's and numpy's, if the forward may draw from them: other threads may, too."""
        python = _Whole(random.getstate, random.setstate, "Python's random", True, True)
        numpy = _Whole(_numpy_state, np.random.set_state, "numpy.random", True, True)
        for container, name in ((python, "python"), (numpy, "numpy")):
            if name not in self._draws:
                continue
            values = container.values()
            self.held.append(Held(container, container.keys(), values, values))

    # ---- what has changed

    def put_in_place(self, stand_in: Callable[[Tensor], Tensor]) -> None:
        """Put `stand_in(tensor)` where the net holds a tensor; what is shared stays as it is."""
        for held in self.held:
            if not held.container.shared and any(map(_holds_tensor, held.values)):
                held.placed = [_replaced(value, stand_in) for value in held.values]
                held.container.put(held.keys, held.placed)

    def changes(self) -> list[Change]:
        """What has become another since, in the order in which it was reached."""
        found: list[Change] = []
        for held in self.held:
            now = held.container.values()
            same = len(now) == len(held.placed) and all(map(_untouched, held.placed, now))
            if same and held.container.keys() == held.keys:
                continue
            before = dict(zip(held.keys, held.placed, strict=True))
            if not _derived(held, now):
                found.append(Change(held.container, held.container.keys(), now, before))
        return found

    def restore(self) -> None:
        """Let every container hold what it held, and caches forget what they were given meanwhile."""
        for held in self.held:
            now = held.container.values()
            if len(now) != len(held.values) or not all(map(is_, held.values, now)):
                held.container.put(held.keys, held.values)
            held.placed = held.values
        for cache, before in self.caches:
            if cache.cache_info().misses != before.misses:
                cache.cache_clear()


_INNER = frozenset({
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
    "_backward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
})  # fmt: skip
"""dicts of every module, which belong to it under its own name"""
_MAGIC = frozenset({
    "__dict__", "__weakref__", "__module__", "__doc__", "__annotations__", "__static_attributes__",
    "__firstlineno__", "__abstractmethods__", "_abc_impl", "__dataclass_fields__", "__dataclass_params__",
    "__match_args__", "__orig_bases__", "__parameters__", "__annotate__", "__annotate_func__",
    "__annotations_cache__",
})  # fmt: skip


def gathers(hook: Any) -> bool:
    """Whether a hook is one by which parameters are gathered: torch's or ours."""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).startswith(("torch.distributed.", "fivefold."))


def user_code(module: str) -> bool:
    """Whether a module of Python is neither torch's nor of the standard library, nor ours."""
    top = module.partition(".")[0]
    return (
        bool(top)
        and top not in _FOREIGN
        and (top not in sys.stdlib_module_names or top == "__main__")
    )


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _assigns_globals(code: types.CodeType) -> bool:
    """Whether a function may make globals that are not there yet."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return _STORE_GLOBAL in code.co_code[::2] or any(map(_assigns_globals, inner))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a string or the like: equal ones are the same."""
    return isinstance(value, _SCALARS)


def stayed(one: Any, other: Any) -> bool:
    """Whether a forward that looks at `other` sees what it saw of `one`; of tensors, numbers apart."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return _described(one) == _described(other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(stayed, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other, equal_nan=one.dtype.kind in "fc")
    if isinstance(one, (*_SCALARS, frozenset)):
        return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124 - NaN
    return False


def _untouched(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether a value is as it was put: the same, or one that is equal to the last bit of its content."""
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, Tensor) or depth > _DEEPEST:
        return False
    if isinstance(one, weakref.ReferenceType):
        return True  # a cache, which its owner checks
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(
            _untouched(a, b, depth + 1) for a, b in zip(one, other, strict=True)
        )
    if isinstance(one, dict):
        same = list(one) == list(other)
        return same and all(_untouched(one[key], other[key], depth + 1) for key in one)
    if stayed(one, other):
        return True
    inner = _members(one), _members(other)
    return None not in inner and _untouched(*inner, depth + 1)


def _derived(held: Held, now: Sequence[Any]) -> bool:
    """Whether only what a recurrent layer of torch's keeps of its own parameters has changed."""
    keys = held.container.keys()
    if keys != held.keys or "_flat_weight_refs" not in keys:
        return False
    pairs = zip(keys, held.placed, now, strict=True)
    return all(_untouched(a, b) for key, a, b in pairs if not str(key).startswith("_flat_weight"))


def _members(value: Any) -> dict[str, Any] | None:
    """The attributes of a plain object of the user's."""
    own = getattr(value, "__dict__", None)
    plain = not isinstance(value, (nn.Module, type)) and not callable(value)
    open_ = not type(value).__module__.startswith(_CLOSED)
    return own if plain and open_ and isinstance(own, dict) else None


def _described(tensor: Tensor) -> tuple[Any, ...]:
    """Of a tensor what a forward can see without its numbers."""
    return (
        tuple(tensor.shape), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad,
        isinstance(tensor, nn.Parameter),
    )  # fmt: skip


def _tensors_in(value: Any) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    if isinstance(value, Tensor):
        yield (), value
    elif isinstance(value, tuple):
        for number, item in enumerate(cast(tuple[Any, ...], value)):
            for inner, tensor in _tensors_in(item):
                yield (number, *inner), tensor


def _holds_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, tuple) and any(map(_holds_tensor, value))
    )


def _replaced(value: Any, stand_in: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return stand_in(value)
    if isinstance(value, tuple) and _holds_tensor(value):
        items = [_replaced(item, stand_in) for item in value]
        return type(value)._make(items) if hasattr(value, "_make") else type(value)(items)  # type: ignore[attr-defined]
    return value


def _of_cell(cell: types.CellType, path: str) -> Container:
    def get() -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # not assigned yet
            return ABSENT

    def put(content: Any) -> None:
        if content is ABSENT:
            del cell.cell_contents
        else:
            cell.cell_contents = content

    return _Whole(get, put, path, shared=True)


def _of_array(array: np.ndarray[Any, Any], path: str, shared: bool) -> Container:
    def put(content: Any) -> None:
        array[...] = content

    return _Whole(array.copy, put, path, shared)


def _of_generator(value: Any, path: str) -> Container | None:
    """A generator of random numbers, by its state."""
    if isinstance(value, random.Random):
        return _Whole(value.getstate, value.setstate, path, True, True)
    if isinstance(value, np.random.Generator):

        def put(state: Any) -> None:
            value.bit_generator.state = pickle.loads(state)  # noqa: S301 - our own, from just before

        # As bytes, which can be compared.
        return _Whole(lambda: pickle.dumps(value.bit_generator.state), put, path, True, True)
    return None


def _numpy_state() -> tuple[Any, ...]:
    return cast(tuple[Any, ...], np.random.get_state())  # noqa: NPY002
