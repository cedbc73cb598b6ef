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
values = [torch.ones(1 << 18) for _ in range(300)]  # 1 MiB each
del values[::2]
before = resident_bytes()
shelf.put_away()
print((before - resident_bytes()) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap is meant")
@pytest.mark.parametrize(("growth_bytes", "given_back"), [(100 << 20, True), (1 << 30, False)])
def test_what_lies_between_is_given_back(
    growth_bytes: int, given_back: bool, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path), str(growth_bytes)],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    mib = int(done.stdout.split()[-1])
    assert (mib > 100) if given_back else (mib < 20), done.stdout
