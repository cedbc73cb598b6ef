"""Pickles read as data. Nothing that they name is looked up, called or changed.

A pickle is a program: its opcodes fetch functions by name, call them, and set attributes of what they got.
Here a name stays a `Name`, and a call stays a `CallResult`: what would have been called, with what, and the
state that it would have been given. Whoever reads decides what that means. Opcodes that plain values and
objects do not need, and those of the protocols 0 and 1, are refused. Time and memory grow with the length
alone.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

__all__ = ["CallResult", "Name", "NoData", "read_pickle"]


class NoData(ValueError):
    """A pickle is damaged, or does what plain values and objects do not need."""


@dataclass(frozen=True)
class Name:
    """A function or class that a pickle names."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class CallResult:
    """What a call would have given."""

    __slots__ = ("call", "given", "items", "state")

    def __init__(self, call: Name, given: tuple[Any, ...]) -> None:
        self.call, self.given = call, given
        self.state: Any = None
        """what the pickle gives to `__setstate__`; None if nothing"""
        self.items: dict[Any, Any] = {}
        """what it sets by key"""


def read_pickle(
    data: bytes,
    check: Callable[[Name], None],
    check_call: Callable[[CallResult], None] = lambda made: None,  # noqa: ARG005
) -> Any:
    """The value that a pickle tells: None, bool, int, float, str, bytes, tuple, list, dict, `Name` or a call.

    Strings of Python 2, and calls that encode text to bytes, are bytes. The keys of dicts are str, bytes or
    `CallResult`, which is equal to itself alone.

    Args:
        data: the pickle.
        check: called with every name; what it raises is passed on.
        check_call: called with every call, before its state is known; likewise.

    Raises:
        NoData: it is damaged, or does something else.
    """
    machine = _Machine(data, check, check_call)
    try:
        return machine.run()
    except UnicodeDecodeError:
        raise NoData("a text of it is none") from None


_ENCODE = "_codecs.encode"


