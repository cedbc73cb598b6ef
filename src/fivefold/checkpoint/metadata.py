"""The file `.metadata` of torch.distributed.checkpoint (DCP): a pickle, read without trusting it.

A pickle is a program that may call anything. Here it is data (`fivefold.pickles`), which may name the classes
that DCP writes and nothing else. `contents_of` does not even need torch; `metadata_of` makes torch's own
objects by their constructors, from what was checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, cast

from fivefold.errors import Damaged
from fivefold.pickles import CallResult, Name, NoData, read_pickle

__all__ = ["Contents", "Entry", "Location", "contents_of", "metadata_of"]

_METADATA = "torch.distributed.checkpoint.metadata."
_TOP = _METADATA + "Metadata"
_INDEX = _METADATA + "MetadataIndex"
_TENSOR = _METADATA + "TensorStorageMetadata"
_BYTES = _METADATA + "BytesStorageMetadata"
_CHUNK = _METADATA + "ChunkStorageMetadata"
_PROPERTIES = _METADATA + "TensorProperties"
_FORMAT = _METADATA + "_MEM_FORMAT_ENCODING"
_STORED = "torch.distributed.checkpoint.filesystem._StorageInfo"
_SIZE = "torch.Size"
_ORDERED = "collections.OrderedDict"
_GETATTR = ("builtins.getattr", "__builtin__.getattr")
"""how Python 3.11.0 to 3.11.3 write members of an enumeration: the class, and the name to ask it for"""
_KNOWN = {
    _TOP, _INDEX, _TENSOR, _BYTES, _CHUNK, _PROPERTIES, _FORMAT, _STORED, _SIZE, _ORDERED, *_GETATTR,
    "torch.serialization._get_layout",
    # Where the checkpoint was written to.
    _METADATA + "StorageMeta", "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath",
}  # fmt: skip
_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_MOST_DIMS = 64
_DTYPES = re.compile(
    r"bool|u?int[1-8]|u?int(16|32|64)|b?float16|float(32|64)|b?complex32|complex(64|128)|q(u?int8|int32|uint4x2|uint2x4)"
    r"|float8_e4m3fn(uz)?|float8_e5m2(fnuz)?|float8_e8m0fnu|float4_e2m1fn_x2|bits(8|16|1x8|2x4|4x2)",
    re.ASCII,
)


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint, or another value."""

    name: str
    dtype: str = ""
    """such as float32; empty for a value"""
    shape: tuple[int, ...] = ()
    """of the whole tensor"""


@dataclass(frozen=True)
class Location:
    """Where a tensor, one of its chunks, or a value lies."""

    name: str
    """of the entry"""
    file: str
    start: int
    length: int
    """bytes"""
    transformed: bool = False
    """compressed, for instance"""


@dataclass(frozen=True)
class Contents:
    """What a DCP directory consists of."""

    entries: tuple[Entry, ...]
    parts: tuple[Location, ...]


def contents_of(data: bytes, where: Path | str) -> Contents:
    """What `.metadata` tells, read without torch; `where` is named in errors.

    Raises:
        Damaged: it is no metadata of DCP, names something that DCP does not write, or a file outside of its
            directory.
    """
    return _read(data, where, _contents)


def metadata_of(data: bytes, where: Path | str) -> Any:
    """The same as torch's own `Metadata`, for its readers. Raises `Damaged`.

    What no reader needs stays out: where the checkpoint was written to, and of tensors all but type and size.
    """

    def both(told: object) -> Any:
        _contents(told)
        return _torch(told)

    return _read(data, where, both)


def _read(data: bytes, where: Path | str, judge: Callable[[object], Any]) -> Any:
    try:
        return judge(read_pickle(data, _check_name, _check_call))
    except (NoData, KeyError) as problem:
        told = f"it lacks {problem}" if isinstance(problem, KeyError) else str(problem)
        raise Damaged("the metadata", where, told) from None


def _check_name(name: Name) -> None:
    if str(name) not in _KNOWN and not _is_dtype(name):
        raise NoData(f"it names {name!s:.80}, which is not part of any metadata")


def _is_dtype(name: Name) -> bool:
    return name.module == "torch" and _DTYPES.fullmatch(name.name) is not None


def _check_call(made: CallResult) -> None:
    if str(made.call) in _GETATTR:
        owner, asked = made.given if len(made.given) == 2 else (None, None)
        if str(owner) != _FORMAT or asked not in _FORMATS:
            raise NoData("it asks something for an attribute which is not part of any metadata")


# ---- without torch


def _contents(metadata: object) -> Contents:
    top = _fields(metadata, _TOP)
    entries, stored = _dict(top["state_dict_metadata"]), _dict(top["storage_data"])
    part = _Stored()
    return Contents(
        tuple(_entry(_is(name, str), about) for name, about in entries.items()),
        tuple(part(index, info) for index, info in stored.items()),
    )


def _entry(name: str, about: object) -> Entry:
    if isinstance(about, CallResult) and str(about.call) == _BYTES:
        return Entry(name)
    fields = _fields(about, _TENSOR)
    state = _is(_made(fields["properties"], _PROPERTIES).state, tuple)
    if not state or not isinstance(state[0], Name) or not _is_dtype(state[0]):
        raise NoData(f"the type of {name:.80} is none")
    return Entry(name, state[0].name, _size(fields["size"]))


