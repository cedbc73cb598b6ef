"""Values beside tensors: what is stored comes back, and reading executes nothing."""

from __future__ import annotations

import io
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fivefold.checkpoint.values import decoded, encoded, fingerprint, from_bytes, leaves, to_bytes
from fivefold.errors import Damaged, UsageError

numbers = st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | st.booleans()
plain = st.recursive(
    st.none() | numbers | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=20,
)


def through(value: Any) -> Any:
    stream = to_bytes(encoded(value, "it"))
    stream.seek(0)
    return decoded(from_bytes(stream, "it"))


@given(plain)
def test_plain_values_come_back(value: Any) -> None:
    again = through(value)
    assert again == value
    assert type(again) is type(value)
    assert fingerprint(again) == fingerprint(value)


@pytest.mark.parametrize(
    "kind", ["float64", "float32", "int8", "uint16", "uint64", "bool", "complex64"]
)
def test_arrays_come_back(kind: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(kind)
    again = through({"a": [array]})["a"][0]
    assert again.dtype == array.dtype
    assert np.array_equal(again, array)


def test_a_copy_does_not_follow_its_source() -> None:
    source = {"list": [1], "tensor": torch.zeros(2), "array": np.zeros(2)}
    copy = encoded(source, "it")
    source["list"].append(2)
    source["tensor"].add_(1)
    source["array"] += 1
    assert copy["list"] == [1]
    assert copy["tensor"].sum() == decoded(copy)["array"].sum() == 0


@given(plain, plain)
def test_different_values_have_different_fingerprints(one: Any, other: Any) -> None:
    same = repr(one) == repr(other)
    assert (fingerprint(one) == fingerprint(other)) == same or isinstance(one, dict | set)


def test_tensors_count_with_bytes_type_and_shape() -> None:
    zeros = torch.zeros(2, 2)
    others = [
        torch.zeros(4),
        zeros.int(),
        zeros.bfloat16(),
        zeros + 1,
        torch.zeros(2, 2, 1),
        zeros[0, 0],
    ]
    assert len({fingerprint(one) for one in [zeros, *others]}) == 7


class Malice:
    """Calls a function when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def test_reading_executes_nothing(tmp_path: Path) -> None:
    zipped = io.BytesIO()
    torch.save({"a": Malice(tmp_path / "mark")}, zipped)
    for data in (
        zipped.getvalue(),
        pickle.dumps(Malice(tmp_path / "mark")),
        b"",
        b"\x80\x04nonsense",
    ):
        with pytest.raises(Damaged, match="the value of it"):
            from_bytes(io.BytesIO(data), "it")
    assert not (tmp_path / "mark").exists()


def test_what_is_keyed_by_anything_but_text_is_stored_whole() -> None:
    tree = {"a": {"b": 1, "c": {2: 3}}, "d": [{"e": 4}], "f": {}}
    assert dict(leaves(tree)) == {("a", "b"): 1, ("a", "c"): {2: 3}, ("d",): [{"e": 4}], ("f",): {}}


@pytest.mark.parametrize(
    "value", [object(), lambda: 0, np.array([None]), [iter([])], {"a": Path()}, {b"": 1}, {b""}]
)
def test_other_things_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"it.* cannot be stored"):
        encoded(value, "it")
