"""The plan: every decision of a run as plain data, and where each value came from.

```toml
[layout]            # named mesh axes and their sizes
data = 4

[parallel]
batch_norm = "global"

[train]
epochs = 20
```

A plan is frozen; `Plan.replace` gives a changed copy and records who asked for the change. Values nobody
touched are defaults. This module imports no torch: the launcher and the report work on login nodes.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from fivefold.errors import PlanError, suggest

__all__ = [
    "AXES",
    "TILE_AXES",
    "Comm",
    "Layout",
    "Loader",
    "Memory",
    "Numerics",
    "Parallel",
    "Pipeline",
    "Plan",
    "Provenance",
    "Tiles",
    "Train",
    "parse_setting",
]

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


@dataclass(frozen=True)
class Tiles:
    """How images are computed in tiles. No value here changes a result, only its cost."""

    fuse: str = "auto"
    """how many layers share a halo exchange: a number, "never", or "auto", which weighs measured latency
    against the pixels computed twice"""
    strict: bool = False
    """whether an operation that is not known in tiles is an error, instead of gathered with a warning"""

    def __post_init__(self) -> None:
        layers = self.fuse.isdecimal() and int(self.fuse) >= 1
        if self.fuse not in ("auto", "never") and not layers:
            raise PlanError(
                f'tiles.fuse = {self.fuse!r} is none of "auto", "never", or a number of layers such as "4"'
            )


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
    """modules that begin a stage, such as "layer2, layer4.1"; empty: stages of about equal time"""

    def __post_init__(self) -> None:
        _at_least("pipeline", self, micro_batches=0, stages_per_rank=1)


@dataclass(frozen=True)
class Memory:
    """What is kept for the backward pass."""

    recompute: int = 0
    """into how many segments a net in tiles is divided, of which only the borders are kept and the rest is
    computed again in backward, without communication; 0 keeps everything"""

    def __post_init__(self) -> None:
        _at_least("memory", self, recompute=0)


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
class Comm:
    """How processes talk."""

    backend: str = "auto"
    """a torch.distributed backend, or auto: nccl where every rank has a GPU of its own, else gloo"""
    timeout_s: float = 600.0
    """how long a collective may wait for a missing rank, in seconds"""

    def __post_init__(self) -> None:
        _at_least("comm", self, timeout_s=1)


@dataclass(frozen=True)
class Provenance:
    """Where a value came from.

    `reason` is the flag or file for a user's value, and the measurement for a tuned one.
    """

    kind: Literal["default", "recipe", "user", "tuned"] = "default"
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}" if self.reason else self.kind

    @classmethod
    def parse(cls, text: str) -> Provenance:
        """Read what `str` wrote."""
        kind, _, reason = text.partition(":")
        kinds = get_args(get_type_hints(cls)["kind"])
        if kind not in kinds:
            raise PlanError(f"unknown provenance {kind!r}{suggest(kind, kinds)}")
        return cls(cast(Any, kind), reason.strip())


@dataclass(frozen=True)
class Plan:
    """Every decision of a run. `provenance` maps dotted keys such as `train.epochs` to their origin."""

    layout: Layout = field(default_factory=Layout)
    parallel: Parallel = field(default_factory=Parallel)
    tiles: Tiles = field(default_factory=Tiles)
    pipeline: Pipeline = field(default_factory=Pipeline)
    memory: Memory = field(default_factory=Memory)
    numerics: Numerics = field(default_factory=Numerics)
    train: Train = field(default_factory=Train)
    loader: Loader = field(default_factory=Loader)
    comm: Comm = field(default_factory=Comm)
    provenance: Mapping[str, Provenance] = field(
        default_factory=dict[str, Provenance], compare=False
    )

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a TOML file. Raises `PlanError` when it is missing, malformed or has unknown keys."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise PlanError(f"cannot read the plan {path}: {_brief(problem)}") from None
        return cls.parse(text, source=str(path))

    @classmethod
    def parse(cls, text: str, source: str = "text") -> Plan:
        """Read TOML. Values are the user's, from `source`, unless the file says otherwise.

        A file that `to_toml` wrote carries a `[provenance]` table; there, a value that the table does
        not list is a default, unless somebody has edited it since.
        """
        try:
            data = tomllib.loads(text)
        except tomllib.TOMLDecodeError as problem:
            raise PlanError(f"{source} is not valid TOML: {problem}") from None
        told = _table(data.pop("provenance", {}), f"provenance of {source}")
        values = {
            f"{name}.{key}": value
            for name, section in data.items()
            for key, value in _table(section, f"{name!r} in {source}", _sections()).items()
        }
        plan = cls().replace(values, Provenance("user", source), where=f" in {source}")
        if not told:
            return plan
        origins = {key: Provenance.parse(str(told[key])) for key in told if key in values}
        edited = {
            key: origin
            for key, origin in plan.provenance.items()
            if key not in told and plan.value(key) != cls().value(key)
        }
        return dataclasses.replace(plan, provenance={**edited, **origins})

    def replace(self, values: Mapping[str, object], why: Provenance, where: str = "") -> Plan:
        """A copy with dotted `values` changed on the authority of `why`.

        Raises `PlanError` naming the key (and `where` it stands) for an unknown key, a value of the
        wrong type, or one outside the valid choices.
        """
        sections: dict[str, dict[str, object]] = {}
        for dotted, value in values.items():
            section, key, hint = _look_up(dotted, where)
            sections.setdefault(section, {})[key] = _checked(value, hint, dotted, where)
        changed = {
            name: dataclasses.replace(getattr(self, name), **new) for name, new in sections.items()
        }
        return dataclasses.replace(
            self, **cast(Any, changed), provenance={**self.provenance, **dict.fromkeys(values, why)}
        )

    def value(self, key: str) -> object:
        """The value of a dotted key such as `train.epochs`."""
        section, name, _ = _look_up(key, "")
        return getattr(getattr(self, section), name)

    def origin(self, key: str) -> Provenance:
        """Where the value of a dotted key came from."""
        if key not in self.provenance and self.value(key) != Plan().value(key):
            return Provenance("user", "set in Python")
        return self.provenance.get(key, Provenance())

    def to_toml(self) -> str:
        """Every value, and the provenance of those that are not defaults; `parse` reads it back."""
        import tomli_w  # here: the launcher starts faster without it

        tables = {name: dataclasses.asdict(getattr(self, name)) for name in _sections()}
        keys = [f"{name}.{key}" for name, table in tables.items() for key in table]
        origins = {key: str(self.origin(key)) for key in keys if self.origin(key).kind != "default"}
        # Present even when empty: it tells a file of ours from one that a person wrote.
        return tomli_w.dumps({**tables, "provenance": origins or {"layout.data": "default"}})

    def save(self, path: str | Path) -> None:
        """Write `to_toml()` to `path`."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")


