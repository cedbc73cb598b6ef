"""On a GPU of which a part may be used: the largest image that each way decodes, and trains on.

    PYTHONPATH=tests python benchmarks/autoencoders/gpu.py [--gib 8] [--minutes 8] [--device cpu]

*decode*: the autoencoder of SDXL (the published configuration, weights at random, float32), whole, with
`enable_slicing`, with `enable_tiling`, and by 4 x 4 and 8 x 8 turns.

*train*: steps of EDSR on one image, whole, by 4 x 4 and 16 x 16 turns.

Edges grow by the square root of two until memory lacks or the minutes are over; every attempt is made in a
process of its own, after one on a small image. Seconds, peak and pixels per GiB are of the largest that
fits; decoded images are compared with the whole one of the largest edge that is decoded so.
`--device cpu` tries the script on tiny nets, not the GPU: there memory is limited by the address space.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from figures import environment, table
from resident import resident
from run import SDXL

import fivefold as ff
from fivefold.integrations.diffusers import tiled
from fivefold.recipes import models
from real_torchvision import declare_missing

GIB, MIB = 1 << 30, 1 << 20
DECODE = ("whole", "enable_slicing", "enable_tiling", "4 x 4 turns", "8 x 8 turns")
TRAIN = ("whole", "4 x 4 turns", "16 x 16 turns")
LATENTS = (64, 90, 128, 181, 256, 362, 512, 724, 1024)
PIXELS = (512, 724, 1024, 1448, 2048, 2896, 4096, 5792, 8192, 11584, 16384)
TINY = (16, 22, 32)


# ---- in a process of its own


def plan_of(way: str) -> ff.Plan:
    """Turns, if it is a way that has some."""
    turns = way.split(maxsplit=1)[0] if way.endswith("turns") else ""
    return ff.Plan.parse(f'tiles.turns = "height={turns},width={turns}"' if turns else "")


def limited(gib: float, device: torch.device) -> None:
    """Let this process use so much beside what it has."""
    if device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(gib * GIB / whole, 1.0), device)
        return
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + int(gib * GIB), resource.RLIM_INFINITY))


def decoding(way: str, mesh: ff.Mesh, edge: int, *, tiny: bool) -> Any:
    """What decodes a latent."""
    declare_missing()
    from diffusers import AutoencoderKL

    channels = {"block_out_channels": (32, 32, 32, 32)} if tiny else {}
    made: Any = AutoencoderKL
    vae = made(**{**SDXL, **channels}).eval().to(mesh.device)
    if way == "enable_slicing":
        vae.enable_slicing()
    elif way == "enable_tiling":
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_latent_min_size = 4 * edge, edge // 2
    elif way != "whole":
        tiled(vae, mesh)

    def decode(latent: Tensor) -> Tensor:
        return vae.decode(latent).sample

    return decode


def training(way: str, mesh: ff.Mesh) -> Any:
    """What makes a step on an image."""
    net, loss = models.build("edsr_small", 10).to(mesh.device), nn.L1Loss()
    model = None if way == "whole" else ff.parallelize(net, mesh, loss=loss)

    def step(x: Tensor) -> None:
        y = torch.zeros(1, 3, 2 * x.shape[2], 2 * x.shape[3], device=x.device)
        net.zero_grad()
        if model is None:
            loss(net(x), y).backward()
        else:
            model.step(x, y)

    return step


def one(what: str, way: str, edge: int, told: argparse.Namespace) -> dict[str, Any]:
    """Seconds and peak bytes of one attempt; empty if memory lacks."""
    torch.manual_seed(0)
    device, tiny = torch.device(told.device), told.device == "cpu"
    with ff.start(plan_of(way)) as mesh, torch.set_grad_enabled(what == "train"):
        decodes = what == "decode"
        call = decoding(way, mesh, edge, tiny=tiny) if decodes else training(way, mesh)
        small, size = (torch.randn(1, 4 if decodes else 3, n, n) for n in (TINY[0], edge))
        try:
            call(small.to(device))
            limited(told.gib, device)
            seconds, peak_bytes, made = measured(lambda: call(size.to(device)), device)
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as problem:
            if not isinstance(problem, RuntimeError) or "memory" in str(problem):
                return {}
            raise
        if made is not None and told.keep:
            torch.save(made.cpu(), told.keep)
        return {"seconds": seconds, "peak_bytes": peak_bytes}


def measured(call: Any, device: torch.device) -> tuple[float, int, Tensor | None]:
    """Seconds, peak bytes beyond those before, and what was made."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
    before = torch.cuda.memory_allocated() if cuda else resident("VmRSS")
    began = time.perf_counter()
    made = call()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if cuda else resident("VmHWM")
    return seconds, peak - before, made


