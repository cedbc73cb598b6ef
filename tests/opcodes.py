"""Random programs of pickle, and what reading them must not do.

    python opcodes.py SEED COUNT FOLDER     reads COUNT programs with every reader of pickles, in this process

Half of the programs are random opcodes, mostly such as find on the stack what they need; half are real files
of which opcodes are left out, doubled, exchanged, or followed by others. What a reader does beside telling
that a file is damaged is printed with the program: calls that the interpreter audits, attributes of modules
and classes that are others afterwards, any other exception.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["attributes", "main", "program"]

_DCP = "torch.distributed.checkpoint."
_GROUPS = (
    (
        ("torch", "Size"), ("torch", "float32"), ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"), ("collections", "OrderedDict"), (_DCP + "metadata", "Metadata"),
        (_DCP + "metadata", "MetadataIndex"), (_DCP + "metadata", "TensorProperties"),
        (_DCP + "metadata", "_MEM_FORMAT_ENCODING"), (_DCP + "filesystem", "_StorageInfo"),
        (_DCP + "metadata", "TensorStorageMetadata"), ("builtins", "getattr"),
    ),
    (
        ("numpy", "dtype"), ("numpy", "ndarray"), ("numpy.core.multiarray", "_reconstruct"),
        ("_codecs", "encode"),
    ),
    (
        ("torch._utils", "_rebuild_tensor_v2"), ("torch", "Tensor"), ("torch", "FloatStorage"),
        ("collections", "OrderedDict"), ("torch", "Size"),
    ),
    (("os", "system"), ("builtins", "eval"), ("builtins", "open"), ("torch", "load")),
)  # fmt: skip
"""names that one reader each allows, and names that none does"""
_NAMES = tuple(name for group in _GROUPS for name in group)
_WORDS = (
    "relative_path", "offset", "length", "fqn", "size", "__setstate__", "__init__", "__class__", "__dict__",
    "TORCH_CHANNELS_LAST", "state_dict_metadata", "storage_data", "latin1", "O8", "|", "planner_data", "cpu",
    "u1", "",
)  # fmt: skip
_NUMBERS = (0, 1, 2, 3, -1, 3072, 0x4141414141414141, 1 << 31, 1 << 63, 10**400)


def _text(draw: random.Random) -> str:
    return draw.choice(_WORDS) if draw.random() < 0.5 else draw.choice(draw.choice(_NAMES))


def _counted(size: str, data: bytes) -> bytes:
    return struct.pack(size, len(data)) + data


def _number(draw: random.Random, form: str) -> bytes:
    small = draw.randrange(4) if draw.random() < 0.9 else draw.choice(_NUMBERS)
    return (small % (1 << 8 * struct.calcsize(form))).to_bytes(struct.calcsize(form), "little")


def _long(draw: random.Random, form: str) -> bytes:
    value = draw.choice(_NUMBERS)
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return _counted(form, data[: 255 if form == "<B" else len(data)])


_ARGUMENTS: dict[str, Callable[[random.Random], bytes]] = {
    "uint1": lambda d: _number(d, "<B"),
    "uint2": lambda d: _number(d, "<H"),
    "int4": lambda d: _number(d, "<i"),
    "uint4": lambda d: _number(d, "<I"),
    "uint8": lambda d: _number(d, "<Q"),
    "float8": lambda d: struct.pack(">d", d.choice((0.0, 1.5, float("nan"), float("inf")))),
    "long1": lambda d: _long(d, "<B"),
    "long4": lambda d: _long(d, "<i"),
    "decimalnl_short": lambda d: b"%d\n" % d.choice(_NUMBERS),
    "decimalnl_long": lambda d: b"%dL\n" % d.choice(_NUMBERS),
    "floatnl": lambda _: b"1.5\n",
    "stringnl": lambda d: repr(_text(d)).encode() + b"\n",
    "stringnl_noescape": lambda d: _text(d).encode() + b"\n",
    "stringnl_noescape_pair": lambda d: "\n".join(d.choice(_NAMES)).encode() + b"\n",
    "unicodestringnl": lambda d: _text(d).encode() + b"\n",
    **{
        f"{kind}{bytes_}": lambda d, size=size: _counted(size, _text(d).encode())
        for kind in ("string", "bytes", "unicodestring", "bytearray")
        for bytes_, size in ((1, "<B"), (4, "<I"), (8, "<Q"))
    },
}


def program(draw: random.Random, real: list[list[bytes]]) -> bytes:
    """Random opcodes, or those of one of `real` in disorder."""
    if draw.random() < 0.5:
        return _random(draw)
    parts = list(draw.choice(real))
    for _ in range(draw.randint(1, 4)):
        at, other = draw.randrange(len(parts)), draw.randrange(len(parts))
        match draw.randrange(4):
            case 0:
                del parts[at]
            case 1:
                parts.insert(at, parts[other])
            case 2:
                parts[at], parts[other] = parts[other], parts[at]
            case _:
                parts.insert(at, _opcode(draw, draw.choice(pickletools.opcodes)))
    return b"".join(parts)


def _random(draw: random.Random) -> bytes:
    depth, found, group = 0, [pickle.PROTO + b"\x04"], draw.choice(_GROUPS)
    names = draw.choice((0.1, 0.5, 0.9))
    for _ in range(draw.randint(3, 40)):
        if draw.random() < names:
            found += _used(draw, group)
            depth += 1
            continue
        opcode = draw.choice(pickletools.opcodes)
        if opcode.name in ("STOP", "PROTO"):
            continue
        if len(opcode.stack_before) > depth and draw.random() < 0.95:
            continue
        found.append(_opcode(draw, opcode))
        depth = max(0, depth + len(opcode.stack_after) - len(opcode.stack_before))
    return b"".join(found) + pickle.STOP


def _used(draw: random.Random, group: Sequence[tuple[str, str]]) -> Iterator[bytes]:
    """A name that is allowed somewhere, and something that a pickle may do with it."""
    yield pickle.GLOBAL + "\n".join(draw.choice(group)).encode() + b"\n"
    word = pickle.BINUNICODE + _counted("<I", _text(draw).encode())
    state = pickle.EMPTY_DICT + word + pickle.NEWTRUE + pickle.SETITEM
    yield draw.choice(
        (
            b"",
            pickle.EMPTY_TUPLE + pickle.NEWOBJ,
            word + pickle.TUPLE1 + pickle.REDUCE,
            state + pickle.BUILD,
            pickle.NONE + state + pickle.TUPLE2 + pickle.BUILD,
        )
    )


def _opcode(draw: random.Random, opcode: pickletools.OpcodeInfo) -> bytes:
    argument = b"" if opcode.arg is None else _ARGUMENTS[opcode.arg.name](draw)
    return opcode.code.encode("latin-1") + argument


def _chunks(data: bytes) -> list[bytes]:
    """The opcodes of a pickle with their arguments; frames left out."""
    told = [(o.name, at) for o, _, at in pickletools.genops(data) if at is not None]
    ends = [at for _, at in told[1:]] + [len(data)]
    return [data[a:b] for (name, a), b in zip(told, ends, strict=True) if name != "FRAME"]


def attributes() -> dict[str, tuple[int, int]]:
    """What every attribute of modules and classes is, that a reader could reach: identity and length."""
    roots = (
        "fivefold",
        "torch.distributed.checkpoint",
        "torch.serialization",
        "torch._weights_only_unpickler",
    )
    exact = (
        "builtins", "collections", "pathlib", "os", "posix", "_codecs", "codecs", "copyreg", "pickle",
        "numpy", "torch", "enum", "torch._utils", "torch._tensor",
    )  # fmt: skip
    found: dict[str, tuple[int, int]] = {}
    for name, module in list(sys.modules.items()):
        if name in exact or name.startswith(roots):
            for key, value in _members(module):
                found[f"{name}.{key}"] = _what(value)
                for inner, held in () if isinstance(value, ModuleType) else _members(value):
                    found[f"{name}.{key}.{inner}"] = _what(held)
    return found


def _members(thing: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(thing, "__dict__"):
        # The last is of a function of torch, which remembers layouts.
        skipped = ("__warningregistry__", "__annotations__", "__doc__", "__builtins__", "cache")
        yield from ((str(k), v) for k, v in list(vars(thing).items()) if k not in skipped)
    if callable(thing):
        for name in ("__defaults__", "__kwdefaults__", "__code__"):
            yield name, getattr(thing, name, None)


def _what(value: Any) -> tuple[int, int]:
    return id(value), len(value) if type(value) in (dict, list, set) else -1


# ---- in a process of its own


def _archive(data: bytes) -> io.BytesIO:
    """What torch.save writes around a pickle."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
        archive.writestr("archive/data/0", bytes(64))
    stream.seek(0)
    return stream