class _Once:
    """A function whose results are kept: a pickle tells a value once, and may use it any number of times.

    The values themselves outlive it.
    """

    def __init__(self, make: Callable[[object], Any]) -> None:
        self._make, self._known = make, dict[int, Any]()

    def __call__(self, value: object) -> Any:
        if id(value) not in self._known:
            self._known[id(value)] = self._make(value)
        return self._known[id(value)]


class _Stored:
    """What `storage_data` tells, one part after the other."""

    def __init__(self) -> None:
        self._file = _Once(_file)

    def __call__(self, index: object, info: object) -> Location:
        fields = _fields(info, _STORED)
        file, start = self._file(fields["relative_path"]), _count(fields["offset"])
        name = _is(_fields(index, _INDEX)["fqn"], str)
        transformed = bool(fields.get("transform_descriptors"))
        return Location(name, file, start, _count(fields["length"]), transformed)


def _file(name: object) -> str:
    if not isinstance(name, str) or not _stays_inside(name):
        named = f"{name!r:.80}" if isinstance(name, str) else f"{type(name).__name__}"
        raise NoData(f"it names the file {named}, which is outside of the directory")
    return name


def _stays_inside(file: str) -> bool:
    parts = PurePosixPath(file).parts
    plain = bool(parts) and "/".join(parts) == file and "\0" not in file
    return plain and not file.startswith("/") and ".." not in parts


def _size(made: object) -> tuple[int, ...]:
    given = _made(made, _SIZE).given
    numbers = _is(given[0], tuple) if len(given) == 1 else ()
    if len(given) > 1 or len(numbers) > _MOST_DIMS:
        raise NoData("the size of a tensor is none")
    return tuple(map(_count, numbers))


def _count(value: object) -> int:
    """A number of elements or bytes."""
    if _is(value, int) not in range(1 << 63):
        raise NoData("a length or position is negative, or too large for any file")
    return cast(int, value)


def _made(value: object, call: str) -> CallResult:
    if not isinstance(value, CallResult) or str(value.call) != call:
        found = value.call if isinstance(value, CallResult) else type(value).__name__
        raise NoData(f"{found} stands where {call} belongs")
    return value


def _fields(value: object, call: str) -> dict[str, Any]:
    return _dict(_made(value, call).state)


def _dict(value: object) -> dict[Any, Any]:
    if isinstance(value, CallResult) and str(value.call) == _ORDERED:
        return value.items
    return cast("dict[Any, Any]", _is(value, dict))


def _is(value: object, kind: type[Any]) -> Any:
    if type(value) is not kind:
        raise NoData(f"{type(value).__name__} stands where {kind.__name__} belongs")
    return value


# ---- for torch


def _torch(metadata: object) -> Any:
    """Torch's own objects, by their constructors."""
    # By name, as this module also serves where there is no torch.
    torch: Any = import_module("torch")
    own: Any = import_module(_METADATA[:-1])
    stored_info = import_module("torch.distributed.checkpoint.filesystem")._StorageInfo  # noqa: SLF001

    def index(made: object) -> Any:
        fields = _fields(made, _INDEX)
        offset, hint = fields.get("offset"), fields.get("index")
        return own.MetadataIndex(
            fields["fqn"],
            None if offset is None else _size(offset),
            None if hint is None else _count(hint),
        )

    def chunk(made: object) -> Any:
        fields = _fields(made, _CHUNK)
        return own.ChunkStorageMetadata(
            torch.Size(_size(fields["offsets"])), torch.Size(_size(fields["sizes"]))
        )

    def entry(name: str, about: object) -> Any:
        told = _entry(name, about)
        if not told.dtype:
            return own.BytesStorageMetadata()
        properties = own.TensorProperties(getattr(torch, told.dtype))
        chunks = every_chunk(_fields(about, _TENSOR)["chunks"])
        return own.TensorStorageMetadata(properties, torch.Size(told.shape), chunks)

    def stored(key: object, info: object) -> Any:
        part = file_of(key, info)
        # Which transformations there were does not matter: what went through one is not read.
        return stored_info(
            part.file, part.start, part.length, ["transformed"] if part.transformed else None
        )

    file_of, top = _Stored(), _fields(metadata, _TOP)
    every_chunk = _Once(lambda made: [chunk(one) for one in _is(made, list)])
    paths, version = top.get("planner_data"), top.get("version")
    every_path = _Once(_path)
    return own.Metadata(
        {name: entry(name, about) for name, about in _dict(top["state_dict_metadata"]).items()},
        None if paths is None else {_is(k, str): every_path(v) for k, v in _dict(paths).items()},
        {index(key): stored(key, info) for key, info in _dict(top["storage_data"]).items()},
        version=None if version is None else _is(version, str),
    )


def _path(value: object) -> tuple[str | int, ...]:
    return tuple(_is(part, int if type(part) is int else str) for part in _is(value, tuple))
