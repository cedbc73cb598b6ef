"""The file `.metadata` of torch.distributed.checkpoint (DCP): a pickle, read without trusting it.

A pickle is a program that may call anything. Here it may name the classes that DCP writes, and nothing else;
`contents_of` does not even need torch, because it puts empty classes of its own in their place.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import EnumMeta
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, cast

from fivefold.errors import Damaged

__all__ = ["Contents", "Entry", "Part", "contents_of", "metadata_of"]

_DCP = "torch.distributed.checkpoint."
_CLASSES = {
    (_DCP + "metadata", "BytesStorageMetadata"),
    (_DCP + "metadata", "ChunkStorageMetadata"),
    (_DCP + "metadata", "Metadata"),
    (_DCP + "metadata", "MetadataIndex"),
    (_DCP + "metadata", "StorageMeta"),
    (_DCP + "metadata", "TensorProperties"),
    (_DCP + "metadata", "TensorStorageMetadata"),
    (_DCP + "metadata", "_MEM_FORMAT_ENCODING"),
    (_DCP + "filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    # Where the checkpoint was written to.
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),
}
_DTYPES = re.compile(
    r"bool|u?int[1-8]|u?int(16|32|64)|b?float16|float(32|64)|complex(32|64|128)|q(u?int8|int32|uint4x2|uint2x4)"
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
class Part:
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
    parts: tuple[Part, ...]


def contents_of(data: bytes, where: Path | str) -> Contents:
    """What `.metadata` tells, read without torch; `where` is named in errors.

    Raises:
        Damaged: it is no metadata of DCP, names something that DCP does not write, or a file outside of its
            directory.
    """
    try:
        # The unpickler in Python: that in C takes any amount of memory that a flipped bit asks for.
        return _contents(_StandIns(io.BytesIO(data)).load())
    except Exception as problem:  # noqa: BLE001 - a damaged pickle raises anything
        raise _damaged(where, problem) from None


def metadata_of(data: bytes, where: Path | str) -> Any:
    """The same as torch's own `Metadata`, for its readers. Raises `Damaged`.

    Of data whose digest is known to be right; `contents_of` is safe also with what is not.
    """
    try:
        metadata = _Allowed(io.BytesIO(data)).load()
        contents_of(data, where)
    except Damaged:
        raise
    except Exception as problem:  # noqa: BLE001
        raise _damaged(where, problem) from None
    return metadata


def _damaged(where: Path | str, problem: Exception) -> Damaged:
    told = str(problem) if isinstance(problem, _Refused) else repr(problem)
    return Damaged("the metadata", where, told)


class _Refused(pickle.UnpicklingError):
    pass


def _allowed(module: str, name: str) -> None:
    if (module, name) not in _CLASSES and not _is_dtype(module, name):
        raise _Refused(f"it names {module}.{name}, which is not part of any metadata")


def _is_dtype(module: str, name: str) -> bool:
    return module == "torch" and _DTYPES.fullmatch(name) is not None


_GETATTR = (("builtins", "getattr"), ("__builtin__", "getattr"))
"""how Python 3.11.0 to 3.11.3 write members of an enumeration: the class, and the name to ask it for"""


def _member(owner: Any, name: Any) -> Any:
    """What may be asked of `getattr`: members of an enumeration that is allowed."""
    if not isinstance(owner, EnumMeta) or name not in owner.__members__:
        raise _not_asked(owner, name)
    return owner.__members__[name]


def _member_of_stand_in(owner: Any, name: Any) -> Any:
    if owner is not _Thing or not isinstance(name, str):
        raise _not_asked(owner, name)
    return _Thing(name)


def _not_asked(owner: Any, name: Any) -> _Refused:
    return _Refused(f"it asks for {name!r:.40} of {owner!r:.40}, which is not part of any metadata")


class _Allowed(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _GETATTR:
            return _member
        _allowed(module, name)
        return getattr(import_module(module), name)


class _StandIns(pickle._Unpickler):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _GETATTR:
            return _member_of_stand_in
        _allowed(module, name)
        if _is_dtype(module, name):
            return name
        return _STAND_INS.get(name, _Thing)


class _Thing:
    """Takes the place of any class: keeps what it is made with and does nothing."""

    def __init__(self, *given: object) -> None:
        self.given = given
        self.state: Any = {}

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Metadata(_Thing):
    pass


class _Index(_Thing):
    pass


class _Storage(_Thing):
    pass


class _Properties(_Thing):
    pass


class _Tensor(_Thing):
    pass


class _Bytes(_Thing):
    pass


_STAND_INS: Mapping[str, Callable[..., object]] = {
    "Metadata": _Metadata,
    "MetadataIndex": _Index,
    "_StorageInfo": _Storage,
    "TensorProperties": _Properties,
    "TensorStorageMetadata": _Tensor,
    "BytesStorageMetadata": _Bytes,
    "Size": tuple,
    "OrderedDict": dict,
}


def _contents(metadata: object) -> Contents:
    top = _fields(metadata, _Metadata)
    entries = _dict(top["state_dict_metadata"])
    stored = _dict(top["storage_data"])
    return Contents(
        tuple(_entry(_is(name, str), about) for name, about in entries.items()),
        tuple(_part(index, info) for index, info in stored.items()),
    )


def _entry(name: str, about: object) -> Entry:
    if isinstance(about, _Bytes):
        return Entry(name)
    fields = _fields(about, _Tensor)
    properties = fields["properties"]
    state: Any = _is(properties, _Properties).state
    dtype = _is(state["dtype"] if isinstance(state, dict) else state[0], str)
    return Entry(name, dtype, tuple(_is(n, int) for n in _is(fields["size"], tuple)))


def _part(index: object, info: object) -> Part:
    fields = _fields(info, _Storage)
    file, start, length = fields["relative_path"], fields["offset"], fields["length"]
    if not isinstance(file, str) or not _stays_inside(file):
        raise _Refused(f"it names the file {str(file)!r:.80}, which is outside of the directory")
    if _is(start, int) < 0 or _is(length, int) < 0:
        raise _Refused(f"a part of {file} begins at {start} and has {length} bytes")
    name = _is(_fields(index, _Index)["fqn"], str)
    return Part(name, file, start, length, bool(fields.get("transform_descriptors")))


def _stays_inside(file: str) -> bool:
    parts = PurePosixPath(file).parts
    plain = bool(parts) and "/".join(parts) == file and "\0" not in file
    return plain and not file.startswith("/") and ".." not in parts


def _fields(thing: object, kind: type[_Thing]) -> dict[str, Any]:
    return _dict(_is(thing, kind).state)


def _dict(value: object) -> dict[Any, Any]:
    return cast("dict[Any, Any]", _is(value, dict))


def _is(value: object, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise _Refused(f"{value!r:.40} stands where a {kind.__name__} belongs")
    return value