_FORBIDDEN = (
    "os.",
    "subprocess.",
    "exec",
    "compile",
    "import",
    "socket.",
    "ctypes.",
    "shutil.",
    "marshal.",
)


class _Watch:
    """What the interpreter does while it is on; a hook stays for ever."""

    def __init__(self) -> None:
        self.on, self.seen = False, list[str]()
        sys.addaudithook(self._note)

    def _note(self, event: str, given: tuple[Any, ...]) -> None:
        writes = event == "open" and str(given[1] or "r").strip("bt") != "r"
        if event == "import" and str(given[0]).startswith("encodings."):
            return  # the name of an encoding is looked for in that package of Python's, nowhere else
        if self.on and (writes or event.startswith(_FORBIDDEN)):
            self.seen.append(f"{event} {given!r:.200}")


def _real() -> list[list[bytes]]:
    """The opcodes of real files."""
    import numpy as np
    import torch
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint import metadata as own

    size, stored = torch.Size([2, 3]), vars(filesystem)["_StorageInfo"]
    properties = own.TensorProperties(torch.float32)
    chunk = own.ChunkStorageMetadata(torch.Size([0, 0]), size)
    metadata = own.Metadata(
        {
            "w": own.TensorStorageMetadata(properties, size, [chunk]),
            "r": own.BytesStorageMetadata(),
        },
        {"w": ("w",), "r": ("r", 0)},
        {own.MetadataIndex("w", [0, 0], 0): stored("__0_0.distcp", 0, 100)},
        own.StorageMeta(Path("/a")),
        "1.0.0",
    )
    batch = {b"labels": [3], b"data": np.zeros((1, 3072), np.uint8), b"filenames": [b"a"]}
    values = io.BytesIO()
    torch.save({"a": torch.zeros(3), "b": [1, ("x", 2.5)]}, values)
    with zipfile.ZipFile(values) as archive:
        told = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
    each = [pickle.dumps(metadata, p) for p in (2, 4)] + [pickle.dumps(batch, p) for p in (2, 3)]
    return [_chunks(data) for data in (*each, told)]


