"""Warnings stand at the line of the user's that led to them, and come once."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from commands import fivefold
from fivefold.errors import warn

SCRIPT = """
import warnings, torch, fivefold as ff
from torch import nn

class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.randn(4, device=x.device)  # here

mesh = ff.start()
model = ff.parallelize(Noisy(3, 4), mesh, loss=lambda y, t: ((y - t) ** 4).mean())
x, t = model.shard(torch.randn(8, 3), torch.randn(8, 4))
for _ in range(3):
    with warnings.catch_warnings():
        pass
    model.step(x, t)  # there
"""


def test_a_warning_stands_at_the_users_line_once_for_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(SCRIPT)
    done = fivefold("run", "--layout", "data=2", "noisy.py", cwd=tmp_path)
    told = [line for line in done.stderr.splitlines() if "Warning: " in line]
    assert done.returncode == 0 and len(told) == 2, done.stderr
    for mark, said in (("# here", "draws random numbers"), ("# there", "the loss '<lambda>'")):
        number = SCRIPT[: SCRIPT.index(mark)].count("\n") + 1
        assert any(f"noisy.py:{number}: UserWarning: " in line and said in line for line in told)


@pytest.mark.parametrize("action", ["error", "always"])
def test_filters_that_ask_for_all_get_all(action: str) -> None:
    for _ in range(2):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter(action)  # type: ignore[arg-type]
            if action == "error":
                with pytest.raises(UserWarning, match="again and again"):
                    warn("again and again")
            else:
                warn("again and again")
                assert len(told) == 1 and told[0].filename == __file__
