"""How a script ends is how its ranks end, whatever a Checkpointer does meanwhile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from commands import CLEAN

SCRIPT = """
import sys
import torch
from fivefold.errors import UsageError
import fivefold as ff
with ff.start() as mesh:
    net = torch.nn.Linear(512, 512)
    data = torch.utils.data.TensorDataset(torch.randn(640, 512), torch.randn(640, 512))
    loader = ff.loader(data, mesh, batch_size=16, seed=0)
    model = ff.parallelize(net, mesh, loss=torch.nn.MSELoss())
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    things = {"model": model, "optim": optim, "data": loader}
    with ff.Checkpointer("run", mesh, local="local", every=1, **things) as ckpt:
        for step, (x, y) in ckpt.resume(loader, 10):
            model.step(x, y)
            optim.step()
            optim.zero_grad()
            ckpt.maybe_save(step)
            if step == 5:
                ENDS
"""


@pytest.mark.long(every=4)
@pytest.mark.parametrize(
    ("ends", "code", "told"),
    [
        ("raise ValueError('not so')", 1, "exited with code 1"),
        ("sys.exit(0)", 0, ""),
        ("sys.exit(75)", 75, "note: the run ended with code 75"),
        ("raise UsageError('not so')", 2, "error: not so (script.py:20)\n"),
    ],
    ids=["error", "well", "again", "mistake"],
)
def test_a_save_under_way_costs_no_exit_code(
    ends: str, code: int, told: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.replace("ENDS", ends))
    done = subprocess.run(
        [sys.executable, "-m", "fivefold", "run", "-n", "2", "script.py"],
        cwd=tmp_path, env=CLEAN | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert told in done.stderr and "terminate called" not in done.stderr