_LOOK = 500
"""programs after which all attributes are compared"""


def main(seed: int, count: int, folder: Path) -> int:
    """How many programs were read amiss."""
    from fivefold.checkpoint.metadata import contents_of, metadata_of
    from fivefold.checkpoint.values import from_bytes
    from fivefold.data.cifar import Cifar10
    from fivefold.errors import Damaged, DataError

    warnings.simplefilter("ignore")  # torch tells those of protocols that it reads
    path = folder / "test_batch"
    readers: dict[str, Callable[[bytes], object]] = {
        "contents_of": lambda data: contents_of(data, "m"),
        "metadata_of": lambda data: metadata_of(data, "m"),
        "Cifar10": lambda _: Cifar10(folder, train=False),
        "from_bytes": lambda data: from_bytes(_archive(data), "v"),
    }
    real, watch, amiss, read = _real(), _Watch(), 0, 0
    for one in real:  # whatever is looked up once, is now
        for reader in readers.values():
            path.write_bytes(b"".join(one))
            try:
                reader(b"".join(one))
            except (Damaged, DataError):
                continue
            read += 1
    assert read >= len(real), "the real files are read"
    before = attributes()
    for number in range(count):
        data = program(random.Random(f"{seed}/{number}"), real)
        path.write_bytes(data)
        for name, reader in readers.items():
            if problem := _read_amiss(watch, reader, data, (Damaged, DataError)):
                amiss += 1
                print(f"{name}: program {seed}/{number} {data!r}: {problem}", flush=True)
        if number % _LOOK == _LOOK - 1 or number == count - 1:
            now = attributes()
            if changed := sorted(key for key in {*before, *now} if before.get(key) != now.get(key)):
                amiss += 1
                print(
                    f"changed by program {seed}/{number}, or one shortly before: {changed[:5]}",
                    flush=True,
                )
            before = now
        if amiss > 5:
            break
    return amiss


def _read_amiss(
    watch: _Watch,
    reader: Callable[[bytes], object],
    data: bytes,
    documented: tuple[type[Exception], ...],
) -> str:
    watch.seen.clear()
    problem, watch.on = "", True
    try:
        reader(data)
    except documented:
        pass
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        problem = repr(error)
    watch.on = False
    return problem or (f"did {watch.seen[:3]}" if watch.seen else "")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])) > 0)
