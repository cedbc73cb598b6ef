"""Saves to a disk that is full: told with its name, and no run that saved nothing ends well."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from commands import CLEAN
from full_disk import on_full_disk, refusal

# Some tensors are small and written in one piece, others by torch's own writer.
SCRIPT = """
import sys
import torch
import fivefold as ff
from torch import nn

net = nn.Sequential(nn.Linear(6, 600), nn.Linear(600, 600), nn.Linear(600, 2))
with ff.start() as mesh:
    model = ff.parallelize(net, mesh, loss=nn.CrossEntropyLoss())
    with ff.Checkpointer(sys.argv[1], mesh, model=model, local="local", every=1) as ckpt:
        for step in (1, 2):
            model.step(*model.shard(torch.randn(4, 6), torch.tensor([0, 1, 0, 1])))
            ckpt.maybe_save(step)
"""


@pytest.mark.long
@pytest.mark.parametrize("ranks", ["1", "2"])
@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_a_full_disk_is_named_and_a_run_without_any_save_fails(ranks: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (full := tmp_path / "full").mkdir()
    options = [
        "-n",
        ranks,
        "--log-dir",
        str(tmp_path / "logs"),
        "train.py",
        str(tmp_path / "saved"),
    ]
    command = [sys.executable, "-m", "fivefold", "run", *options]
    done = on_full_disk(full, command, CLEAN, tmp_path / "train.py")
    assert done.returncode == 1, done.stderr
    assert "CheckpointWarning: step 1 was not saved, and training goes on: writing" in done.stderr
    assert f"writing {full}/local/" in done.stderr
    assert "No space left on device; free space there, or name another directory" in done.stderr
    assert (
        "CheckpointError: the run ends without any save: step 2 was not saved: writing"
        in done.stderr
    )
    assert "enforce fail" not in done.stderr.partition("Traceback")[0]
