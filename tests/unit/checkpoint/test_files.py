"""Files of checkpoints: all or nothing, and what was recorded is what happened."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash

from fivefold.checkpoint.files import CRASH_POINTS, FileOps, Written, crash_at, is_temporary
from fivefold.errors import UsageError
from torn import Operation, Recorded

GENERATION = "step-00000001-epoch-1"


def test_a_file_is_there_when_it_is_committed_and_not_before(tmp_path: Path) -> None:
    files, path = FileOps(), tmp_path / "a"
    with files.create(path) as stream:
        stream.write(b"abc")
        stream.write(memoryview(b"def"))
        stream.flush()
        assert stream.tell() == 6 and not path.exists()
        assert list(map(is_temporary, files.list(tmp_path))) == [True]
        written = stream.commit()
    assert written == Written(6, xxhash.xxh3_128_hexdigest(b"abcdef"))
    assert files.read(path) == b"abcdef" and files.list(tmp_path) == ["a"]
    assert files.digest(path) == written and files.size(path) == 6


@pytest.mark.parametrize("files", [FileOps(), Recorded()])
def test_only_its_owner_may_read_a_file(files: FileOps, tmp_path: Path) -> None:
    files.write(tmp_path / "a", [b"weights"])
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_what_is_not_committed_leaves_nothing_and_the_old_file_alone(tmp_path: Path) -> None:
    files, path = FileOps(), tmp_path / "a"
    files.write(path, [b"old"])
    with files.create(path) as stream:
        stream.write(b"new")
    assert files.read(path) == b"old" and files.list(tmp_path) == ["a"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_at_the_commit_leaves_nothing(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(*((os, call) if call == "fsync" else (Path, call)), fail)
    with pytest.raises(OSError, match="injected"):
        FileOps().write(tmp_path / "a", [b"abc"])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_and_leaves_nothing() -> None:
    class Full(FileOps):
        def raw(self, path: Path) -> io.FileIO:  # noqa: ARG002
            return io.FileIO("/dev/full", "w")

        def remove(self, path: Path) -> None:
            removed.append(path.name)

    removed: list[str] = []
    with pytest.raises(OSError, match="No space left"):
        Full().write(Path("a"), [bytes(1 << 21)])
    assert len(removed) == 1 and is_temporary(removed[0])


def test_torch_and_other_writers_find_a_binary_stream(tmp_path: Path) -> None:
    with FileOps().create(tmp_path / "a") as stream:
        assert stream.writable() and not stream.readable() and not stream.seekable()
        with pytest.raises(io.UnsupportedOperation):
            stream.fileno()
        stream.commit()


def test_directories(tmp_path: Path) -> None:
    files, deep = FileOps(), tmp_path / "a" / "b"
    files.make_dir(deep)
    files.make_dir(deep)
    files.write(deep / "c", [b"1"])
    (deep / "link").symlink_to(tmp_path)
    assert files.list(tmp_path / "a") == ["b"] and files.list(tmp_path / "none") == []
    files.rename(deep / "c", tmp_path / "c")
    files.remove_tree(tmp_path / "a")
    assert files.list(tmp_path) == ["c"], "what a link points to stays"
    files.remove(tmp_path / "c")
    files.remove(tmp_path / "c")
    assert files.list(tmp_path) == []


def test_blocks_are_the_file(tmp_path: Path) -> None:
    files, data = FileOps(), os.urandom(2500)
    files.write(tmp_path / "a", [data])
    blocks = [bytes(block) for block in files.blocks(tmp_path / "a", 1000)]
    assert list(map(len, blocks)) == [1000, 1000, 500] and b"".join(blocks) == data


def test_a_recording_tells_what_reached_the_system_and_when(tmp_path: Path) -> None:
    files, path = Recorded(), tmp_path / "d" / "a"
    files.make_dir(path.parent)
    files.write(path, [b"abc", b"def"])
    kinds = [operation.kind for operation in files.operations]
    assert kinds == ["make_dir", "sync_dir", "create", "write", "sync", "rename", "sync_dir"]
    assert files.operations[3].data == b"abcdef"
    assert files.operations[5] == Operation("rename", files.operations[2].path, path)


# ---- crash points

DYING = """
import sys
from pathlib import Path
from fivefold.checkpoint.files import FileOps
FileOps().write(Path(sys.argv[1]), [b"abc", b"def"])
"""


def crashed(told: str, path: Path) -> int:
    done = subprocess.run(
        [sys.executable, "-c", DYING, str(path)], check=False, timeout=60,
        env={**os.environ, "FIVEFOLD_CRASH_AT": told},
    )  # fmt: skip
    return done.returncode


@pytest.mark.parametrize(
    ("point", "left"),
    [("writing", 1), ("before-fsync", 1), ("before-rename", 1), ("after-rename", 0)],
)  # fmt: skip
def test_a_process_dies_at_the_named_point(point: str, left: int, tmp_path: Path) -> None:
    folder = tmp_path / GENERATION
    folder.mkdir()
    assert crashed(point, folder / "a") == -9
    names = FileOps().list(folder)
    assert [is_temporary(name) for name in names] == ([True] if left else [False])
    if point == "before-rename":
        assert (folder / names[0]).read_bytes() == b"abcdef"


def test_only_files_of_generations_are_crash_points(tmp_path: Path) -> None:
    assert crashed("writing", tmp_path / "run.json") == 0
    assert crashed("writing:2", tmp_path / "b") == 0


def test_a_point_that_does_not_exist_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for told in ("writings", "writing:x", "writing@moon"):
        monkeypatch.setenv("FIVEFOLD_CRASH_AT", told)
        with pytest.raises(UsageError, match="FIVEFOLD_CRASH_AT"):
            crash_at("writing")
    monkeypatch.setenv("FIVEFOLD_CRASH_AT", "staged")
    for point in CRASH_POINTS[1:]:
        crash_at(point)
