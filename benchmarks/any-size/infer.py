"""Inference window by window, beside whole images and the sliding windows of MONAI.

    pip install --no-deps --target DIR monai==1.6.1
    PYTHONPATH=DIR python benchmarks/any-size/infer.py [--parts pairs,large] [--disk DISK]

The net is a small U-Net with random weights, batch norm with statistics of random images. Every way runs in a
process of its own, after it has run on a small image.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
import zarr
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from bystanders import Bystanders
from figures import Median, environment, ratio, table
from publishing import Page, conditions
from resident import resident
from rounds import order

import fivefold as ff
from fivefold.data.tiff import TiffImages
from fivefold.data.windows import Box, on_windows
from fivefold.recipes.models.unet import unet

HERE = Path(__file__).resolve().parent
MIB = 2**20
SMALL = 256
"""pixels of the image before, which loads what is loaded once"""
REPEATED = 5
"""times that one tile is computed in a process"""
WAYS = ("whole", "ff.infer", "MONAI, constant", "MONAI, gaussian")
OVERLAP = 0.25
"""MONAI's default"""


@dataclass(frozen=True)
class Part:
    """An image, and the edge of its windows, in pixels."""

    edge: int
    tile: int
    rounds: int
    ways: tuple[str, ...] = WAYS


PARTS = {
    "infer-pairs": Part(1536, 512, 7),
    "infer-large": Part(20_000, 1024, 1, ("tile", "file")),
    "infer-medium": Part(4096, 1024, 1, ("tile", "file")),
    "infer-tiny": Part(600, 256, 1, ("tile", "file")),
}
"""the last one tries the script"""


# ---- in a process of its own


def one(way: str, edge: int, tile: int, folder: Path) -> dict[str, Any]:
    """Seconds, and the most bytes of memory beyond what was there; results go to the folder."""
    net = made()
    with torch.no_grad(), ff.start() as mesh:
        if way == "tile":
            image = torch.rand(1, 3, tile, tile)
            classes(net(image))
            every = [measured_once(lambda: classes(net(image))) for _ in range(REPEATED)]
            return {
                "seconds": sorted(told["seconds"] for told in every)[REPEATED // 2],
                "peak_bytes": max(told["peak_bytes"] for told in every),
            }
        model = ff.parallelize(net, mesh)
        if way == "file":
            scaled = on_windows(lambda image: image.float() / 255)
            files = [
                TiffImages([folder / name], transform=scaled) for name in ("small.tif", "large.tif")
            ]
            ff.infer(model, files[0], folder / "small.zarr", tile=tile, then=classes)
            out = folder / "large.zarr"
            return measured_once(lambda: ff.infer(model, files[1], out, tile=tile, then=classes))
        call = calling(way, model, tile)
        call(torch.rand(1, 3, SMALL, SMALL), folder / "small.zarr")
        torch.manual_seed(5)
        image, found = torch.rand(1, 3, edge, edge), list[Tensor | None]()
        told = measured_once(lambda: found.append(call(image, folder / "out.zarr")))
        result = found[0]
        if result is None:
            result = torch.from_numpy(np.asarray(zarr.open_array(folder / "out.zarr/0", mode="r")))
        np.save(folder / "out.npy", result.reshape(2, edge, edge).numpy())
        return told


def made() -> nn.Module:
    """The net: 4 channels at the full size, 16 at a quarter."""
    torch.manual_seed(0)
    net = unet(2, width=4, depth=2)
    with torch.no_grad():
        for _ in range(20):
            net(torch.rand(4, 3, 64, 64))
    return net.eval()


def classes(outputs: Tensor) -> Tensor:
    """What is written of large images."""
    return outputs.argmax(1).byte()


class InMemory:
    """One image, of which windows can be read."""

    def __init__(self, image: Tensor) -> None:
        self.image = image

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> Tensor:
        return self.image

    def sizes(self, _: int) -> tuple[int, ...]:
        """Height and width."""
        return tuple(self.image.shape[1:])

    def window(self, _: int, box: Box) -> Tensor:
        """A part of it."""
        return self.image[box.slices]


def calling(way: str, model: Any, tile: int) -> Callable[[Tensor, Path], Tensor | None]:
    """What a way does with an image; None where the result has been written."""
    if way == "whole":
        return lambda image, _: model.module(image)
    if way == "ff.infer":

        def written(image: Tensor, to: Path) -> None:
            ff.infer(model, InMemory(image[0]), to, tile=tile)

        return written
    sliding_window_inference = import_module("monai.inferers").sliding_window_inference
    mode = way.rpartition(" ")[2]

    def blended(image: Tensor, _: Path) -> Tensor:
        return sliding_window_inference(
            image, (tile, tile), 1, model.module, overlap=OVERLAP, mode=mode
        )

    return blended


def measured_once(call: Callable[[], object]) -> dict[str, Any]:
    """Seconds of a call, and the most bytes that were resident beyond those before."""
    ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps is not there before
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began = time.perf_counter()
    kept = call()
    seconds = time.perf_counter() - began
    del kept
    return {"seconds": seconds, "peak_bytes": resident("VmHWM") - before}


# ---- around them


def asked(way: str, part: Part, folder: Path) -> dict[str, Any]:
    """One run of a way."""
    for name in ("out.zarr", "small.zarr", "large.zarr"):
        shutil.rmtree(folder / name, ignore_errors=True)
    # Forked, since imports would take longer than all the rest; no thread has begun here.
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(one, way, part.edge, part.tile, folder).result()


def own_s() -> float:
    """Processor time of this process and those that it has waited for."""
    every = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in every)


