"""What holds the values that a forward reads, and how it is put back: dicts, lists, closures, generators."""

from __future__ import annotations

import array
import collections
import pickle
import random
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from fivefold.parallel.graph.values import ABSENT, untouched

__all__ = [
    "Bag",
    "ClassItems",
    "Container",
    "ContainerChange",
    "Found",
    "Held",
    "Items",
    "Row",
    "Subset",
    "Whole",
    "named",
    "of_array",
    "of_bytes",
    "of_cell",
    "of_generator",
    "of_slot",
]  # fmt: skip


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
class ClassItems:
    """The attributes of a class of the user's."""

    owner: type
    path: str
    shared: bool = True
    generates: bool = False

    def keys(self) -> list[Any]:
        """See `Container`."""
        return list(vars(self.owner))

    def values(self) -> list[Any]:
        """See `Container`."""
        return list(vars(self.owner).values())

    def put(self, keys: Sequence[Any], values: Sequence[Any]) -> None:
        """See `Container`."""
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
class Whole:
    """Something whose content is one value: a cell of a closure, an array, a generator."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    path: str
    shared: bool = False
    generates: bool = False

    def keys(self) -> list[Any]:
        """See `Container`."""
        return [0]

    def values(self) -> list[Any]:
        """See `Container`."""
        return [self.get()]

    def put(self, keys: Sequence[Any], values: Sequence[Any]) -> None:  # noqa: ARG002 - there is one
        """See `Container`."""
        self.set(values[0])


@dataclass(frozen=True)
class ContainerChange:
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
            if not untouched(self.before.get(key, ABSENT), now.get(key, ABSENT))
        ]
        return [named(self.container, key) for key in changed] or [self.container.path]


def named(container: Container, key: Any) -> str:
    """How a message names a value of a container."""
    if isinstance(container, Row) or (isinstance(container, Items) and not container.members):
        return f"{container.path}[{key!r}]"
    return container.path if isinstance(container, Whole) else f"{container.path}{key}"


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


def of_cell(cell: types.CellType, path: str) -> Container:
    """A cell of a closure."""

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

    return Whole(get, put, path, shared=True)


def of_array(array: np.ndarray[Any, Any], path: str, shared: bool) -> Container:
    """An array, by its content."""

    def put(content: Any) -> None:
        array[...] = content

    return Whole(array.copy, put, path, shared)


def of_bytes(value: bytearray | array.array[Any], path: str, shared: bool) -> Container:
    """Numbers of Python's in a row, by their content."""

    def put(content: bytes) -> None:
        del value[:]
        value.extend(
            content if isinstance(value, bytearray) else array.array(value.typecode, content)
        )

    return Whole(lambda: bytes(value), put, path, shared)


def of_slot(owner: Any, name: str, path: str, shared: bool) -> Container:
    """An attribute of an object whose class lists them in `__slots__`."""

    def put(content: Any) -> None:
        if content is not ABSENT:
            setattr(owner, name, content)
        elif hasattr(owner, name):
            delattr(owner, name)

    return Whole(lambda: getattr(owner, name, ABSENT), put, f"{path}.{name}", shared)


def of_generator(value: Any, path: str) -> Container | None:
    """A generator of random numbers, by its state."""
    if isinstance(value, random.Random):
        return Whole(value.getstate, value.setstate, path, True, True)
    if isinstance(value, np.random.Generator):

        def put(state: Any) -> None:
            value.bit_generator.state = pickle.loads(state)  # noqa: S301 - our own, from just before

        # As bytes, which can be compared.
        return Whole(lambda: pickle.dumps(value.bit_generator.state), put, path, True, True)
    return None
