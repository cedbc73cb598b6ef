"""Memory that the C library keeps between values that stay: the system gets it where a step asks for much."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import sys
from pathlib import Path
import torch
from fivefold.mesh.heap import keep_memory, resident_bytes
from fivefold.parallel.memory.file import FileStore
from fivefold.parallel.memory.spill import Pool
from fivefold.parallel.turns.shelf import Shelf

keep_memory()
torch.set_num_threads(1)
shelf = Shelf(1 << 30, Pool(FileStore(Path(sys.argv[1])), 1 << 20), growth_bytes=int(sys.argv[2]))
size = int(sys.argv[3])
values = [torch.ones(size) for _ in range((300 << 18) // size)]  # 300 MiB
most = resident_bytes()
del values[::2]
before = resident_bytes()
shelf.put_away()
print((most - before) >> 20, (before - resident_bytes()) >> 20)
"""


def given_back(folder: Path, growth_bytes: int, numbers: int) -> tuple[int, int]:
    """MiB, of tensors of so many numbers of which every other one is freed: at once, and as a turn ends."""
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(folder), str(growth_bytes), str(numbers)],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    at_once, later = map(int, done.stdout.split())
    return at_once, later


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap is meant")


@pytest.mark.parametrize(("growth_bytes", "is_much"), [(100 << 20, True), (1 << 30, False)])
def test_what_lies_between_is_given_back(growth_bytes: int, is_much: bool, tmp_path: Path) -> None:
    at_once, later = given_back(tmp_path, growth_bytes, 1 << 16)
    assert at_once < 20
    assert (later > 100) if is_much else (later < 20)


def test_large_blocks_are_given_back_as_they_are_freed(tmp_path: Path) -> None:
    at_once, later = given_back(tmp_path, 1 << 30, 1 << 18)
    assert at_once > 100 and later < 20