def measured(name: str, disk: Path) -> dict[str, Any]:
    """One part."""
    part, before = PARTS[name], environment()
    others = Bystanders(0, own_s)
    others.begin()
    with tempfile.TemporaryDirectory(dir=disk) as folder:
        ways = _pairs if part.ways == WAYS else _large
        found = ways(part, Path(folder))
    others.were_quiet()
    more = {"torch": torch.__version__, **others.told()}
    result: dict[str, Any] = {"benchmark": "any-size", "part": name, "found": found}
    return {**result, "environment": {**before, **more}} | (
        {"rounds": part.rounds} if part.rounds > 1 else {}
    )


def _pairs(part: Part, folder: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in part.ways}
    whole: np.ndarray | None = None
    for number in range(part.rounds):
        for way in order([*part.ways], number) if number else part.ways:
            told = asked(way, part, folder)
            image: np.ndarray = np.load(folder / "out.npy")
            whole = image if whole is None else whole
            found[way].append(
                {**told, "error": float(np.abs(image - whole).max() / np.abs(whole).max())}
            )
            print(number, way, found[way][-1], flush=True)
    return found


def _large(part: Part, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """One tile alone before and after the image."""
    for name, edge in {"small": SMALL, "large": part.edge}.items():
        tifffile.imwrite(
            folder / f"{name}.tif", _tiles(edge), shape=(edge, edge, 3), dtype=np.uint8,
            photometric="rgb", tile=(512, 512), bigtiff=True,
        )  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {"tile": [], "file": []}
    for way in ("tile", "file", "tile"):
        found[way].append(asked(way, part, folder))
        print(way, found[way][-1], flush=True)
    return found


def _tiles(edge: int) -> Iterator[np.ndarray]:
    numbers = np.random.default_rng(1)
    for _ in range((-(-edge // 512)) ** 2):
        yield numbers.integers(0, 256, (512, 512, 3), dtype=np.uint8)


def section(result: dict[str, Any]) -> str:
    """A table of one part."""
    part = PARTS[result["part"]]
    found = result["found"]
    text = _text_of_pairs(found) if part.ways == WAYS else _text_of_large(part, found)
    title = f"### {part.edge:,} x {part.edge:,} pixels, windows of {part.tile} x {part.tile}"
    return f"{title}\n\n{text}\n\n{_conditions(result)}"


def _conditions(result: dict[str, Any]) -> str:
    if "rounds" in result:
        return conditions(result)
    used = result["environment"]["used_by_others"]
    return f"{conditions(result)[:-1]}; once; cores used by others meanwhile: {used:.0%}."


def _text_of_pairs(found: dict[str, list[dict[str, Any]]]) -> str:
    rows: list[tuple[str, ...]] = []
    for way, every in found.items():
        seconds, peak = (_median(every, name) for name in ("seconds", "peak_bytes"))
        error, compared = max(told["error"] for told in every), ""
        if way != WAYS[0]:
            compared = str(_ratio(every, found[WAYS[0]]))
        rows.append((way, f"{seconds:.2f}", compared, f"{peak / MIB:,.0f}", f"{error:.1e}"))
    return table(("way", "seconds", "of whole", "peak, MiB", "largest error"), rows)


def _text_of_large(part: Part, found: dict[str, list[dict[str, Any]]]) -> str:
    (file,), alone = found["file"], _median(found["tile"], "seconds") / part.tile**2
    speed = alone / (file["seconds"] / part.edge**2)
    own = ", ".join(f"{1e6 * told['seconds'] / part.tile**2:.2f}" for told in found["tile"])
    peak = max(told["peak_bytes"] for told in found["tile"])
    return table(
        ("way", "seconds", "us per pixel", "speed, of a tile's", "peak, MiB"),
        [
            ("one tile alone, before and after", "", own, "", f"{peak / MIB:,.0f}"),
            (
                "ff.infer, from TIFF to classes in zarr", f"{file['seconds']:,.0f}",
                f"{1e6 * file['seconds'] / part.edge**2:.2f}", f"{speed:.2f}",
                f"{file['peak_bytes'] / MIB:,.0f}",
            ),
        ],
    )  # fmt: skip


def _median(every: list[dict[str, Any]], name: str) -> float:
    return float(np.median([told[name] for told in every]))


def _ratio(every: list[dict[str, Any]], whole: list[dict[str, Any]]) -> Median:
    return ratio([told["seconds"] for told in every], [told["seconds"] for told in whole])


PAGE = Page(HERE, section, ("infer-pairs", "infer-large"), "infer.md")


def main() -> int:
    """Measure what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="pairs,large")
    parser.add_argument("--disk", type=Path, default=None, help="folder for 2 GB")
    parser.add_argument("--results", type=Path, default=PAGE.home / "results")
    told = parser.parse_args()
    parts = [f"infer-{word}" for word in told.parts.split(",")]
    if strange := [word for word in parts if word not in PARTS]:
        parser.error(f"there is no {strange[0]}; valid: {', '.join(PARTS)}")
    return PAGE.publish(parts, lambda name: measured(name, told.disk), told.results)


if __name__ == "__main__":
    sys.exit(main())
