"""What every Python that a test starts runs first, so that hundreds of short runs take less.

The garbage collector looks less often: the objects that `import torch` makes stay, and looking through them
time and again while they are made takes a sixth of a short run.

And torch's compiler waits until something is compiled. Optimisers and checkpoints import it to be left out of
what it compiles, no more, and that takes as long as the rest of torch.
"""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__: list[str] = []

gc.set_threshold(50_000)

_COMPILER = "torch._dynamo"
_OPTIONS = f"{_COMPILER}.config"
"""which stands alone, and is looked at where nothing is compiled"""
_SOURCE = f"{_COMPILER}.source"
"""whose classes name the sources of fake tensors, for the compiler alone"""


class _Sources(Loader):
    """The classes that torch asks for outside of its compiler; with any other one all of it is read."""

    def __init__(self, load: Callable[[], None]) -> None:
        self._load = load

    def exec_module(self, module: ModuleType) -> None:
        for name in ("ConstantSource", "RandomValueSource"):
            setattr(module, name, type(name, (), {"__init__": lambda *_: None}))

        def another(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {_SOURCE!r} has no attribute {name!r}")
            self._load()
            return getattr(importlib.import_module(_SOURCE), name)

        vars(module)["__getattr__"] = another


class _Late(MetaPathFinder, Loader):
    """A package that is read when more of it is asked for than its options and the two functions below."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._found: ModuleSpec | None = None
        self._module: ModuleType | None = None
        self._there = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _SOURCE and not self._there:
            return ModuleSpec(fullname, _Sources(self._load))
        if fullname.startswith(_COMPILER + ".") and fullname != _OPTIONS:
            self._load()
        if fullname != _COMPILER or self._there:
            return None
        self._found = PathFinder.find_spec(fullname, path, target)
        if self._found is None or self._found.loader is None:
            return None
        spec = ModuleSpec(fullname, self, origin=self._found.origin, is_package=True)
        spec.submodule_search_locations = self._found.submodule_search_locations
        spec.has_location = True
        return spec

    def exec_module(self, module: ModuleType) -> None:
        self._module = module
        vars(module).update(
            disable=self._disable, graph_break=_nothing, __getattr__=self._attribute
        )

    def _load(self) -> None:
        # Whoever holds the lock may wait for what this thread imports: it is not waited for.
        if self._there or not self._lock.acquire(blocking=False):
            return
        try:
            assert self._module is not None
            assert self._found is not None
            assert self._found.loader is not None
            self._there = True
            sys.modules.pop(_SOURCE, None)
            for name in ("source", "disable", "graph_break"):
                vars(self._module).pop(name, None)
            self._module.__spec__, self._module.__loader__ = self._found, self._found.loader
            self._found.loader.exec_module(self._module)
        finally:
            self._lock.release()

    def _attribute(self, name: str) -> Any:
        if f"{_COMPILER}.{name}" == _OPTIONS:
            return importlib.import_module(_OPTIONS)
        if not name.startswith("__"):
            self._load()
            with self._lock:
                if name in vars(self._module):
                    return vars(self._module)[name]
        raise AttributeError(f"module {_COMPILER!r} has no attribute {name!r}")

    def _disable(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Callable[..., Any]:
        disabled: list[Callable[..., Any]] = []

        @functools.wraps(function)
        def called(*given: Any, **named: Any) -> Any:
            if not self._there:
                return function(*given, **named)
            if not disabled:
                assert self._module is not None
                disabled.append(self._module.disable(function, *args, **kwargs))
            return disabled[0](*given, **named)

        return called


def _nothing() -> None:
    """Nothing is compiled that could break."""


sys.meta_path.insert(0, _Late())
