"""Batches as text and bytes: they come back byte for byte, and nothing that comes is trusted."""

from __future__ import annotations

import contextlib
import json
import struct
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from torch import Tensor

from fivefold.data.windows import Box
from fivefold.errors import UsageError
from fivefold.helpers.decode import DecodeError, decode
from fivefold.helpers.encode import encode, types_in
from fivefold.helpers.messages import fresh


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclass(frozen=True)
class Sample:
    image: Any
    note: str = ""


class Colour(IntEnum):
    RED = 1


def payload_of(parts: list[Any]) -> memoryview:
    joined = b"".join(parts)
    room = fresh(len(joined))
    room[:] = joined
    return room


def sent(batch: Any) -> Any:
    """The batch as it arrives; the text has been JSON."""
    fields, parts = encode(batch)
    return decode(json.loads(json.dumps(fields)), payload_of(parts), types_in(batch))


def raw(tensor: Tensor) -> bytes:
    flat = torch.as_strided(tensor, (tensor.numel(),), (1,)) if tensor.numel() else tensor.flatten()
    return flat.view(torch.uint8).numpy().tobytes()


def same_plain(here: Any, there: Any) -> None:
    if isinstance(here, (float, complex)):
        parts = [struct.pack("dd", complex(x).real, complex(x).imag) for x in (here, there)]
        assert parts[0] == parts[1]
    else:
        assert here == there


def same(here: Any, there: Any) -> None:
    """Fail unless both are equal in type, structure and every byte."""
    assert type(here) is type(there)
    if isinstance(here, Tensor):
        assert (here.dtype, here.shape) == (there.dtype, there.shape)
        if here.numel():
            assert here.stride() == there.stride()
        assert raw(here) == raw(there)
    elif isinstance(here, (np.ndarray, np.generic)):
        assert (here.dtype, here.shape) == (there.dtype, there.shape)
        assert here.tobytes("A") == there.tobytes("A")
        if here.size:
            assert here.strides == there.strides
    elif isinstance(here, dict):
        same(list(here), list(there))
        same(list(here.values()), list(there.values()))
    elif isinstance(here, (tuple, list)):
        assert len(here) == len(there)
        for one, other in zip(here, there, strict=True):
            same(one, other)
    elif isinstance(here, Sample):
        same(here.image, there.image)
    else:
        same_plain(here, there)


DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 5, 4)], ids=str)
def test_every_dtype_and_shape_of_tensors_arrives(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    count = int(np.prod(shape, dtype=int))
    bytes_ = torch.arange(count * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    if dtype is torch.bool:
        bytes_ %= 2
    same(*[tensor := bytes_.view(dtype).view(shape), sent(tensor)])


def test_strides_of_what_fills_its_memory_are_kept() -> None:
    images = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    batch = [
        images.to(memory_format=torch.channels_last),
        images[:, :1].contiguous(memory_format=torch.channels_last),  # ambiguous: one channel
        images.permute(3, 1, 0, 2),
        images.transpose(0, 1),
        np.arange(12).reshape(3, 4).T,
        np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
    ]
    arrived = sent(batch)
    same(batch, arrived)
    assert arrived[0].is_contiguous(memory_format=torch.channels_last)


def test_what_has_gaps_arrives_contiguous_with_its_values() -> None:
    images = torch.arange(60.0).view(3, 4, 5)
    array = np.arange(60).reshape(3, 4, 5)
    batch = [
        images[:, ::2],
        images[1:, 1:, 1:],
        images[:1].expand(3, 4, 5),
        array[:, :, ::-1],
        array[::2],
        np.broadcast_to(array[:1], (3, 4, 5)),
        np.arange(12, dtype=np.uint8)[1:9].view("<u4"),  # not aligned
    ]
    arrived = sent(batch)
    for one, other in zip(batch, arrived, strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other))
        assert np.asarray(other).flags.c_contiguous
        assert np.asarray(other).flags.writeable


def test_a_view_of_conjugates_and_negatives_arrives_as_its_values() -> None:
    batch = [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag]
    assert [item.tolist() for item in sent(batch)] == [[1 - 2j], [-2.0]]


def test_structures_arrive() -> None:
    batch = {
        "pair": Pair(torch.ones(2), [1, 2]),
        ("a", 1): OrderedDict(b=(None, True, False), a=[]),
        7: (),
        None: {"text": "Grüße \ud800", "bytes": b"\x00\xff", "none": b""},
        1.5: Sample(torch.zeros(2, 2), "note"),
        "box": Box.whole((4, 5)),
        "numbers": [0, -1, 10**100, 2**63, 0.1, -0.0, 1e308, 5e-324, float("inf"), -float("inf")],
        "complex": [1 + 2j, complex(float("nan"), -0.0)],
        "scalars": [np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("ab")],
        "arrays": [np.array(["a", "bcd"]), np.array([b"x"]), np.array(["2026-01-01"], "M8[D]")],
        "big endian": np.arange(3, dtype=">i4"),
    }
    same(batch, sent(batch))


@given(st.integers(0, 2**64 - 1))
def test_every_float_arrives_exactly(bits: int) -> None:
    (value,) = struct.unpack("d", struct.pack("Q", bits))
    same(value, sent(value))


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | npst.arrays(
        npst.scalar_dtypes().filter(lambda dtype: dtype.kind not in "OV" and dtype.itemsize),
        npst.array_shapes(min_dims=0, min_side=0, max_dims=3, max_side=4),
    )
    | npst.arrays(np.uint8, npst.array_shapes(min_side=0)).map(torch.from_numpy)
)
keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
batches = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict)
        | st.tuples(inner, inner).map(Pair._make)
        | inner.map(Sample)
    ),
    max_leaves=12,
)


