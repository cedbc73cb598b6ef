"""Autoencoders of diffusers: whole, with the tiles of its own, in turns and in tiles.

    python benchmarks/autoencoders/run.py [--parts pairs,large,families,planned]

The configuration is the published one of SDXL, or that of a family with fewer channels; weights are random,
the arithmetic is float32. Every decoding of SDXL's runs in a process of its own, after another one, and every
family in one, on one thread. What is planned is told of the published configurations without computing.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from families import FAMILIES, PUBLISHED, UNTILED, decoder, enable_tiling, made
from figures import Median, environment, ratio, table
from publishing import Page, conditions
from resident import resident
from rounds import order

import fivefold as ff
from fivefold.integrations.diffusers import tiled
from fivefold.parallel.program.memory import predicted
from real_torchvision import declare_missing

HERE = Path(__file__).resolve().parent
MIB = 2**20
PLANNED = 64
"""edge of a latent up to which it is decoded once before: plans are made once for a size"""
WAYS = {
    "whole": "",
    "enable_tiling": "",
    "2 x 2 turns": 'tiles.turns = "height=2,width=2"',
    "4 x 4 turns": 'tiles.turns = "height=4,width=4"',
    "2 ranks, width=2": "layout.width = 2",
}
SDXL: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
    "sample_size": 1024,
}


@dataclass(frozen=True)
class Part:
    """The edge of a latent, an eighth of the image's, and how it is decoded."""

    edge: int
    rounds: int
    ways: tuple[str, ...] = tuple(WAYS)


PARTS = {
    "pairs": Part(32, 7),
    "large": Part(128, 1, ("whole", "enable_tiling", "4 x 4 turns")),
    "tiny": Part(16, 1, ("whole", "2 x 2 turns")),
}
"""the last one tries the script"""
FAMILY_ROUNDS = 3
TURNS = "2 x 2 turns"
PLANS = ((1, 2), (2, 2), (4, 4))
"""tiles along height and width, for which memory is told"""


# ---- in a process of its own


def one(way: str, edge: int, out: Path) -> None:
    """Decode, and write what it took, and the image of the first rank."""
    declare_missing()
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    vae: Any = AutoencoderKL(**SDXL).eval()
    small, latent = torch.randn(1, 4, 16, 16), torch.randn(1, 4, edge, edge)
    with torch.no_grad(), ff.start(ff.Plan.parse(WAYS[way])) as mesh:
        if way == "enable_tiling":
            # Tiles of a fixed size in pixels: for small images as large as for large ones, relatively.
            vae.enable_tiling()
            vae.tile_sample_min_size, vae.tile_latent_min_size = 4 * edge, edge // 2
        elif WAYS[way]:
            tiled(vae, mesh)
        vae.decode(latent if edge <= PLANNED else small)
        told, image = taken(lambda: vae.decode(latent).sample)
        (out / f"{mesh.rank}.json").write_text(json.dumps(told))
        if not mesh.rank:
            torch.save(image, out / "image.pt")


def family(name: str, out: Path) -> None:
    """Decode and encode with an autoencoder in every way, by turns; write what each took."""
    declare_missing()
    vae, found = made(name), dict[str, list[dict[str, float]]]()
    latent, image = torch.randn(FAMILIES[name].latent), torch.randn(FAMILIES[name].image)
    with torch.no_grad(), ff.start(ff.Plan.parse(WAYS[TURNS])) as mesh:
        ways = {"whole": vae, TURNS: tiled(copy.deepcopy(vae), mesh)}
        if name not in UNTILED:
            ways["enable_tiling"] = copy.deepcopy(vae)
            enable_tiling(name, ways["enable_tiling"])
        calls: dict[str, Callable[[Any], Any]] = {
            "decode": lambda net: net.decode(latent).sample,
            "encode": lambda net: _encoded(net.encode(image)),
        }
        for what, call in calls.items():
            whole = call(vae)
            call(ways[TURNS])  # plans are made once for a size
            for number in range(FAMILY_ROUNDS):
                for way in order([*ways], number):
                    told, made_here = taken(lambda call=call, way=way: call(ways[way]))
                    told["error"] = float((made_here - whole).abs().max() / whole.abs().max())
                    found.setdefault(f"{what}: {way}", []).append(told)
    (out / "0.json").write_text(json.dumps(found))


def planned(name: str, out: Path) -> None:
    """What one rank is told to need for decoding with a published configuration, by tiles."""
    declare_missing()
    net, latent = decoder(name), torch.empty(PUBLISHED[name].latent, device="meta")
    found: dict[str, int] = {}
    for height, width in PLANS:
        plan = ff.Plan(layout=ff.Layout(height=height, width=width))
        told = predicted(net, plan, rank=0, inputs=latent)
        found |= {"parameters": told.parameters_bytes, f"{height} x {width}": told.peak_bytes}
    (out / "0.json").write_text(json.dumps(found))


def _encoded(found: Any) -> torch.Tensor:
    return found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latent


def taken(call: Callable[[], torch.Tensor]) -> tuple[dict[str, float], torch.Tensor]:
    """Seconds, those of processors, the most resident bytes beyond those before; and what it gave."""
    ctypes.CDLL(None).malloc_trim(0)  # what the C library keeps is not there before
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    began, worked = time.perf_counter(), time.process_time()
    found = call()
    told = {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - worked,
        "peak_bytes": resident("VmHWM") - before,
    }
    return told, found


# ---- around them