# ---- around them


def largest(what: str, way: str, told: argparse.Namespace, folder: Path, until: float) -> list[Any]:
    """Attempts of a way, up to the first that memory lacks for."""
    edges = TINY if told.device == "cpu" else LATENTS if what == "decode" else PIXELS
    found: list[Any] = []
    for edge in edges:
        if time.monotonic() > until:
            print(f"{what}, {way}: the minutes are over before {edge}", flush=True)
            break
        file = folder / f"{way}-{edge}.pt"
        words = ["--one", what, way, str(edge), "--gib", str(told.gib), "--device", told.device]
        done = subprocess.run(
            [sys.executable, __file__, *words, "--keep", str(file)],
            stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
        result = json.loads(done.stdout.splitlines()[-1])
        print(f"{what}, {way}, {edge}: {result or 'too large'}", flush=True)
        if not result:
            break
        found.append({"edge": edge, "file": str(file), **result})
    return found


def error_of(attempt: dict[str, Any], whole: dict[int, str]) -> str:
    """Of an image, beside the whole one, relative to its largest number."""
    if attempt["edge"] not in whole:
        return "whole does not fit"
    right, made = (torch.load(file) for file in (whole[attempt["edge"]], attempt["file"]))
    return f"{float((made - right).abs().max() / right.abs().max()):.1e}"


def section(what: str, found: dict[str, list[Any]], gib: float) -> str:
    """A table of the largest image of each way."""
    scale = {"decode": 8, "train": 1}[what]
    whole = {one["edge"]: one["file"] for one in found["whole"]}
    rows: list[tuple[str, ...]] = []
    for way, attempts in found.items():
        if not attempts:
            rows.append((way, "none", "", "", "", ""))
            continue
        last, pixels = attempts[-1], (scale * attempts[-1]["edge"]) ** 2
        both = [one for one in attempts if one["edge"] in whole]
        error = error_of(both[-1], whole) if what == "decode" and both else ""
        rows.append((
            way, f"{scale * last['edge']:,}", f"{last['seconds']:.1f}", f"{last['peak_bytes'] / MIB:,.0f}",
            f"{pixels / 1e6 / (last['peak_bytes'] / GIB):.2f}", error,
        ))  # fmt: skip
    header = ("way", "largest edge, pixels", "seconds", "peak, MiB", "megapixels per GiB", "error")
    return f"### {what}, {gib:g} GiB\n\n{table(header, rows)}"


def main() -> int:
    """Measure; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--keep", type=Path, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.one is not None:
        what, way, edge = told.one
        print(json.dumps(one(what, way, int(edge), told)))
        return 0
    if told.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU: --device cpu tries the script on tiny nets")
    with tempfile.TemporaryDirectory() as name:
        for what, ways in {"decode": DECODE, "train": TRAIN}.items():
            until = time.monotonic() + 60 * told.minutes / 2
            found = {way: largest(what, way, told, Path(name), until) for way in ways}
            print(f"\n{section(what, found, told.gib)}\n", flush=True)
    print(json.dumps(environment()))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    sys.exit(main())