@given(batches)
def test_any_batch_arrives_as_it_was_and_with_the_same_digest(batch: Any) -> None:
    arrived = sent(batch)
    same(batch, arrived)
    assert encode(arrived).digest() == encode(batch).digest()


def test_leaves_begin_at_multiples_of_64_and_are_views_of_the_payload() -> None:
    batch = (torch.ones(3, dtype=torch.uint8), torch.zeros(5), np.arange(3))
    fields, parts = encode(batch)
    payload = payload_of(parts)
    assert [place for _, place, *_ in fields["batch"][1:]] == [(0, 3), (64, 20), (128, 24)]
    assert encode(batch).size_bytes == 152 == len(payload)
    arrived = decode(fields, payload)
    start = np.frombuffer(payload, np.uint8).ctypes.data
    assert [leaf.data_ptr() - start for leaf in arrived[:2]] == [0, 64]
    payload[64:68] = struct.pack("f", 3.0)
    assert arrived[1].tolist() == [3.0, 0, 0, 0, 0]


def test_packing_copies_nothing() -> None:
    tensor = torch.zeros(1000)
    _, parts = encode(tensor)
    tensor[0] = 1.0
    assert bytes(parts[0][:4]) == struct.pack("f", 1.0)


def test_a_long_structure_travels_with_the_payload() -> None:
    batch = [torch.arange(3), [f"a caption, number {n}" for n in range(100_000)]]
    fields, parts = encode(batch)
    assert len(json.dumps(fields)) < 100
    assert encode(batch).size_bytes > 2_000_000
    same(batch, decode(fields, payload_of(parts)))


def test_digests_differ_where_batches_do() -> None:
    image = torch.arange(16.0).view(1, 2, 2, 4)
    batches = [
        image,
        (image,),
        [image],
        image.view(1, 2, 4, 2),
        image.to(memory_format=torch.channels_last),
        image.view(torch.int32),
        image + 1,
        -image,
        image.numpy(),
    ]
    assert len({encode(batch).digest() for batch in batches}) == len(batches)
    assert encode(image).digest() == encode(image.clone()).digest()


class Opaque:
    pass


recursive: list[Any] = []
recursive.append(recursive)


