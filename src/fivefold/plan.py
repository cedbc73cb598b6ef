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
from types import UnionType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from fivefold.errors import PlanError, suggest
from fivefold.sections import (
    AXES,
    TILE_AXES,
    Checkpoint,
    Comm,
    Instances,
    Layout,
    Loader,
    Memory,
    Numerics,
    Offload,
    Parallel,
    Pipeline,
    Tiles,
    Trace,
    Train,
)
from fivefold.writing import write_whole

__all__ = [
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
    "Plan",
    "Provenance",
    "Tiles",
    "Trace",
    "Train",
    "check_instances",
    "parse_setting",
]


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
    instances: Instances = field(default_factory=Instances)
    parallel: Parallel = field(default_factory=Parallel)
    tiles: Tiles = field(default_factory=Tiles)
    pipeline: Pipeline = field(default_factory=Pipeline)
    memory: Memory = field(default_factory=Memory)
    numerics: Numerics = field(default_factory=Numerics)
    train: Train = field(default_factory=Train)
    loader: Loader = field(default_factory=Loader)
    offload: Offload = field(default_factory=Offload)
    comm: Comm = field(default_factory=Comm)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    trace: Trace = field(default_factory=Trace)
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
        """Write `to_toml()` to `path`; a file that is there is replaced once the new one is whole.

        Raises `UsageError` if it cannot be written.
        """
        write_whole(path, self.to_toml(), "the plan")


def check_instances(plan: Plan, processes: int) -> None:
    """Raise `PlanError` if devices would have different numbers of ranks, or cannot share weights."""
    if plan.instances.weights == "shared" and plan.memory.shard != "none":
        raise PlanError(
            f'instances.weights = "shared" ({plan.origin("instances.weights")}): memory.shard = '
            f'"{plan.memory.shard}" divides the weights; leave out one of the two'
        )
    if processes % (each := plan.instances.per_device):
        raise PlanError(
            f"instances.per_device = {each} ({plan.origin('instances.per_device')}) does not divide "
            f"{processes} processes: take a multiple, such as {processes // each * each + each}"
        )


def parse_setting(text: str) -> tuple[str, object]:
    """Split `train.epochs=3` into its key and value; the value is TOML, or else a bare string.

    >>> parse_setting("train.epochs=3")
    ('train.epochs', 3)
    >>> parse_setting("parallel.batch_norm=replica")
    ('parallel.batch_norm', 'replica')
    >>> parse_setting("tiles.fuse=4")
    ('tiles.fuse', '4')
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise PlanError(f"{text!r} is not KEY=VALUE, such as train.epochs=3")
    key = key.strip()
    try:
        found = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value.strip()
    section, _, name = key.partition(".")
    hints = get_type_hints(_sections()[section]) if section in _sections() else {}
    # tiles.fuse=4 without the quotes that TOML wants
    text_of_number = hints.get(name) is str and type(found) in (int, float)
    return key, value.strip() if text_of_number else found


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
    if isinstance(hint, UnionType):
        if type(value) in get_args(hint):
            return value
        raise PlanError(f"{dotted} = {value!r}{where}: expected {_kinds(get_args(hint))}")
    if type(value) is hint and not (hint is float and not math.isfinite(cast(float, value))):
        return value
    raise PlanError(f"{dotted} = {value!r}{where}: expected {_kinds((hint,))}")


def _kinds(types: tuple[Any, ...]) -> str:
    words: dict[Any, str] = {
        int: "a whole number",
        float: "a finite number",
        str: "a string",
        bool: "true or false",
    }
    return " or ".join(words.get(kind, str(kind)) for kind in types)


def _table(
    value: object, what: str, valid: Mapping[str, object] | None = None
) -> dict[str, object]:
    if isinstance(value, dict):
        return cast(dict[str, object], value)
    listed = ", ".join(f"[{name}]" for name in valid or ())
    raise PlanError(f"{what} is a value outside a section; the sections are {listed}")


def _brief(problem: Exception) -> str:
    return problem.strerror or str(problem) if isinstance(problem, OSError) else str(problem)
