"""A script of one rank that only names the backend."""

from __future__ import annotations

import subprocess
import sys

__all__ = ["run"]

_ONE = """
import logging, sys, torch
import torch.distributed as dist
logging.basicConfig(format="%(message)s")
{before}
dist.init_process_group("fivefold", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
print(type(dist.group.WORLD).__name__, dist.get_backend(), tensor.tolist())
dist.destroy_process_group()
"""


def run(before: str) -> subprocess.CompletedProcess[str]:
    """What it prints, with `before` run first."""
    done = subprocess.run(
        [sys.executable, "-c", _ONE.format(before=before)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done
