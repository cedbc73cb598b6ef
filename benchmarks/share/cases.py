"""What the campaign tries, by worth: commands, and the cases that each of them is started once for.

A command of several cases is told their names. It keeps the result of each as soon as it is known, so that
only the case that it was busy with is lost where it ends early.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EXACT", "Case", "Exact", "Launch", "keep", "launches"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FIVEFOLD = (sys.executable, "-m", "fivefold")


@dataclass(frozen=True)
class Case:
    """Something to try."""

    name: str
    minutes: float
    """how long it is expected to take; it is ended after three times that, half a minute at least"""


@dataclass(frozen=True)
class Launch:
    """A command, and what it tries; if `named`, it takes names of cases and keeps their results itself."""

    words: Sequence[str]
    cases: Sequence[Case]
    named: bool = False


@dataclass(frozen=True)
class Exact:
    """A model of tests/small_models.py whose steps under a plan have to be those of one process."""

    model: str
    layout: str
    settings: tuple[str, ...] = ()
    tiny: bool = False
    """whether it takes part where only the script is tried"""
    minutes: float = 0.08

    @property
    def name(self) -> str:
        """Good for a file; micro-batches are as many for all schedules."""
        told = [text.partition(".")[2] for text in self.settings if "micro_batches" not in text]
        said = "-".join((self.model, self.layout, *told))
        return "exact-" + re.sub(r"\W+", "-", said.replace("=", ""))

    @property
    def ranks(self) -> int:
        """As many as the sizes of its axes multiply to."""
        count = 1
        for axis in self.layout.split(","):
            count *= int(axis.partition("=")[2])
        return count


FLAT = (
    "resnet20", "resnet50", "unet", "edsr", "amoebanet_d", "mobilenet_v2", "shufflenet_v2_x1_0",
    "densenet121", "vgg16_bn", "deeplabv3", "unet_bilinear",
)  # fmt: skip
SOLID = "unet3d"
SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "gems", "chimera", "gems-overlap", "interleaved")
LAYER = ("pipeline.schedule=layer", "pipeline.micro_batches=1")
CORE = ("comm.backend=fivefold",)
DIRECT = (*CORE, "comm.shared_gpu=direct")
ALL = "data=2,pipe=2,height=2"


def staged(schedule: str) -> tuple[str, ...]:
    """Settings of a schedule."""
    more = ("pipeline.stages_per_rank=2",) if schedule == "interleaved" else ()
    return (f"pipeline.schedule={schedule}", "pipeline.micro_batches=4", *more)


def _models() -> Iterator[Exact]:
    for name in FLAT:
        yield Exact(name, "data=2", tiny=name == "resnet20")
        yield Exact(name, "width=2", tiny=name == "edsr")
        yield Exact(name, "height=2,width=2", tiny=name == "edsr")
        yield Exact(name, "data=2,width=2")
    for layout in (
        "data=2",
        "depth=2",
        "depth=2,height=2",
        "data=2,depth=2",
        "depth=2,height=2,width=2",
    ):
        yield Exact(SOLID, layout)  # fmt: skip
    yield Exact("resnet20", "data=8")
    yield Exact("edsr", "data=2,height=2,width=2", tiny=True)


def _stages() -> Iterator[Exact]:
    yield Exact("resnet20", "pipe=2", LAYER)
    for schedule in SCHEDULES:
        yield Exact("resnet20", "pipe=2", staged(schedule), tiny=schedule == "1f1b")
        yield Exact("unet", "pipe=2", staged(schedule))
    for schedule in SCHEDULES[:4]:
        yield Exact("resnet50", "pipe=4", staged(schedule))
        yield Exact("unet", "pipe=2,height=2", staged(schedule))
        yield Exact("resnet20", "data=2,pipe=2", staged(schedule))
        yield Exact("unet", ALL, staged(schedule))
        yield Exact("resnet20", ALL, staged(schedule))
    yield Exact("resnet50", "data=4,pipe=2")


def _settings() -> Iterator[Exact]:
    for layout in ("data=2", "width=2", "pipe=2", "height=2,width=2", ALL):
        yield Exact("resnet20", layout, CORE)
        yield Exact("resnet20", layout, DIRECT)
    yield Exact("resnet50", "data=8", DIRECT)
    for shard in ("memory.shard=optimizer", "memory.shard=parameters"):
        for layout in ("data=2", "data=4"):
            yield Exact("resnet50", layout, (shard,))
        yield Exact("resnet20", "data=2", (shard, *CORE))
    yield Exact("resnet20", ALL, ("memory.shard=optimizer",))
    yield Exact("unet", "height=2,width=2", ("memory.recompute=all",))
    yield Exact("resnet50", "pipe=2", ("memory.recompute=all",))
    for model, turns in (
        ("resnet20", "height=2,width=2"), ("unet", "height=2"), ("edsr", "height=3,width=2"),
        (SOLID, "depth=2,width=2"),
    ):  # fmt: skip
        yield Exact(model, "data=1", (f"tiles.turns={turns}",), tiny=model == "edsr")
    yield Exact("unet", "width=2", ("tiles.turns=height=2",))
    yield Exact("unet", "data=1", ("memory.budget=8MiB",), tiny=True)
    yield Exact("resnet20", "data=1", ("memory.budget=14MiB",))
    yield Exact("resnet20", "data=2", ("memory.budget=18MiB",))
    yield Exact("resnet20", "data=1", ("parallel.compile=true",), minutes=1.0)


EXACT = (*_models(), *_stages(), *_settings())
NETS = (
    ("resnet18", 32), ("shufflenet_v2_x1_0", 32), ("mobilenet_v2", 32), ("resnet18", 224), ("resnet50", 224),
)  # fmt: skip
"""net and pixels of an edge"""


def launches(device: str, tiny: bool) -> Iterator[Launch]:
    """All of them; `tiny`, of every kind what tries its code."""
    forked = ["--fork"] if tiny else []  # few cores take long to import torch eight times
    yield Launch([sys.executable, str(HERE / "probe.py")], [Case("probe", 1.0)])
    for ranks in (2, 4, 1, 8):
        found = [case for case in EXACT if case.ranks == ranks and (case.tiny or not tiny)]
        yield Launch(
            [*FIVEFOLD, "run", "-n", str(ranks), *forked, str(HERE / "exact.py")],
            [Case(case.name, case.minutes) for case in found],
            named=True,
        )
    yield from tests(tiny)
    for name, settings in (("direct", DIRECT), ("fivefold", CORE), ("auto", ())):
        told = [word for setting in settings for word in ("--set", setting)]
        for ranks in (2, 4, 8) if settings else (4,):
            if ranks == 2 or not tiny:
                words = [*FIVEFOLD, "run", "-n", str(ranks), *told, str(HERE / "collectives.py")]
                yield Launch(words, [Case(f"collectives-{name}-{ranks}", 0.5)])
    yield from ladder(NETS[:3], tiny)
    for way in ("", "--fork"):
        if not (way and tiny):
            yield Launch(
                [sys.executable, str(HERE / "kills.py"), *way.split()],
                [Case(f"kills{way[1:]}", 1.0)],
            )
    memory = [sys.executable, str(ROOT / "benchmarks" / "memory" / "gpu.py"), "--parts", "exact"]
    small = ["--minutes=0.2", "--rounds=1", "--nets=edsr", "--times=1"] if tiny else ["--minutes=3"]
    yield Launch([*memory, f"--device={device}", *small], [Case("memory", 0.6 if tiny else 3.5)])
    if not tiny:
        yield from ladder(NETS[3:], tiny)


def tests(tiny: bool) -> Iterator[Launch]:
    """Those of tests/gpu, and what loaders yield on a GPU."""
    # Of plugins the one that is needed: those of a machine may warn, which is an error.
    plugins = ["--disable-plugin-autoload", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    pytest = [sys.executable, "-m", "pytest", "-q", "-rA", *plugins, "-m", "gpu"]
    folder = ROOT / "tests" / "gpu"
    every, uses = [str(folder / "test_gpu.py")], [str(folder), f"--ignore={folder / 'test_gpu.py'}"]
    loaders = [str(ROOT / "tests" / "processes" / "test_loader_workers.py")]
    more = ["-k", "trace or bit and 1"] if tiny else loaders
    exact, others = ("edsr", "conv_net and two") if tiny else ("verif", "not verif")
    yield Launch([*pytest, *uses, *more], [Case("tests-uses", 1.5)])
    yield Launch([*pytest, *every, "-k", others], [Case("tests-ranks", 2.5)])
    yield Launch([*pytest, *every, "-k", exact], [Case("tests-verify", 2.5)])


def ladder(nets: Sequence[tuple[str, int]], tiny: bool) -> Iterator[Launch]:
    """Steps of nets by 1, 2, 4 and 8 instances."""
    for instances in (1, 2) if tiny else (1, 2, 4, 8):
        found = [("resnet20", 32)] if tiny else nets
        each = 0.9 if tiny or instances > 1 else 1.8
        yield Launch(
            [*FIVEFOLD, "run", "--instances", str(instances), str(HERE / "steps.py")],
            [Case(f"steps-{net}-{pixels}-{instances}", each) for net, pixels in found],
            named=True,
        )


def keep(name: str, ended: str, seconds: float, said: str, **more: object) -> None:
    """A result, if a campaign asked for it: `ended` is "passed", "failed" or "refused"."""
    if folder := os.environ.get("CAMPAIGN_OUT"):
        path = Path(folder, f"{name}.json")
        told = {"case": name, "ended": ended, "seconds": round(seconds, 1), "said": said, **more}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(told, indent=1) + "\n")
        part.replace(path)