def asked(way: str, edge: int, out: Path) -> dict[str, Any]:
    """One decoding: seconds, the most bytes of any rank, and the image."""
    ranks = 2 if "ranks" in way else 1
    threads = str(max(1, (os.cpu_count() or 1) // ranks))
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "fivefold", "run", "-n", str(ranks)]
    for path in out.iterdir():
        path.unlink()
    subprocess.run(
        [*start, __file__, "--one", way, str(edge), str(out)],
        check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": threads},
    )  # fmt: skip
    told = [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: max(one[name] for one in told) for name in told[0]}


def every_one(part: str, names: Iterable[str]) -> dict[str, Any]:
    """Every family or configuration, after another one."""
    before, found = environment(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            subprocess.run(
                [sys.executable, __file__, f"--{part}", name, folder],
                check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            found[name] = json.loads((Path(folder) / "0.json").read_text())
            print(name, found[name], flush=True)
    more = {"torch": torch.__version__, "load": os.getloadavg()[2]}
    return {
        "benchmark": "autoencoders", "part": part, "found": found,
        "environment": {**before, **more},
    }  # fmt: skip


def measured(name: str) -> dict[str, Any]:
    """One part."""
    if name in EACH:
        return every_one(name, EACH[name])
    part, before = PARTS[name], environment()
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in part.ways}
    with tempfile.TemporaryDirectory() as folder:
        whole = None
        for number in range(part.rounds):
            for way in order([*part.ways], number) if number else part.ways:
                told = asked(way, part.edge, Path(folder))
                image = torch.load(Path(folder) / "image.pt")
                whole = image if whole is None else whole
                told["error"] = float((image - whole).abs().max() / whole.abs().max())
                found[way].append(told)
                print(name, number, way, told, flush=True)
    more = {"torch": torch.__version__, "disturbed_rounds": 0}
    return {
        "benchmark": "autoencoders", "part": name, "found": found,
        "environment": {**before, **more},
    } | ({"rounds": part.rounds} if part.rounds > 1 else {})  # fmt: skip


def _ratio(found: dict[str, list[dict[str, Any]]], way: str) -> Median:
    seconds = {name: [told["seconds"] for told in every] for name, every in found.items()}
    return ratio(seconds[way], seconds["whole"])


def _of_families(result: dict[str, Any]) -> str:
    """A table for each family."""
    text = ["### Other families"]
    for name, found in result["found"].items():
        rows: list[tuple[str, ...]] = []
        for way, every in found.items():
            seconds, peak = (
                sorted(told[key] for told in every)[len(every) // 2]
                for key in ("cpu_seconds", "peak_bytes")
            )
            error = max(told["error"] for told in every)
            rows.append((way, f"{seconds:.1f}", f"{peak / MIB:,.0f}", f"{error:.1e}"))
        shape = " x ".join(map(str, FAMILIES[name].image[2:]))
        header = ("way", "processor seconds", "peak, MiB", "largest error")
        text += [f"`{name}`, {shape}:", table(header, rows)]
    load = result["environment"]["load"]
    text.append(f"{conditions(result)[:-1]}; medians of {FAMILY_ROUNDS} rounds; load {load:.0f}.")
    return "\n\n".join(text)


def _of_plans(result: dict[str, Any]) -> str:
    """A table of published configurations."""
    rows: list[tuple[str, ...]] = []
    for name, told in result["found"].items():
        sizes = (f"{size / MIB:,.0f}" for size in told.values())
        rows.append((name, f"`{PUBLISHED[name].family}`", PUBLISHED[name].image, *sizes))
    tiles = [f"{height} x {width}" for height, width in PLANS]
    header = ("model", "class", "image or clip", "parameters", *tiles)
    return f"### Memory of a tile, predicted, MiB\n\n{table(header, rows)}\n\n{conditions(result)}"


def section(result: dict[str, Any]) -> str:
    """The tables of one part."""
    if result["part"] in EACH:
        return (_of_families if result["part"] == "families" else _of_plans)(result)
    found, edge = result["found"], PARTS[result["part"]].edge
    rows: list[tuple[str, ...]] = []
    for way, every in found.items():
        middle = len(every) // 2
        seconds = sorted(told["seconds"] for told in every)[middle]
        peak = sorted(told["peak_bytes"] for told in every)[middle]
        error = max(told["error"] for told in every)
        compared = ""
        if way != "whole":
            compared = (
                str(_ratio(found, way)) if len(every) > 1 else f"{_ratio(found, way).value:.2f}"
            )
        rows.append((way, f"{seconds:.1f}", compared, f"{peak / MIB:,.0f}", f"{error:.1e}"))
    header = ("way", "seconds", "of whole", "peak, MiB", "largest error")
    title = f"### {8 * edge} x {8 * edge} pixels"
    return f"{title}\n\n{table(header, rows)}\n\n{conditions(result)}"


EACH = {"families": FAMILIES, "planned": PUBLISHED}
PAGE = Page(HERE, section, ("pairs", "large", *EACH))


def main() -> int:
    """Measure what is asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default=",".join(PAGE.order))
    parser.add_argument("--results", type=Path, default=PAGE.home / "results")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--families", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--planned", nargs=2, help=argparse.SUPPRESS)
    told = parser.parse_args()
    for asked_for, work in ((told.families, family), (told.planned, planned)):
        if asked_for is not None:
            name, out = asked_for
            work(name, Path(out))
            return 0
    if told.one is not None:
        way, edge, out = told.one
        one(way, int(edge), Path(out))
        return 0
    parts = told.parts.split(",")
    valid = [*PARTS, *EACH]
    if strange := [word for word in parts if word not in valid]:
        parser.error(f"there is no {strange[0]}; valid: {', '.join(valid)}")
    return PAGE.publish(parts, measured, told.results)


if __name__ == "__main__":
    sys.exit(main())