def parse_setting(text: str) -> tuple[str, object]:
    """Split `train.epochs=3` into its key and value; the value is TOML, or else a bare string.

    >>> parse_setting("train.epochs=3")
    ('train.epochs', 3)
    >>> parse_setting("parallel.batch_norm=replica")
    ('parallel.batch_norm', 'replica')
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise PlanError(f"{text!r} is not KEY=VALUE, such as train.epochs=3")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def _sections() -> dict[str, type]:
    hints = get_type_hints(Plan)
    return {f.name: hints[f.name] for f in dataclasses.fields(Plan) if f.name != "provenance"}


def _look_up(dotted: str, where: str) -> tuple[str, str, Any]:
    section, _, key = dotted.partition(".")
    sections = _sections()
    if section not in sections:
        raise PlanError(f"unknown section [{section}]{where}{suggest(section, sections)}")
    hints = get_type_hints(sections[section])
    if key not in hints:
        raise PlanError(f"unknown key {key!r} in [{section}]{where}{suggest(key, hints)}")
    return section, key, hints[key]


def _checked(value: object, hint: Any, dotted: str, where: str) -> object:
    if get_origin(hint) is Literal:
        valid = get_args(hint)
        if value in valid:
            return value
        raise PlanError(f"{dotted} = {value!r}{where} is not a choice{suggest(str(value), valid)}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is hint and not (hint is float and not math.isfinite(cast(float, value))):
        return value
    kinds = {
        int: "a whole number",
        float: "a finite number",
        str: "a string",
        bool: "true or false",
    }
    raise PlanError(f"{dotted} = {value!r}{where}: expected {kinds.get(hint, hint)}")


def _table(
    value: object, what: str, valid: Mapping[str, object] | None = None
) -> dict[str, object]:
    if isinstance(value, dict):
        return cast(dict[str, object], value)
    listed = ", ".join(f"[{name}]" for name in valid or ())
    raise PlanError(f"{what} is a value outside a section; the sections are {listed}")


def _at_least(section: str, values: object, **least: float) -> None:
    for key, bound in least.items():
        value = getattr(values, key)
        if not value >= bound:  # also refuses nan
            raise PlanError(f"{section}.{key} = {value!r}: must be at least {bound}")


def _brief(problem: Exception) -> str:
    return problem.strerror or str(problem) if isinstance(problem, OSError) else str(problem)