class _Machine:
    """The stack of values on which the opcodes of a pickle work."""

    def __init__(
        self, data: bytes, check: Callable[[Name], None], check_call: Callable[[CallResult], None]
    ) -> None:
        self._data, self._at = data, 0
        self._check, self._check_call = check, check_call
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Perform all opcodes. Raises `NoData`."""
        data, end = self._data, len(self._data)
        while self._at < end:
            opcode = data[self._at]
            self._at += 1
            if opcode == _STOP:
                return self.pop()
            if opcode not in _BY_NUMBER:
                raise NoData(f"it has the opcode {chr(opcode)!r}, which plain values do not need")
            _BY_NUMBER[opcode](self)
        raise NoData("it ends too early")

    def _take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) < count:
            raise NoData("it ends too early")
        self._at += count
        return found

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _line(self) -> str:
        end = self._data.find(b"\n", self._at)
        found = self._take(max(end - self._at, 0))
        self._take(1)
        return found.decode()

    def pop(self) -> Any:
        """The value on top. Raises `NoData` if there is none since the last mark."""
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise NoData("it takes a value where there is none")
        return self._stack.pop()

    def _top(self, kind: type[Any] | tuple[type[Any], ...]) -> Any:
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            raise NoData("it changes a value where there is none")
        value = self._stack[-1]
        if not isinstance(value, kind):
            raise NoData(f"it changes a {type(value).__name__}, which has no such change")
        return value

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise NoData("it goes back to a mark that it did not set")
        at = self._marks.pop()
        found = self._stack[at:]
        del self._stack[at:]
        return found

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise NoData("a name of it is no text")
        found = Name(module, name)
        self._check(found)
        self._stack.append(found)

    # ---- opcodes with argument

    def skip(self, size: int) -> None:
        self._take(size)

    def unsigned(self, size: int) -> None:
        self._stack.append(self._number(size))

    def signed(self, size: int) -> None:
        self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

    def long(self, size: int) -> None:
        self.signed(self._number(size))

    def float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def bytes(self, size: int) -> None:
        self._stack.append(self._take(self._number(size)))

    def text(self, size: int) -> None:
        self._stack.append(self._take(self._number(size)).decode("utf-8", "surrogatepass"))

    def get(self, size: int) -> None:
        number = self._number(size)
        if number not in self._memo:
            raise NoData("it asks for a value that it did not note")
        self._stack.append(self._memo[number])

    def put(self, size: int) -> None:
        self._memo[self._number(size)] = self._top(object)

    def name_lines(self) -> None:
        module = self._line()
        self._name(module, self._line())

    def constant(self, value: Any) -> None:
        self._stack.append(value)

    def tuple_of(self, count: int) -> None:
        self._stack.append(tuple(reversed([self.pop() for _ in range(count)])))

    # ---- opcodes without

    def put_next(self) -> None:
        self._memo[len(self._memo)] = self._top(object)

    def mark(self) -> None:
        self._marks.append(len(self._stack))

    def new_list(self) -> None:
        self._stack.append([])

    def new_dict(self) -> None:
        self._stack.append({})

    def new_tuple(self) -> None:
        self._stack.append(tuple(self._since_mark()))

    def append(self) -> None:
        value = self.pop()
        self._top(list).append(value)

    def append_all(self) -> None:
        values = self._since_mark()
        self._top(list).extend(values)

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self._set([key, value])

    def set_all(self) -> None:
        self._set(self._since_mark())

    def name(self) -> None:
        name, module = self.pop(), self.pop()
        self._name(module, name)

    def call(self) -> None:
        given, call = self.pop(), self.pop()
        if not isinstance(call, Name) or not isinstance(given, tuple):
            raise NoData(f"it calls a {type(call).__name__} with a {type(given).__name__}")
        made = CallResult(call, cast("tuple[Any, ...]", given))
        self._check_call(made)
        self._stack.append(_bytes(made) if str(call) == _ENCODE else made)

    def build(self) -> None:
        state = self.pop()
        made = self._top(CallResult)
        if made.state is not None:
            raise NoData(f"it sets the state of a {made.call} a second time")
        made.state = state

    def _set(self, pairs: list[Any]) -> None:
        target = self._top((dict, CallResult))
        items = target.items if isinstance(target, CallResult) else cast("dict[Any, Any]", target)
        if len(pairs) % 2:
            raise NoData("it has a key without a value")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            # The hash of a tuple may take for ever: values may stand in it any number of times.
            if not isinstance(key, str | bytes | CallResult):
                raise NoData(f"a {type(key).__name__} stands where a key belongs")
            items[key] = value


def _bytes(made: CallResult) -> bytes:
    """How Python 3 writes bytes into a pickle of protocol 2: a call that encodes text."""
    if len(made.given) == 2 and isinstance(made.given[0], str) and made.given[1] == "latin1":
        try:
            return made.given[0].encode("latin-1")
        except UnicodeEncodeError:
            pass
    raise NoData("it encodes what is no text of latin1")


def _of(action: Callable[[_Machine, Any], None], argument: object) -> Callable[[_Machine], None]:
    return lambda machine: action(machine, argument)


_ACTIONS: dict[bytes, Callable[[_Machine], None]] = {
    pickle.PROTO: _of(_Machine.skip, 1),
    pickle.FRAME: _of(_Machine.skip, 8),
    pickle.NONE: _of(_Machine.constant, None),
    pickle.NEWTRUE: _of(_Machine.constant, True),
    pickle.NEWFALSE: _of(_Machine.constant, False),
    pickle.EMPTY_TUPLE: _of(_Machine.constant, ()),
    pickle.BININT: _of(_Machine.signed, 4),
    pickle.BININT1: _of(_Machine.unsigned, 1),
    pickle.BININT2: _of(_Machine.unsigned, 2),
    pickle.LONG1: _of(_Machine.long, 1),
    pickle.LONG4: _of(_Machine.long, 4),
    pickle.BINFLOAT: _Machine.float,
    pickle.SHORT_BINSTRING: _of(_Machine.bytes, 1),
    pickle.BINSTRING: _of(_Machine.bytes, 4),
    pickle.SHORT_BINBYTES: _of(_Machine.bytes, 1),
    pickle.BINBYTES: _of(_Machine.bytes, 4),
    pickle.BINBYTES8: _of(_Machine.bytes, 8),
    pickle.SHORT_BINUNICODE: _of(_Machine.text, 1),
    pickle.BINUNICODE: _of(_Machine.text, 4),
    pickle.BINUNICODE8: _of(_Machine.text, 8),
    pickle.BINGET: _of(_Machine.get, 1),
    pickle.LONG_BINGET: _of(_Machine.get, 4),
    pickle.BINPUT: _of(_Machine.put, 1),
    pickle.LONG_BINPUT: _of(_Machine.put, 4),
    pickle.MEMOIZE: _Machine.put_next,
    pickle.GLOBAL: _Machine.name_lines,
    pickle.STACK_GLOBAL: _Machine.name,
    pickle.TUPLE1: _of(_Machine.tuple_of, 1),
    pickle.TUPLE2: _of(_Machine.tuple_of, 2),
    pickle.TUPLE3: _of(_Machine.tuple_of, 3),
    pickle.MARK: _Machine.mark,
    pickle.TUPLE: _Machine.new_tuple,
    pickle.EMPTY_LIST: _Machine.new_list,
    pickle.EMPTY_DICT: _Machine.new_dict,
    pickle.APPEND: _Machine.append,
    pickle.APPENDS: _Machine.append_all,
    pickle.SETITEM: _Machine.set_item,
    pickle.SETITEMS: _Machine.set_all,
    pickle.REDUCE: _Machine.call,
    pickle.NEWOBJ: _Machine.call,
    pickle.BUILD: _Machine.build,
}
_BY_NUMBER = {opcode[0]: action for opcode, action in _ACTIONS.items()}
_STOP = pickle.STOP[0]
