"""`fivefold infer` as it is typed, with real files, ranks and kills."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from commands import CLEAN, fivefold, python
from fivefold.recipes import models

zarr = pytest.importorskip("zarr", reason="zarr is not installed (extra images)")
tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed (extra images)")
ENVIRON = CLEAN | {"OMP_NUM_THREADS": "1"}


def prepared(folder: Path, size: tuple[int, int] = (90, 130)) -> torch.Tensor:
    """Files in a folder; what the net returns for the whole image."""
    torch.manual_seed(3)
    net = models.build("edsr_small", 10).eval()
    torch.save(net.state_dict(), folder / "weights.pt")
    pixels = np.random.default_rng(5).integers(0, 255, (*size, 3), dtype=np.uint8)
    tifffile.imwrite(folder / "a.tif", pixels, photometric="rgb", tile=(32, 32))
    with torch.no_grad():
        return net(torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255)[0]


WORDS = [
    "infer",
    "edsr_small",
    "--weights",
    "weights.pt",
    "--input",
    "a.tif",
    "--output",
    "out.zarr",
]


def infer(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return fivefold(*WORDS, *more, cwd=folder, OMP_NUM_THREADS="1")


def infer_tiff(folder: Path) -> subprocess.CompletedProcess[str]:
    return infer(folder, "--output", "out.tif", "--tile", "16")


def killed(folder: Path, *more: str, after: Callable[[], bool]) -> None:
    """Begin, and end it by a signal once something has come about."""
    process = subprocess.Popen(
        [python(), "-m", "fivefold", *WORDS, *more], cwd=folder, env=ENVIRON,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    until = time.monotonic() + 100
    while not after():
        assert time.monotonic() < until
        assert process.poll() is None
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


KILLED_AT_THE_THIRD_TILE = """
import os, runpy, signal
import numpy as np

pad, tiles = np.pad, []

def counted(*args, **kwargs):
    tiles.append(pad(*args, **kwargs))
    if len(tiles) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return tiles[-1]

np.pad = counted
runpy.run_module("fivefold", run_name="__main__")
"""
"""the conversion is over sooner than a busy machine looks for its file"""


def expect(folder: Path, wanted: torch.Tensor) -> None:
    found = torch.from_numpy(zarr.open_array(folder / "out.zarr/0", mode="r")[...])
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_an_image_is_written_as_it_is_computed_whole(tmp_path: Path, ranks: str) -> None:
    wanted = prepared(tmp_path)
    done = infer(tmp_path, "--tile", "32", "-n", ranks)
    assert done.returncode == 0, done.stderr
    expect(tmp_path, wanted)


def test_classes(tmp_path: Path) -> None:
    wanted = prepared(tmp_path)
    done = infer(tmp_path, "--tile", "64", "--argmax")
    assert done.returncode == 0, done.stderr
    found = zarr.open_array(tmp_path / "out.zarr/0", mode="r")
    assert found.dtype == np.uint8
    assert (found[...] == wanted.argmax(0).numpy()).mean() > 0.999  # of sums in another order


def test_a_run_that_was_killed_is_gone_on_with(tmp_path: Path) -> None:
    wanted, marks = prepared(tmp_path, (160, 160)), tmp_path / "out.zarr/.done"
    killed(tmp_path, "--tile", "16", after=lambda: marks.is_dir() and len([*marks.iterdir()]) > 5)
    before = {path: path.stat().st_mtime_ns for path in marks.iterdir()}
    assert 5 < len(before) < 100
    chunks = [tmp_path / f"out.zarr/0/c/0/{n // 10}/{n % 10}" for n in range(5)]
    written = [path.stat().st_mtime_ns for path in chunks]
    done = infer(tmp_path, "--tile", "16")
    assert done.returncode == 0, done.stderr
    assert [path.stat().st_mtime_ns for path in chunks] == written, "what was done stays"
    expect(tmp_path, wanted)


def test_a_tiff_file(tmp_path: Path) -> None:
    wanted = prepared(tmp_path)
    done = infer(tmp_path, "--output", "out.tif", "--tile", "32", "--argmax", "-n", "2")
    assert done.returncode == 0, done.stderr
    found = tifffile.imread(tmp_path / "out.tif")
    assert found.dtype == np.uint8
    assert (found == wanted.argmax(0).numpy()).mean() > 0.999  # of sums in another order


@pytest.mark.parametrize("during", ["windows", "conversion"])
def test_a_tiff_file_of_a_run_that_was_killed(tmp_path: Path, during: str) -> None:
    wanted, group = prepared(tmp_path, (160, 160)), tmp_path / "out.tif.zarr"
    more = "--output", "out.tif", "--tile", "16"
    if during == "windows":
        killed(tmp_path, *more, after=(group / ".done/0-5").exists)
    else:
        done = subprocess.run(
            [python(), "-c", KILLED_AT_THE_THIRD_TILE, *WORDS, *more], cwd=tmp_path, env=ENVIRON,
            capture_output=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert (group / "tiff.new").exists()
    assert group.is_dir()
    assert not (tmp_path / "out.tif").exists()
    chunk = group / "0/c/0/0/0"
    written = chunk.stat().st_mtime_ns
    with chunk.open("rb") as opened:
        done = infer_tiff(tmp_path)
        assert done.returncode == 0, done.stderr
        assert os.fstat(opened.fileno()).st_mtime_ns == written, "what was done stays"
    found = torch.from_numpy(tifffile.imread(tmp_path / "out.tif")).movedim(-1, 0)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    names = ["a.tif", "out.tif", "weights.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    before = (tmp_path / "out.tif").stat()
    assert infer_tiff(tmp_path).returncode == 0
    assert (tmp_path / "out.tif").stat() == before


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--input", "b.tif"], "--input b.tif: there is no such file or folder"),
        (["--weights", "a.tif"], "--weights a.tif is no state_dict of this model"),
        (["--output", "a.tif"], "a.tif is there already: name another file, or remove it"),
        (["--output", "."], "is there already: name another folder, or remove it"),
        (["--tile", "0"], "--tile 0: at least 1 is needed"),
    ],
    ids=["input", "weights", "a file", "there", "tile"],
)
def test_mistakes_are_told_in_a_line(tmp_path: Path, more: list[str], says: str) -> None:
    prepared(tmp_path)
    done = infer(tmp_path, *more)
    assert done.returncode == 2
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("error:")]
    assert says in line
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tif", "weights.pt"]
