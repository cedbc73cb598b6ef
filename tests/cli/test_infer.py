"""`fivefold infer` as it is typed, with real files, ranks and kills."""

from __future__ import annotations

import os
import re
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


def compared(folder: Path, target: np.ndarray, *more: str) -> tuple[float, float]:
    """What is printed of a target, with nothing written: the metric, and the mean loss."""
    tifffile.imwrite(folder / "wanted.tif", target)
    words = [*WORDS[:-2], "--target", "wanted.tif", "--tile", "32", "-n", "2"]
    done = fivefold(*words, *more, cwd=folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    ((metric, loss),) = re.findall(
        r"(?:PSNR|accuracy) (-?[\d.]+)\b.* ([\d.e-]+)$", done.stdout, re.MULTILINE
    )
    assert sorted(path.name for path in folder.iterdir()) == ["a.tif", "wanted.tif", "weights.pt"]
    return float(metric), float(loss)


def test_a_picture_is_compared_with(tmp_path: Path) -> None:
    whole = prepared(tmp_path).double()
    pixels = np.random.default_rng(6).integers(0, 255, (180, 260, 3), dtype=np.uint8)
    psnr, loss = compared(tmp_path, pixels)
    errors = whole - torch.from_numpy(pixels).permute(2, 0, 1).double() / 255
    assert psnr == pytest.approx(-10 * errors.square().mean().log10().item(), abs=0.006)
    assert loss == pytest.approx(errors.abs().mean().item(), rel=0.006)


def test_classes_are_compared_with(tmp_path: Path) -> None:
    whole = prepared(tmp_path)
    classes = np.random.default_rng(6).integers(0, 3, (180, 260), dtype=np.uint8)
    accuracy, loss = compared(tmp_path, classes)
    wanted = torch.from_numpy(classes).long()
    share = (whole.argmax(0) == wanted).double().mean().item()
    assert accuracy == pytest.approx(share, abs=6e-4)
    found = torch.nn.functional.cross_entropy(whole[None], wanted[None]).item()
    assert loss == pytest.approx(found, abs=6e-4)


def test_volumes_of_zarr_stores_are_compared_with(tmp_path: Path) -> None:
    torch.manual_seed(3)
    (tmp_path / "volumes.py").write_text(
        "import torch\n\ndef net():\n    return torch.nn.Conv3d(2, 4, 3, padding=1)\n"
    )
    net = torch.nn.Conv3d(2, 4, 3, padding=1)
    torch.save(net.state_dict(), tmp_path / "weights.pt")
    scans = np.random.default_rng(5).random((2, 2, 9, 12, 11), dtype=np.float32)
    classes = np.random.default_rng(6).integers(0, 4, (2, 9, 12, 11))
    zarr.save_array(tmp_path / "scans.zarr/images", scans)
    zarr.save_array(tmp_path / "truth.zarr/classes", classes)
    done = fivefold(
        "infer", "volumes:net", "--weights", "weights.pt", "--input", "scans.zarr/images", "--target",
        "truth.zarr/classes", "--output", "out.zarr", "--tile", "5", "--argmax",
        cwd=tmp_path, OMP_NUM_THREADS="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    whole = net(torch.from_numpy(scans)).detach()
    share = (whole.argmax(1) == torch.from_numpy(classes)).double().mean().item()
    told = float(re.findall(r"accuracy (\S+),", done.stdout)[0])
    assert told == pytest.approx(share, abs=6e-4)
    assert zarr.open_array(tmp_path / "out.zarr/1", mode="r").shape == (9, 12, 11)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (np.full((180, 260), 3), "--target has classes 3 to 3, and the model tells 3 apart"),
        (np.zeros((180, 260), np.float32), "--target has 1 channels, and the model returns 3"),
        (np.zeros((90, 130, 3), np.uint8), "targets of its size: that has (180, 260) pixels"),
    ],
    ids=["classes", "channels", "size"],
)
def test_other_targets_are_refused(tmp_path: Path, target: np.ndarray, says: str) -> None:
    prepared(tmp_path)
    tifffile.imwrite(tmp_path / "wanted.tif", target)
    done = infer(tmp_path, "--target", "wanted.tif")
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_something_has_to_come_of_it(tmp_path: Path) -> None:
    prepared(tmp_path)
    done = fivefold(*WORDS[:-2], cwd=tmp_path)
    assert done.returncode == 2
    assert "give --target, and no --argmax" in done.stderr


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--input", "b.tif"], "--input b.tif: there is no such file or folder"),
        (["--weights", "a.tif"], "--weights a.tif is no state_dict of this model"),
        (["--output", "a.tif"], "a.tif is there already: name another file, or remove it"),
        (["--output", "."], "is there already: name another folder, or remove it"),
        (["--tile", "0"], "--tile 0: at least 1 is needed"),
        (["--target", "b.tif"], "--target b.tif: there is no such file or folder"),
        (["--target", "."], "both TIFF files, or both arrays of zarr stores"),
    ],
    ids=["input", "weights", "a file", "there", "tile", "target", "another kind"],
)
def test_mistakes_are_told_in_a_line(tmp_path: Path, more: list[str], says: str) -> None:
    prepared(tmp_path)
    done = infer(tmp_path, *more)
    assert done.returncode == 2
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("error:")]
    assert says in line
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tif", "weights.pt"]
