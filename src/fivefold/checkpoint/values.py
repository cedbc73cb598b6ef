"""Values beside tensors: copied when a checkpoint begins, and stored so that reading them executes nothing.

What is read back passes torch's allow-list (`weights_only=True`): numbers, text, bytes, tensors, and
containers of them. Arrays of numpy and bytes travel as tensors.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, cast

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.serialization import skip_data

from fivefold.checkpoint.files import Window
from fivefold.errors import Damaged, UsageError

__all__ = ["decoded", "encoded", "fingerprint", "from_bytes", "leaves", "tensor_of", "to_bytes"]

Path = tuple[str | int, ...]

_ARRAY, _BYTES = "__numpy_array__", "__bytes__"
_COPIED_BYTES = 256 << 10
"""what is smaller is copied once more, which costs less than looking for it"""
_ZIP_NAMES, _ZIP_NAMES_AT = struct.Struct("<HH"), 26
"""lengths of the name and of what follows it, in the header of a record of a zip file, and where"""
_AS_THEY_ARE = (bool, int, float, complex, str, torch.dtype, torch.Size, torch.device)


def encoded(value: object, where: str) -> Any:
    """A copy that can be stored; `where` names the value in the message.

    Raises `UsageError` for anything but numbers, text, bytes, tensors, arrays, and containers of them.
    """
    if value is None or type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, bytes):
        return {_BYTES: torch.from_numpy(np.frombuffer(value, np.uint8).copy())}
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray) and cast(Any, value).dtype.kind in "biufc":
        return {_ARRAY: torch.from_numpy(np.array(value, copy=True))}
    if isinstance(value, np.generic):
        return encoded(value.item(), where)
    made = _container(value, where)
    if made is None:
        raise _refused(value, where)
    return made


def _container(value: object, where: str) -> Any:
    if type(value) in (dict, OrderedDict, Counter):
        items = cast("Mapping[Any, Any]", value).items()
        made = {_key(k, where): encoded(v, f"{where}[{k!r}]") for k, v in items}
        return made if type(value) is dict else cast(Any, type(value))(made)
    if type(value) is set:
        return {_key(member, where) for member in cast("set[Any]", value)}
    if type(value) in (list, tuple):
        members = cast("list[Any]", value)
        return cast(Any, type(value))(encoded(v, f"{where}[{i}]") for i, v in enumerate(members))
    return None


def _key(key: Any, where: str) -> Any:
    """A key of a dict, or a member of a set: these stay as they are."""
    if key is None or type(key) in (bool, int, float, str):
        return key
    if type(key) is tuple:
        return tuple(_key(part, where) for part in cast("tuple[Any, ...]", key))
    raise _refused(key, f"a key of {where}")


def _refused(value: object, where: str) -> UsageError:
    return UsageError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored: a "
        "checkpoint holds numbers, text, bytes, tensors, numpy arrays, and dicts, lists, tuples and sets "
        "of them; let state_dict of that object return such values"
    )


def decoded(value: Any) -> Any:
    """The inverse of `encoded`."""
    if _is_marked(value):
        [(mark, tensor)] = cast("dict[str, Tensor]", value).items()
        return tensor.numpy() if mark == _ARRAY else tensor.numpy().tobytes()
    if type(value) in (dict, OrderedDict, Counter):
        items = cast("Mapping[Any, Any]", value).items()
        made = {key: decoded(member) for key, member in items}
        return made if type(value) is dict else cast(Any, type(value))(made)
    if type(value) in (list, tuple, set):
        return cast(Any, type(value))(map(decoded, cast("list[Any]", value)))
    return value


def _is_marked(value: object) -> bool:
    return type(value) is dict and list(cast("dict[Any, Any]", value)) in ([_ARRAY], [_BYTES])


def to_bytes(value: object) -> io.BytesIO:
    """What DCP stores for a value: what `torch.save` writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


def from_bytes(stream: io.BytesIO, where: str) -> Any:
    """Read a stored value. Raises `Damaged` if it is none, or would execute something."""
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as problem:  # noqa: BLE001 - the file may hold anything
        reason = next(iter(str(problem).strip().splitlines()), type(problem).__name__)
        raise Damaged(f"the value of {where}", "the checkpoint", reason) from None


def tensor_of(data: memoryview, where: str) -> Any:
    """As `from_bytes`, without `requires_grad`; a large tensor is not copied: it changes with `data`."""
    if len(data) < _COPIED_BYTES or (found := _tensor_in(data)) is None:
        return from_bytes(io.BytesIO(data), where)
    return found


def _tensor_in(data: memoryview) -> Tensor | None:
    """The one tensor that `torch.save` wrote; None where that is not certain."""

    def fill(at: int, buffer: memoryview) -> int:
        buffer[:] = data[at : at + len(buffer)]
        return len(buffer)

    try:
        with zipfile.ZipFile(Window(fill, len(data))) as archive:
            records = archive.infolist()
            known = {record.filename.partition("/")[2]: record for record in records}
            record = known["data/0"]
            order = archive.read(known["byteorder"]).decode()
        name, extra = _ZIP_NAMES.unpack_from(data, record.header_offset + _ZIP_NAMES_AT)
        with skip_data():
            window = cast(IO[bytes], Window(fill, len(data)))
            like: object = torch.load(window, "cpu", weights_only=True)
    except Exception:  # noqa: BLE001 - the file may hold anything: `from_bytes` tells what
        return None
    start = record.header_offset + _ZIP_NAMES_AT + _ZIP_NAMES.size + name + extra
    plain = (
        type(like) is Tensor
        and like.layout == torch.strided
        and not (like.is_quantized or like.is_conj() or like.is_neg())
        and like.untyped_storage().nbytes() == record.file_size <= len(data) - start
    )
    one = len(known) == len(records) and "data/1" not in known and not record.compress_type
    if not plain or not one or order != sys.byteorder:
        return None
    held = torch.frombuffer(data, dtype=torch.uint8, offset=start, count=record.file_size)
    like = cast(Tensor, like)
    made = torch.empty(0, dtype=like.dtype, device="cpu")
    return made.set_(held.untyped_storage(), like.storage_offset(), like.size(), like.stride())


def leaves(tree: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The paths and values of nested dicts. What is keyed by anything but text is a leaf itself."""
    for key, value in tree.items():
        inner = cast("dict[Any, Any]", value) if type(value) in (dict, OrderedDict) else {}
        if inner and all(type(name) is str for name in inner) and not _is_marked(inner):
            yield from leaves(inner, (*path, key))
        else:
            yield (*path, key), value


def fingerprint(value: object) -> str:
    """Equal for equal values on every rank; the identity of objects plays no part."""
    found = xxhash.xxh3_128()
    _feed(value, found.update)
    return found.hexdigest()


def _feed(value: object, update: Callable[[Any], object]) -> None:
    if isinstance(value, Tensor):
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        members = cast("Mapping[Any, Any]", value)
        update(f"{type(members).__name__}{len(members)}".encode())
        for key, member in members.items():
            _feed(key, update)
            _feed(member, update)
    elif isinstance(value, list | tuple):
        members = cast("list[Any]", value)
        update(f"{type(members).__name__}{len(members)}".encode())
        for member in members:
            _feed(member, update)
    elif isinstance(value, set):
        update(b"set")  # an empty one is no empty list
        _feed(sorted(map(repr, cast("set[Any]", value))), update)
    else:
        update(f"{type(value).__name__}:{value!r};".encode())
