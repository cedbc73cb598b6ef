"""The sections of a plan: every decision of a run, as plain data with defaults and checks.

See `fivefold.plan`, where they come together and where their names are public.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, cast

from fivefold.errors import PlanError, UsageError, suggest

__all__ = [
    "ALWAYS_DIRECT",
    "AXES",
    "TILE_AXES",
    "Checkpoint",
    "Comm",
    "Instances",
    "Layout",
    "Loader",
    "Memory",
    "Numerics",
    "Offload",
    "Parallel",
    "Pipeline",
    "Tiles",
    "Trace",
    "Train",
    "bytes_of",
]

MOST_RAILS = 8
"""as FF_MAX_RAILS of the C core"""
ALWAYS_DIRECT = 1 << 20
"""as `comm.direct_bytes`: more than any sum that could be made by doubling"""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def bytes_of(text: str) -> int:
    """Read `16GiB`, `512M` or `1024B`; units are powers of 1024. Raises `UsageError`.

    >>> bytes_of("16GiB"), bytes_of("1.5k"), bytes_of("1024B")
    (17179869184, 1536, 1024)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])I?)?(B)?", text.strip().upper())
    if found and not (found[2] or found[3]):
        raise UsageError(
            f"{text.strip()} has no unit; write {found[1]}GiB, {found[1]}MiB, or {found[1]}B for bytes"
        )
    size = int(float(found[1]) * _UNITS[found[2] or ""]) if found else 0
    if not size:
        raise UsageError(f"{text!r} is no size of memory; write 16GiB, 512MiB or 1024B")
    return size


AXES = ("data", "pipe", "depth", "height", "width")
TILE_AXES = ("depth", "height", "width")


