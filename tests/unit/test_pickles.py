"""Pickles are data to every reader of them: random programs, and those that were found to do more."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorProperties

import opcodes
from fivefold.checkpoint.metadata import contents_of, metadata_of
from fivefold.data.cifar import Cifar10
from fivefold.errors import Damaged, DataError
from fivefold.pickles import CallResult, Name, NoData, read_pickle


def _fuzz(seed: int, count: int, folder: Path, timeout_s: float) -> None:
    done = subprocess.run(
        [sys.executable, opcodes.__file__, str(seed), str(count), str(folder)],
        capture_output=True, text=True, check=False, timeout=timeout_s,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr[-2000:]


@pytest.mark.long
def test_random_programs_do_nothing_but_be_refused(tmp_path: Path) -> None:
    _fuzz(0, 300, tmp_path, 110)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_many_random_programs(seed: int, tmp_path: Path) -> None:
    _fuzz(seed, 10_000, tmp_path, 1700)


def _text(text: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode()


def _class(kind: type[Any]) -> bytes:
    return b"".join([_text(kind.__module__), _text(kind.__name__), pickle.STACK_GLOBAL])


@pytest.mark.parametrize("kind", [Metadata, StorageMeta, TensorProperties])
@pytest.mark.parametrize("read", [contents_of, metadata_of])
def test_no_state_is_set_of_a_class(read: Any, kind: type[Any]) -> None:
    """What lies on the stack when the state is set may be the class itself, allowed as it is."""
    state = b"".join([pickle.EMPTY_DICT, _text("planted"), pickle.NEWTRUE, pickle.SETITEM])
    pair = b"".join([pickle.NONE, state, pickle.TUPLE2])  # what is set by setattr
    for given in (state, pair):
        data = b"".join([pickle.PROTO + b"\x04", _class(kind), given, pickle.BUILD, pickle.STOP])
        with pytest.raises(Damaged, match="it changes a Name"):
            read(data, "m")
        assert not hasattr(kind, "planted")


@pytest.mark.parametrize("read", [contents_of, metadata_of])
def test_a_short_pickle_takes_a_short_time(read: Any) -> None:
    """A value that holds itself 2 ** 60 times, by way of what the pickle notes: no hash, no text of it."""
    parts = [pickle.PROTO + b"\x04", pickle.EMPTY_TUPLE, pickle.MEMOIZE]
    for level in range(60):
        parts += [2 * (pickle.BINGET + bytes([level])), pickle.TUPLE2, pickle.MEMOIZE]
    key = pickle.EMPTY_DICT + pickle.BINGET + b"\x3c" + pickle.NONE + pickle.SETITEM
    for end, why in ((key, "a tuple stands where a key belongs"), (b"", "tuple stands where")):
        data = b"".join([*parts, end, pickle.STOP])
        with pytest.raises(Damaged, match=why):
            read(data, "m")


class _Forged:
    """An array whose dtype says that its 8-byte elements are objects."""

    def __reduce__(self) -> Any:
        new, given, _ = np.zeros(1, np.uint64).__reduce__()[:3]
        state = (1, (1,), _ForgedType(), False, b"A" * 8)
        return new, given, state


class _ForgedType:
    def __reduce__(self) -> Any:
        return np.dtype, ("O8", False, True), (3, "|", None, None, None, -1, -1, 63)


def test_a_forged_dtype_does_not_reach_numpy(tmp_path: Path) -> None:
    content = {b"data": _Forged(), b"labels": [1]}
    (tmp_path / "test_batch").write_bytes(pickle.dumps(content, 3))
    with pytest.raises(DataError, match="it should hold b'data'"):
        Cifar10(tmp_path, train=False)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_are_read(protocol: int) -> None:
    value = {
        "a": [1, -1, 255, 70_000, 1 << 40, -(1 << 70), True, None, 1.5, "\udc80ä", b"b" * 300],
        "b": ((), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}, "x" * 300),
    }
    assert read_pickle(pickle.dumps(value, protocol), lambda _: None) == value


def test_names_and_calls_stay_data() -> None:
    named: list[Name] = []
    made = read_pickle(pickle.dumps(OrderedDict(a=1), 4), named.append)
    assert isinstance(made, CallResult)
    assert (str(made.call), made.given, made.items) == ("collections.OrderedDict", (), {"a": 1})
    assert named == [Name("collections", "OrderedDict")]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it ends too early"),
        (b"N", "it ends too early"),
        (b".", "takes a value where there is none"),
        (b"X\x05\0\0\0ab.", "it ends too early"),
        (b"N(0.", "it has the opcode '0'"),
        (b"t.", "a mark that it did not set"),
        (b"(N(\x86.", "takes a value where there is none"),
        (b"h\x07.", "a value that it did not note"),
        (b"](NNu.", "it changes a list"),
        (b"}(Nu.", "a key without a value"),
        (b"}NNs.", "a NoneType stands where a key belongs"),
        (b"N)R.", "it calls a NoneType with a tuple"),
        (b"ca\nb\n)R}b}b.", "a second time"),
        (b"NN\x93.", "a name of it is no text"),
        (b"X\x01\0\0\0\xff.", "a text of it is none"),
        (b"\x82\x01.", "it has the opcode"),
        (b"c_codecs\nencode\nX\x03\0\0\0\xe2\x82\xacX\x06\0\0\0latin1\x86R.", "no text of latin1"),
    ],
)
def test_nonsense_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(NoData, match=why):
        read_pickle(data, lambda _: None)