@pytest.mark.parametrize(
    ("batch", "fields"),
    [
        (Opaque(), r"holds test_parcel\.Opaque|holds .*Opaque"),
        ({1, 2}, "holds set, .*in tuples, lists, dicts"),
        (defaultdict(list), r"holds collections\.defaultdict"),
        (Colour.RED, "Colour"),
        (np.array([None]), "of dtype object.*return an array of numbers"),
        (np.zeros(2, dtype=[("a", int)]), "of dtype"),
        (torch.ones(2, requires_grad=True), "requires a gradient.*detach"),
        (torch.nn.Parameter(torch.ones(2), requires_grad=False), "as_subclass"),
        (torch.ones(2, device="meta"), "on meta.*leave batches on the CPU"),
        (torch.ones(2, 2).to_sparse(), "layout torch.sparse_coo"),
        (recursive, "nested too deeply"),
        (10**5000, "digits"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_travel_is_refused_by_name_with_the_remedy(batch: Any, fields: str) -> None:
    with pytest.raises(UsageError, match=fields):
        encode([torch.ones(2), batch])


def test_only_types_of_our_own_batches_are_built() -> None:
    fields, parts = encode(Pair(1, Sample(2)))
    for known in (None, types_in(Pair(1, 2)), types_in([])):
        with pytest.raises(DecodeError, match="first batch does not"):
            decode(fields, payload_of(parts), known)
    other = type("Other", (tuple,), {"__new__": lambda _, a, b, c: (a, b, c)})
    with pytest.raises(DecodeError, match="no batch"):
        decode(
            fields, payload_of(parts), {**types_in(Pair(1, Sample(2))), f"{__name__}.Pair": other}
        )


GOOD = (
    {"x": torch.arange(12.0).view(3, 4), "y": np.arange(6).reshape(2, 3).T},
    Pair([1.5, "a", b"bytes"], Box.whole((3, 4))),
)


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"tree": [0, 10**9]},
        {"tree": [0, 3]},
        [],
        ["unknown"],
        ["tensor"],
        ["tensor", [0, 4], "float32", [-1]],
        ["tensor", [0, 4], "float32", [2]],
        ["tensor", [0, 4], "float31", [1]],
        ["tensor", [-4, 4], "float32", [1]],
        ["tensor", [0, 1 << 60], "uint8", [1 << 60]],
        ["tensor", [0, 16], "float32", [2, 2], [1 << 40, 1]],
        ["tensor", [0, 16], "float32", [2, 2], [-1, 2]],
        ["tensor", [0, 16], "float32", [2, 2], [0, 0]],
        ["tensor", [0, 16], "float32", [4], ["1"]],
        ["tensor", [0, 16], "float32", 4],
        ["array", [0, 16], "|O", [2]],
        ["array", [0, 8], "O", [1]],
        ["array", [0, 8], "V8", [1]],
        ["array", [0, 8], [["a", "<f8"]], [1]],
        ["array", [0, 16], "<f8", [2], [1 << 40]],
        ["array", [0, 16], "<f8", [2], [-8]],
        ["array", [0, 0], "<f8", [0, -3]],
        ["bytes", [0, 10**9]],
        ["dict", [["list", 1]], 2],
        ["dict", [1, 2], 3],
        ["named", "os.system", "true"],
        ["data", "builtins.eval", "1"],
        ["data", "fivefold.data.windows.Box", 1],
        ["nan", "zz"],
        ["range", 0, 1, 0],
    ],
    ids=str,
)
def test_what_is_no_parcel_is_refused(tree: Any) -> None:
    with pytest.raises(DecodeError):
        decode({"batch": tree}, fresh(64))
    with pytest.raises(DecodeError):
        decode({}, fresh(64))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.floats() | st.text(max_size=3)
    | st.sampled_from(["tensor", "array", "float32", "<f8", "named", "data", "dict", "list"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=20,
)  # fmt: skip


@given(values)
def test_nothing_but_a_parcel_error_comes_of_any_tree(tree: Any) -> None:
    with contextlib.suppress(DecodeError):
        decode({"batch": tree}, fresh(64), types_in(GOOD))


@given(st.data())
def test_nothing_but_a_parcel_error_comes_of_a_damaged_parcel(data: st.DataObject) -> None:
    fields, parts = encode(GOOD)
    text = bytearray(json.dumps(fields).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(32, 126))
    with contextlib.suppress(DecodeError, json.JSONDecodeError):
        tree = json.loads(text)
        decode(tree if isinstance(tree, dict) else {}, payload_of(parts), types_in(GOOD))