@dataclass(frozen=True)
class Layout:
    """Sizes of the five named mesh axes. Ranks are row-major over them, tiles innermost."""

    data: int = 1
    """replicas that each see a share of the batch"""
    pipe: int = 1
    """stages that the layers are divided into"""
    depth: int = 1
    """tiles along the depth of a volume"""
    height: int = 1
    """tiles along the height of an image"""
    width: int = 1
    """tiles along the width of an image"""

    def __post_init__(self) -> None:
        for axis in AXES:
            size = cast(object, getattr(self, axis))
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise PlanError(
                    f"layout.{axis} = {size!r}: an axis needs a whole number of at least 1"
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of `AXES`."""
        return tuple(int(getattr(self, axis)) for axis in AXES)

    @property
    def size(self) -> int:
        """How many processes the layout needs."""
        return math.prod(self.sizes)

    @property
    def tiles(self) -> int:
        """How many parts each image is split into."""
        return self.depth * self.height * self.width

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `"data=2,height=2"`; axes that are not named have size 1. Raises `PlanError`."""
        sizes: dict[str, int] = {}
        for item in filter(None, (part.strip() for part in text.split(","))):
            axis, equals, value = (part.strip() for part in item.partition("="))
            if axis not in AXES:
                raise PlanError(f"unknown axis {axis!r} in layout {text!r}{suggest(axis, AXES)}")
            if axis in sizes:
                raise PlanError(f"axis {axis!r} is named twice in layout {text!r}")
            if not equals or not value.isdecimal():
                raise PlanError(f"{item!r} in layout {text!r} is not AXIS=NUMBER, such as data=2")
            sizes[axis] = int(value)
        return cls(**sizes)

    def __str__(self) -> str:
        named = [f"{axis}={n}" for axis, n in zip(AXES, self.sizes, strict=True) if n > 1]
        return ",".join(named) or "data=1"


@dataclass(frozen=True)
class Parallel:
    """How a model is made parallel."""

    batch_norm: Literal["global", "replica"] = "global"
    """statistics over the whole batch (exact), or over each replica's share (faster, not exact)"""
    rows: Literal["auto", "apart"] = "auto"
    """whether samples depend on each other in the net: found out where it can be recorded, and computed over
    all replicas where they do; "apart" vouches that they do not, but for batch norm"""
    compile: bool = False
    """whether what ranks compute between messages is compiled by torch.compile, in training steps"""


@dataclass(frozen=True)
class Tiles:
    """How images are computed in tiles. No value here changes a result, only its cost."""

    fuse: str = "auto"
    """how many layers share a halo exchange: a number, "never", or "auto", which weighs measured latency
    against the pixels computed twice"""
    strict: bool = False
    """whether an operation that is not known in tiles is an error, instead of gathered with a warning"""
    turns: str = ""
    """into how many tiles a rank divides its part of an image, such as "height=4,width=4": it computes them
    one after the other and holds one at a time; "auto": as few as memory.budget allows; empty: it computes
    its part at once"""

    def __post_init__(self) -> None:
        self.turns_by_axis()
        layers = self.fuse.isdecimal() and int(self.fuse) >= 1
        if self.fuse not in ("auto", "never") and not layers:
            raise PlanError(
                f'tiles.fuse = {self.fuse!r} is none of "auto", "never", or a number of layers such as "4"'
            )

    @property
    def by_turns(self) -> bool:
        """Whether a rank computes its part of an image by turns."""
        return self.turns == "auto" or bool(self.turns_by_axis())

    def turns_by_axis(self) -> dict[str, int]:
        """The axes along which there are several turns, with their number; none where it is left open.

        Raises `PlanError`.
        """
        if self.turns == "auto":
            return {}
        try:
            found = Layout.parse(self.turns)
        except PlanError as problem:
            raise PlanError(f"tiles.turns = {self.turns!r}: {problem}") from None
        wrong = [axis for axis in AXES if axis not in TILE_AXES and getattr(found, axis) > 1]
        if wrong:
            raise PlanError(
                f"tiles.turns = {self.turns!r} names {wrong[0]}, which is no tile axis: use "
                f"{', '.join(TILE_AXES)}"
            )
        return {axis: n for axis in TILE_AXES if (n := int(getattr(found, axis))) > 1}


@dataclass(frozen=True)
class Pipeline:
    """How the stages of the `pipe` axis work together. Batch norm sees one micro-batch at a time."""

    schedule: Literal[
        "layer", "gpipe", "1f1b", "interleaved", "zero-bubble", "gems", "gems-overlap", "chimera"
    ] = "1f1b"
    """who computes what when; `layer` is the whole batch at once"""
    micro_batches: int = 0
    """into how many parts a replica's samples are divided; 0: twice as many as stages, one with `layer`"""
    stages_per_rank: int = 1
    """more than one with `interleaved` only"""
    cut: str = ""
    """modules that begin a stage, such as "layer2, layer4.1"; empty: stages of about equal estimated time;
    "measured": of about equal time, which is measured when the run starts"""

    def __post_init__(self) -> None:
        _at_least("pipeline", self, micro_batches=0, stages_per_rank=1)


@dataclass(frozen=True)
class Memory:
    """What is kept for the backward pass, and what each replica keeps of the parameters."""

    recompute: int | str = "none"
    """activations that tiles and stages do not keep but compute again in backward, without communication:
    "none"; "all" but what a stage takes; "auto", which keeps the borders of about as many segments as these
    have steps; or the number of segments that the net is divided into"""
    shard: Literal["none", "optimizer", "parameters"] = "none"
    """what the replicas of the data axis divide among them instead of holding it each: the optimiser's state,
    and between steps parameters and gradients; or these during a step too, but for the layers at work"""
    budget: str = ""
    """the most that a rank may hold in a step, such as "24GiB": activations that do not fit are computed
    again or spilled, whichever costs less by measurement; empty: no bound"""
    disk: str = ""
    """folder of a local disk to which activations may be spilled under a budget; empty: none are, on CPUs"""
    host: str = ""
    """the most that may be spilled, such as "64GiB"; empty: no bound"""

    def __post_init__(self) -> None:
        for key in ("budget", "host"):
            if text := getattr(self, key):
                _size(f"memory.{key}", text)
        if self.budget and self.recompute not in (0, "none"):
            raise PlanError(
                f"memory.recompute = {self.recompute!r} and memory.budget = {self.budget!r}: a budget "
                "decides what is computed again; set one of them"
            )
        if (self.disk or self.host) and not self.budget:
            raise PlanError(
                "memory.disk and memory.host are for a memory.budget: set one, such as 24GiB"
            )
        if isinstance(self.recompute, int):
            _at_least("memory", self, recompute=0)
        elif self.recompute not in ("none", "auto", "all"):
            raise PlanError(
                f'memory.recompute = {self.recompute!r} is none of "none", "auto", "all", or a number of '
                "segments such as 8"
            )


@dataclass(frozen=True)
class Numerics:
    """What the arithmetic is done in, and the seed that every random choice derives from."""

    seed: int = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    """float32, or autocast to bfloat16"""
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    """order of image tensors in memory"""


@dataclass(frozen=True)
class Train:
    """What the training loop does. `batch_size` is global: the sum over all replicas."""

    recipe: str = ""
    model: str = ""
    epochs: int = 1
    batch_size: int = 128
    learning_rate: float = 0.1
    """of the whole batch; never scaled by the number of processes"""
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    warmup_epochs: float = 1.0

    def __post_init__(self) -> None:
        _at_least("train", self, epochs=1, batch_size=1, learning_rate=0, warmup_epochs=0)


@dataclass(frozen=True)
class Loader:
    """How samples are produced. No value here changes which samples come, or how they look."""

    workers: int = 0
    """processes per rank that prepare batches; 0 prepares them in the rank itself"""
    prefetch: int = 2
    """batches that each worker prepares ahead"""

    def __post_init__(self) -> None:
        _at_least("loader", self, workers=0, prefetch=1)


@dataclass(frozen=True)
class Offload:
    """What helpers do: processes beside the trainers. No value but `on_error` changes what is computed."""

    helpers: str = ""
    """which to start, such as "local:2, dpu01:4": on this node and on another, so many processes each"""
    augmentation: bool = True
    """whether helpers produce the batches of loaders"""
    validation: bool = True
    """whether helpers evaluate; what is trained on a GPU they do only where a plan says so"""
    prefetch_bytes: int = 268435456
    """the most memory per trainer for batches that helpers produce ahead"""
    on_error: Literal["stop", "skip"] = "stop"
    """what becomes of a sample that cannot be produced, with helpers or without: an error, or its batch is
    that much smaller, which is counted and told"""
    share_cores: bool = False
    """whether helpers on this node may run on the cores of trainers"""

    def __post_init__(self) -> None:
        _at_least("offload", self, prefetch_bytes=0)


@dataclass(frozen=True)
class Instances:
    """Ranks that share a device where one alone cannot fill it."""

    per_device: int = 1
    """how many neighbouring ranks a GPU has, or a node without any; they are among those of the layout"""
    weights: Literal["auto", "shared", "own"] = "auto"
    """whether the instances of a device hold weights and the state of optimisers once, or each its own; auto:
    once on CPUs from 16 MiB of weights on, unless `memory.shard` divides them or `comm.backend` shares no
    memory"""
    threads: int = 0
    """that each computes with, where OMP_NUM_THREADS says nothing; 0: one for each of its cores"""
    bound: bool = True
    """whether each has physical cores of its own"""
    mps: Literal["auto", "on", "off"] = "auto"
    """whether those of a GPU compute at the same time, through NVIDIA's MPS, and not in turns; auto: where it
    is installed, and MIG does not divide the GPU"""
    percent: int = 0
    """of a GPU's threads that each may use at a time, through MPS, up to 100; 0: not limited"""

    def __post_init__(self) -> None:
        _at_least("instances", self, per_device=1, threads=0, percent=0)
        if self.percent > 100:
            raise PlanError(f"instances.percent = {self.percent}: 100 at most are possible")
        if self.percent and self.mps == "off":
            raise PlanError(
                f'instances.percent = {self.percent} needs MPS: leave out instances.mps = "off", or this'
            )


@dataclass(frozen=True)
class Comm:
    """How processes talk."""

    backend: str = "auto"
    """a torch.distributed backend, or auto: fivefold on CPUs, nccl on GPUs (gloo where ranks share one)"""
    timeout_s: float = 600.0
    """how long a collective may wait for a missing rank, in seconds"""
    transport: Literal["streams", "mpi"] = "streams"
    """what carries tensors to other nodes, with backend fivefold: connections of TCP, or MPI, for networks
    that it drives better; MPI then has to start the ranks"""
    silence_s: float = 10.0
    """how long another node may acknowledge nothing before it is lost, in seconds, with backend fivefold"""
    ports: str = ""
    """at which ranks take streams of other nodes, with backend fivefold, such as 20000-20100; empty: any"""
    interfaces: str = ""
    """over which ranks exchange large tensors with other nodes, with backend fivefold, at a time, such as
    ib0,ib1; empty: the one that leads there"""
    streams: int = 1
    """how many connections to each rank of another node large tensors take at a time, on each interface"""
    partials: Literal["float32", "own"] = "float32"
    """how a node's part of a sum of 16-bit floats travels to others, with backend fivefold: not rounded, or
    in their own type, which sends a third less (of two nodes: half) and rounds once more for each node"""
    direct_bytes: int = -1
    """below how many bytes a rank's part of a sum or all-gather goes straight from each node to each, with
    backend fivefold; from there on small ones are made by doubling; -1: by the number of nodes. Results are
    the same bits"""
    shared_gpu: Literal["host", "direct"] = "host"
    """how the tensors of ranks that share a GPU get from one to another, with backend fivefold: through
    memory of the host, or read where they are, which has not run on a GPU yet"""

    def __post_init__(self) -> None:
        _at_least("comm", self, timeout_s=1, silence_s=1, streams=1, direct_bytes=-1)
        _ = self.port_range
        names = self.interface_names
        if self.transport == "mpi" and (names or self.streams > 1):
            raise PlanError(
                'comm.transport = "mpi" goes where MPI is told to: leave comm.interfaces and comm.streams out'
            )
        if len({*names}) < len(names) or not all(names):
            raise PlanError(
                f'comm.interfaces = {self.interfaces!r}: each one once, such as "ib0,ib1"; `ip address` '
                "names them"
            )
        if (rails := max(len(names), 1) * self.streams) > MOST_RAILS:
            raise PlanError(
                f"comm.streams = {self.streams} on each of {max(len(names), 1)} interfaces make {rails} "
                f"connections to a rank; {MOST_RAILS} is the most"
            )

    @property
    def interface_names(self) -> list[str]:
        """Those of `interfaces`."""
        return [name.strip() for name in self.interfaces.split(",")] if self.interfaces else []

    @property
    def port_range(self) -> range:
        """The ports of `ports`; of any, the one that stands for them, 0."""
        first, _, last = self.ports.partition("-")
        try:
            found = range(int(first), int(last or first) + 1) if self.ports else range(1)
        except ValueError:
            found = range(0)
        if self.ports and not (found and found[0] >= 1024 and found[-1] < 65536):
            raise PlanError(
                f'comm.ports = {self.ports!r}: the first and the last of 1024 to 65535, such as "20000-20100"'
            )
        return found


@dataclass(frozen=True)
class Checkpoint:
    """Where and how often the state of a run is saved; see `fivefold.Checkpointer`."""

    local: str = ""
    """directory on each node's own storage; empty: one in the directory for temporary files"""
    scheme: Literal["auto", "single", "partner", "xor", "rs"] = "auto"
    """what nodes keep for each other: nothing, a copy, parity, or parity for two lost nodes; "auto": one of
    the first three, as the number of nodes allows"""
    set_size: int = 8
    """the most nodes that protect each other"""
    keep: int = 2
    """how many saves each node keeps, at least"""
    keep_flushed: int = 3
    """how many copies stay in the persistent directory; older ones of the run are removed; 0: all"""
    flush_every: int = 10
    """every n-th save is copied to the persistent directory; 0: only the last"""
    flush_bytes_per_s: float = 200e6
    """how fast each node copies; 0: as fast as it goes"""
    every_steps: int = 0
    """steps from save to save; 0: as often as measured costs and `mtbf_s` suggest"""
    mtbf_s: float = 86400.0
    """mean time between failures of the whole job, in seconds"""
    max_overhead: float = 0.02
    """the most that saving may lengthen training, as a fraction, where `every_steps` is 0; 0: no bound"""

    def __post_init__(self) -> None:
        _at_least("checkpoint", self, set_size=2, keep=2, keep_flushed=0, flush_every=0)
        _at_least("checkpoint", self, flush_bytes_per_s=0)
        _at_least("checkpoint", self, every_steps=0, mtbf_s=1, max_overhead=0)
        if self.max_overhead >= 1:
            raise PlanError(
                f"checkpoint.max_overhead = {self.max_overhead}: a fraction below 1, such as 0.02"
            )


@dataclass(frozen=True)
class Trace:
    """What is recorded of a run; see `fivefold report`. No value here changes a result."""

    enabled: bool = True
    """whether `fivefold train` records, into the directory `trace` of the run; scripts record where the
    variable FIVEFOLD_TRACE asks for it"""
    events: int = 16384
    """how many of the latest operations and phases are kept one by one; 72 bytes each"""
    hang_s: float = 30.0
    """an operation that takes longer than so many seconds is looked into; 0: never"""

    def __post_init__(self) -> None:
        _at_least("trace", self, events=1024, hang_s=0)


def _size(key: str, text: str) -> int:
    try:
        return bytes_of(text)
    except UsageError as problem:
        raise PlanError(f"{key}: {problem}") from None


def _at_least(section: str, values: object, **least: float) -> None:
    for key, bound in least.items():
        value = getattr(values, key)
        if not value >= bound:  # also refuses nan
            raise PlanError(f"{section}.{key} = {value!r}: must be at least {bound}")
