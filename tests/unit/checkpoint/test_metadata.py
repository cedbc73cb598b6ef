"""DCP's metadata is a pickle; it is read without running what it asks for, and without torch."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from collections import OrderedDict
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from fivefold.checkpoint.metadata import (
    Contents,
    Entry,
    Location,
    contents_of,
    metadata_of,
)
from fivefold.errors import Damaged

WHERE = "a/.metadata"


_StorageInfo: Any = vars(filesystem)["_StorageInfo"]


def made(file: Any = "__0_0.distcp", start: Any = 0, length: Any = 100) -> Metadata:
    size = torch.Size([2, 3])
    return Metadata(
        {
            "w": TensorStorageMetadata(
                TensorProperties(torch.bfloat16), size, [ChunkStorageMetadata(torch.Size([0, 0]), size)]
            ),
            "rng": BytesStorageMetadata(),
        },
        planner_data=OrderedDict(w=("w",), rng=("rng", 0)),
        storage_data={
            MetadataIndex("w", [0, 0], 0): _StorageInfo(file, start, length),
            MetadataIndex("rng"): _StorageInfo("__1_0.distcp", 7, 9, ["zstd"]),
        },
        storage_meta=StorageMeta(Path("/a"), "id"),
        version="1.0.0",
    )  # fmt: skip


def for_readers() -> Metadata:
    """What `metadata_of` gives for `made()`: what no reader needs is left out."""
    metadata = made()
    metadata.storage_meta = None
    metadata.storage_data[MetadataIndex("rng")].transform_descriptors = ["transformed"]
    return metadata


CONTENTS = Contents(
    (Entry("w", "bfloat16", (2, 3)), Entry("rng")),
    (
        Location("w", "__0_0.distcp", 0, 100),
        Location("rng", "__1_0.distcp", 7, 9, transformed=True),
    ),
)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_what_torch_writes_is_read(protocol: int) -> None:
    data = pickle.dumps(made(), protocol=protocol)
    assert contents_of(data, WHERE) == CONTENTS
    read = metadata_of(data, WHERE)
    assert read == for_readers() and type(read) is Metadata


class ByName(pickle.Pickler):
    """Writes members of enumerations as Python 3.11.0 to 3.11.3 do; `asked` names what is asked for."""

    asked: tuple[Any, str] | None = None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Enum):
            return getattr, self.asked or (type(obj), obj.name)
        return NotImplemented


def by_name(asked: tuple[Any, str] | None = None, protocol: int = 4) -> bytes:
    file = io.BytesIO()
    pickler = ByName(file, protocol)
    pickler.asked = asked
    pickler.dump(made())
    return file.getvalue()


@pytest.mark.parametrize("protocol", [2, 4])
def test_members_of_enumerations_may_be_written_by_name(protocol: int) -> None:
    data = by_name(protocol=protocol)
    assert b"getattr" in data
    assert contents_of(data, WHERE) == CONTENTS
    assert metadata_of(data, WHERE) == for_readers()


@pytest.mark.parametrize("asked", [(Metadata, "__init__"), (torch.Size, "numel"), (dict, "pop")])
def test_nothing_else_is_asked_for_by_name(asked: tuple[Any, str]) -> None:
    with pytest.raises(Damaged, match="which is not part of any metadata"):
        metadata_of(by_name(asked), WHERE)


def test_every_dtype_of_torch_is_known() -> None:
    for dtype in {d for d in vars(torch).values() if isinstance(d, torch.dtype)}:
        metadata = made()
        about = metadata.state_dict_metadata["w"]
        assert isinstance(about, TensorStorageMetadata)
        about.properties.dtype = dtype
        told = contents_of(pickle.dumps(metadata), WHERE).entries[0].dtype
        assert f"torch.{told}" == str(dtype)


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(pickle.dumps(made()))
    code = (
        "import sys\nfrom pathlib import Path\nfrom fivefold.checkpoint import metadata, plain_dcp\n"
        "print(len(metadata.contents_of(Path(sys.argv[1]).read_bytes(), 'm').parts))\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, text=True, check=False,
        timeout=60,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("2\n", "")


WRONG: Any = {"w": 3}


class Evil:
    def __init__(self, call: Any, *given: Any) -> None:
        self.call, self.given = call, given

    def __reduce__(self) -> Any:
        return self.call, self.given


@pytest.mark.parametrize("read", [contents_of, metadata_of])
@pytest.mark.parametrize(
    ("call", "given"),
    [(os.mkdir, ("{0}",)), (eval, ("open({0!r}, 'w')",)), (open, ("{0}", "w")),
     (torch.load, ("{0}",)), (getattr, (torch, "load"))],
)  # fmt: skip
def test_nothing_is_called(read: Any, call: Any, given: tuple[Any, ...], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    metadata = made()
    words = [word.format(str(trace)) if isinstance(word, str) else word for word in given]
    if call is getattr:
        words = [[], "append"]
    metadata.planner_data = Evil(call, *words)
    with pytest.raises(Damaged, match="which is not part of any metadata"):
        read(pickle.dumps(metadata), WHERE)
    assert not trace.exists()


def test_a_name_with_dots_reaches_nothing() -> None:
    for module, name in (("torch", "Size.__init__"), ("torch.serialization", "os.system"),
                         ("torch", "load"), ("builtins", "eval"), ("pathlib", "os.system")):  # fmt: skip
        data = b"\x80\x04" + b"".join(
            pickle.SHORT_BINUNICODE + bytes([len(text)]) + text.encode() for text in (module, name)
        ) + pickle.STACK_GLOBAL + pickle.STOP  # fmt: skip
        for read in (contents_of, metadata_of):
            with pytest.raises(Damaged, match="which is not part"):
                read(data, WHERE)


@pytest.mark.parametrize(
    "file",
    ["../x", "/etc/passwd", "a/../../x", "", ".", "a//b", "a\0b", "./a", 7, ["a"]],
)
def test_files_outside_of_the_directory_are_refused(file: Any) -> None:
    for read in (contents_of, metadata_of):
        with pytest.raises(Damaged, match="which is outside of the directory"):
            read(pickle.dumps(made(file)), WHERE)


@pytest.mark.parametrize(
    "metadata",
    [made(start=-1), made(length=-1), made(start="0"), made(length=None), Metadata({}, None, None),
     Metadata(WRONG, None, {}), Metadata({}, None, WRONG), {}, 3, "x", None],
)  # fmt: skip
def test_nonsense_is_damage(metadata: Any) -> None:
    with pytest.raises(Damaged, match=r"the metadata in a/\.metadata is damaged"):
        contents_of(pickle.dumps(metadata), WHERE)


def test_no_damage_gets_past(tmp_path: Path) -> None:
    """A flipped bit either changes what is told, or is told as damage; nothing hangs or eats memory."""
    data = pickle.dumps(made())
    for at in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        try:
            contents_of(bytes(flipped), WHERE)
        except Damaged:
            continue
    for cut in range(len(data)):
        with pytest.raises(Damaged):
            contents_of(data[:cut], WHERE)
