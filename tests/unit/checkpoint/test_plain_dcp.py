"""Directories that plain DCP has written: what is wrong with them is found before torch loads it."""

from __future__ import annotations

import io
import pickle
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from fivefold.checkpoint.place import LocalPlace
from fivefold.checkpoint.plain_dcp import is_plain_dcp, read_contents, verify_plain_dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def weights_of() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"w{i}": torch.randn(50, 3, generator=generator) for i in range(4)}


def state() -> dict[str, object]:
    return {"model": weights_of(), "step": 7, "name": "a", "list": [1, torch.arange(5)]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stock")
    dcp.save(state(), checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "copy")


def found(folder: Path, deep: bool = True) -> list[str]:
    checked = verify_plain_dcp(LocalPlace(folder), deep=deep)
    return [f"{problem.name} {problem.what}" for problem in checked.problems]


def test_an_intact_directory(folder: Path) -> None:
    checked = verify_plain_dcp(LocalPlace(folder))
    assert checked.problems == () and checked.parts == 8 and checked.unchecked == 0
    assert verify_plain_dcp(LocalPlace(folder.parent), folder.name) == checked
    assert verify_plain_dcp(LocalPlace(folder), deep=False).unchecked == 8
    entries = {entry.name: entry for entry in read_contents(LocalPlace(folder)).entries}
    assert entries["model.w0"].shape == (50, 3) and entries["model.w0"].dtype == "float32"
    assert entries["step"].dtype == ""


def test_what_is_missing_or_short_is_found(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    assert found(folder, deep=False) == ["__0_0.distcp length"]
    path.unlink()
    assert found(folder, deep=False) == ["__0_0.distcp missing"]
    (folder / ".metadata").write_bytes(b"")
    assert found(folder) == [".metadata unreadable"]
    (folder / ".metadata").unlink()
    assert not is_plain_dcp(LocalPlace(folder))
    with pytest.raises(FileNotFoundError, match="DCP did not write it"):
        verify_plain_dcp(LocalPlace(folder))


def test_a_flipped_bit_of_the_data_is_found(folder: Path) -> None:
    """What torch itself loads without a word."""
    path = folder / "__0_0.distcp"
    good = path.read_bytes()
    weights = weights_of()
    at = good.index(weights["w1"].numpy().tobytes()) + 100
    path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
    loaded = {"model": {"w1": torch.zeros(50, 3)}}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert not torch.equal(loaded["model"]["w1"], weights["w1"])
    (problem,) = verify_plain_dcp(LocalPlace(folder)).problems
    assert problem.detail.startswith("model.w1: the checksum of") and problem.what == "digest"


def test_flipped_bits_change_nothing_unnoticed(folder: Path) -> None:
    """Padding may change, and tables may be refused by torch; tensors may not change."""
    path = folder / "__0_0.distcp"
    good = path.read_bytes()
    chance = random.Random(0)
    weights, noticed = weights_of(), 0
    for _ in range(300):
        at = chance.randrange(8 * len(good))
        flipped = bytearray(good)
        flipped[at // 8] ^= 1 << at % 8
        path.write_bytes(bytes(flipped))
        if found(folder):
            noticed += 1
            continue
        loaded = {name: torch.zeros(50, 3) for name in weights}
        try:
            dcp.load({"model": loaded}, checkpoint_id=folder, no_dist=True)
        except CheckpointException:
            continue
        assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert noticed > 100


def test_parts_without_checksums_are_counted(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    finally:
        torch.serialization.set_crc32_options(before)
    checked = verify_plain_dcp(LocalPlace(tmp_path))
    assert checked.problems == () and checked.unchecked == checked.parts == 8


def test_directories_with_metadata_of_each_rank(tmp_path: Path) -> None:
    dcp.save(state(), checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / ".metadata").rename(tmp_path / "__0.metadata")
    assert is_plain_dcp(LocalPlace(tmp_path)) and found(tmp_path) == []
    (tmp_path / "__0_0.distcp").unlink()
    assert found(tmp_path) == ["__0_0.distcp missing"]


def test_the_same_bytes_are_not_read_again_and_again(folder: Path) -> None:
    """A small metadata may say that any number of parts are one and the same."""
    stored: Any = dcp.FileSystemReader(folder).read_metadata()
    for index, info in stored.storage_data.items():
        info.offset, info.length = 0, (folder / info.relative_path).stat().st_size
        assert index
    (folder / ".metadata").write_bytes(pickle.dumps(stored))
    checked = verify_plain_dcp(LocalPlace(folder))
    assert [p.name for p in checked.problems] == [".metadata"]
    assert "are said to share bytes" in str(checked.problems[0])


def test_records_that_grow_when_they_are_read_are_not_read(folder: Path) -> None:
    stored: Any = dcp.FileSystemReader(folder).read_metadata()
    info = next(iter(stored.storage_data.values()))
    path = folder / info.relative_path
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(1 << 20))
    data = stream.getvalue()
    assert len(data) < 2000
    at = path.stat().st_size
    path.write_bytes(path.read_bytes() + data)
    info.offset, info.length = at, len(data)
    (folder / ".metadata").write_bytes(pickle.dumps(stored))
    checked = verify_plain_dcp(LocalPlace(folder))
    assert "its table of records is not one of torch.save" in str(checked.problems[0])
