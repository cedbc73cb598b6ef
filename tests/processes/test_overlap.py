"""Whether kernels of several processes overlap, of sleeps in the place of kernels: no GPU was there.

See tests/gpu/test_mps.py for kernels.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import overlapping
from fivefold.launch.environment import RankPlace
from fivefold.mesh.start import _backend  # pyright: ignore[reportPrivateUsage]
from fivefold.plan import Plan
from pool import Pool


@pytest.mark.parametrize("size", [2, 3])
def test_sleeps_overlap_and_those_with_a_lock_do_not(size: int, tmp_path: Path) -> None:
    with Pool(size) as pool:
        for locked in (False, True):
            folder = tmp_path / str(locked)
            folder.mkdir()
            lines, *others = pool.run("gloo", overlapping.told, str(folder), locked)
            assert not any(others)
            assert len(lines) == locked, lines
        told = re.match(
            rf"kernels of the {size} ranks on this GPU do not overlap: together they take (\S+) times as "
            r"long as one alone\. [^\n]*instances\.mps[^\n]*$",
            lines[0],
        )
        assert told and size - 0.5 < float(told[1]), lines


@pytest.mark.parametrize(
    ("devices", "backend"), [("0,1", "cpu:gloo,cuda:nccl"), ("MIG-1,MIG-2", "gloo")]
)
def test_ranks_on_slices_talk_over_gloo(
    devices: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their devices differ, but NCCL takes no slices."""
    uuids = iter(["one", "two"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)

    def properties(_device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=next(uuids))

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    store, cuda, limit = dist.HashStore(), torch.device("cuda", 0), timedelta(seconds=30)

    def chosen(rank: int) -> str:
        place = RankPlace(rank, 2, rank, 2, "local")
        return _backend(place, Plan(), cuda, store, limit)

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(chosen, range(2))] == [backend] * 2
