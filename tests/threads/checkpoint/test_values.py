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
from torch import Tensor

from fivefold.checkpoint.values import (
    decoded,
    encoded,
    fingerprint,
    from_bytes,
    leaves,
    tensor_of,
    to_bytes,
)
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


def stored(value: Any) -> memoryview:
    return memoryview(bytearray(to_bytes(value).getvalue()))


LARGE = torch.arange(1 << 18, dtype=torch.float32).reshape(512, 512)


@pytest.mark.parametrize(
    "tensor",
    [
        LARGE,
        LARGE.t(),
        LARGE[3::2, 5:],
        LARGE.to(torch.bfloat16),
        LARGE.to(torch.complex64),
        LARGE.to(torch.float8_e5m2),
        LARGE.reshape(2, 2, 256, 256).to(memory_format=torch.channels_last),
        torch.arange(3 << 17).to(torch.uint8),
    ],
)
def test_a_large_tensor_is_read_where_its_bytes_lie(tensor: Tensor) -> None:
    data = stored(tensor)
    with torch.device("meta"):  # what a script has set is for what it makes itself
        found = tensor_of(data, "it")
    assert found.dtype == tensor.dtype and found.stride() == tensor.stride()
    assert torch.equal(found.to(torch.complex64), tensor.to(torch.complex64))
    begin = torch.frombuffer(data, dtype=torch.uint8).data_ptr()
    assert begin < found.data_ptr() < begin + data.nbytes


@pytest.mark.parametrize(
    "value",
    [
        LARGE.to(torch.complex64).conj(),
        LARGE.to(torch.complex64).conj().imag,
        LARGE.to_sparse(),
        [LARGE, LARGE + 1],
        {"text": "x" * (1 << 19)},
        torch.zeros(3),
    ],
)
def test_what_is_no_plain_large_tensor_is_copied(value: Any) -> None:
    data = stored(value)
    found = tensor_of(data, "it")
    data[:] = bytes(data.nbytes)
    again = from_bytes(io.BytesIO(stored(value)), "it")
    assert str(found) == str(again)


def test_a_large_tensor_that_is_damaged_is_told() -> None:
    whole = stored(LARGE)
    for data in (whole[:-2000], whole[1000:], memoryview(bytearray(whole.nbytes))):
        with pytest.raises(Damaged, match="the value of it"):
            tensor_of(data, "it")
