"""Whether kernels of several processes overlap, of sleeps in the place of kernels: no GPU was there.

See tests/gpu/test_mps.py for kernels.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import overlapping
from pool import Pool


@pytest.mark.parametrize("size", [2, 3])
def test_sleeps_overlap_and_those_with_a_lock_do_not(size: int, tmp_path: Path) -> None:
    with Pool(size) as pool:
        for locked in (False, True):
            folder = tmp_path / str(locked)
            folder.mkdir()
            found = pool.run("gloo", overlapping.told, str(folder), locked)
            assert len({times for times, _ in found}) == 1
            (times, lines), *others = found
            assert (times > 1.5) == locked, times
            assert not [line for _, said in others for line in said]
            assert len(lines) == locked
            if locked:
                assert lines[0].startswith(
                    f"kernels of the {size} ranks on this GPU do not overlap: "
                )
                assert "\n" not in lines[0] and "instances.mps" in lines[0]
