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

import array
import collections
import dis
import functools
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from fivefold.parallel.graph.containers import (
    Bag,
    ClassItems,
    Container,
    ContainerChange,
    Found,
    Held,
    Items,
    Row,
    Subset,
    Whole,
    named,
    of_array,
    of_bytes,
    of_cell,
    of_generator,
    of_slot,
)  # fmt: skip
from fivefold.parallel.graph.values import (
    ABSENT,
    CLOSED,
    holds_tensor,
    is_scalar,
    replaced,
    tensors_in,
    untouched,
)  # fmt: skip

__all__ = ["Reach", "gathers", "user_code"]


_FOREIGN = (
    "torch", "numpy", "fivefold", "functools", "collections", "logging", "threading", "typing",
)  # fmt: skip
"""packages whose functions and classes read nothing that a user changes"""
_PYTHON: Any = random._inst  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
_CACHED = type(functools.lru_cache(len))
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_MOST = 200_000
"""values that are looked at"""


class Reach:
    """All containers that a forward of `net` can reach, and what they hold now."""

    def __init__(self, net: nn.Module, others: Sequence[tuple[str, Any]] = ()) -> None:
        self.held: list[Held] = []
        self.tensors: list[Found] = []
        self.caches: list[tuple[Any, Any]] = []
        """functions that `functools.lru_cache` keeps results of, and what it has told of them"""
        self.iterators: list[tuple[str, Any, Any]] = []
        """where there is one, itself, and how far it was, if others than the net may use it"""
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
        known = is_scalar(value) or isinstance(value, (Tensor, type, types.ModuleType))
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
        elif isinstance(value, (bytearray, array.array)):
            self._add(of_bytes(value, path, shared), follow=False)
        elif isinstance(value, np.ndarray):
            self._add(of_array(value, path, shared), follow=False)  # a copy, which is another one
        elif callable(value) or isinstance(value, (property, classmethod)):
            self._visit_callable(value, path, shared)
        elif isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
            self.iterators.append((path, value, _progress(value) if shared else None))
        elif (generator := of_generator(value, path)) is not None:
            self._add(generator, follow=False)
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
        self._add(ClassItems(cls, f"{cls.__qualname__}."), skip=_MAGIC)

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
                self._add(of_cell(cell, f"{variable} of {name}"))
        self._todo.append((function.__defaults__ or (), f"defaults of {name}", True))
        self._todo.append((function.__kwdefaults__ or {}, f"defaults of {name}", True))
        self._todo.append((vars(function), f"attributes of {name}", True))
        self._visit_globals(function)

    def _visit_globals(self, function: types.FunctionType) -> None:
        """The globals that a function names, and what it names of the user's modules."""
        # pytest, which rewrites `assert`, puts names there that no source can write.
        names = [name for name in _names_in(function.__code__) if name.isidentifier()]
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
        if where.startswith(CLOSED):
            return
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict) and own and id(own) not in self._seen:
            self._seen[id(own)] = own
            self._add(Items(cast(dict[Any, Any], own), f"{path}.", shared, members=True))
        for cls in type(value).__mro__ if user_code(where) else ():
            slots: Any = vars(cls).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__"):
                    self._add(of_slot(value, name, path, shared))

    def _add(
        self, container: Container, *, skip: frozenset[str] = frozenset(), follow: bool = True
    ) -> None:
        keys, values = container.keys(), container.values()
        held = Held(container, keys, values, values)
        self.held.append(held)
        self._count += len(values)
        for key, value in zip(keys, values, strict=True):
            path = named(container, key)
            for inner, tensor in tensors_in(value):
                self.tensors.append(Found(tensor, container, key, path, inner))
            if follow and not (isinstance(key, str) and key in skip):
                self._todo.append((value, path, container.shared))

    def _add_generators(self) -> None:
        """Python's and numpy's, if the forward may draw from them: other threads may, too."""
        python = Whole(random.getstate, random.setstate, "Python's random", True, True)
        numpy = Whole(_numpy_state, np.random.set_state, "numpy.random", True, True)
        for container, name in ((python, "python"), (numpy, "numpy")):
            if name not in self._draws:
                continue
            values = container.values()
            self.held.append(Held(container, container.keys(), values, values))

    # ---- what has changed

    def put_in_place(self, stand_in: Callable[[Tensor], Tensor]) -> None:
        """Put `stand_in(tensor)` where the net holds a tensor; what is shared stays as it is."""
        for held in self.held:
            if not held.container.shared and any(map(holds_tensor, held.values)):
                held.placed = [replaced(value, stand_in) for value in held.values]
                held.container.put(held.keys, held.placed)

    def changes(self) -> list[ContainerChange]:
        """What has become another since, in the order in which it was reached."""
        found: list[ContainerChange] = []
        for held in self.held:
            now = held.container.values()
            same = len(now) == len(held.placed) and all(map(untouched, held.placed, now))
            if same and held.container.keys() == held.keys:
                continue
            before = dict(zip(held.keys, held.placed, strict=True))
            if not _derived(held, now):
                found.append(ContainerChange(held.container, held.container.keys(), now, before))
        return found

    def advanced(self) -> str | None:
        """An iterator that the forward may have taken something from: it cannot be put back."""
        found = (path for path, it, before in self.iterators if _progress(it) != before)
        return next(found, None)

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


def _progress(iterator: Iterator[Any]) -> Any:
    """How far an iterator is, as far as it shows. Of what shows nothing, every look is another."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, [*map(id, frame.f_locals.values())])
    shown = repr(iterator)
    return object() if " object at 0x" in shown else shown


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _assigns_globals(code: types.CodeType) -> bool:
    """Whether a function may make globals that are not there yet."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return _STORE_GLOBAL in code.co_code[::2] or any(map(_assigns_globals, inner))


def _derived(held: Held, now: Sequence[Any]) -> bool:
    """Whether only what a recurrent layer of torch's keeps of its own parameters has changed."""
    keys = held.container.keys()
    if keys != held.keys or "_flat_weight_refs" not in keys:
        return False
    pairs = zip(keys, held.placed, now, strict=True)
    return all(untouched(a, b) for key, a, b in pairs if not str(key).startswith("_flat_weight"))


def _numpy_state() -> tuple[Any, ...]:
    return cast(tuple[Any, ...], np.random.get_state())  # noqa: NPY002
