"""`fivefold tune`: finds by trials what cannot be told beforehand."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from fivefold import recipes
from fivefold.cli import Command, parse_action
from fivefold.cli import model as models
from fivefold.cluster.cores import granted_cores, physical, quota
from fivefold.cluster.processors import processors
from fivefold.errors import UsageError, suggest
from fivefold.plan import Plan, Provenance

if TYPE_CHECKING:
    from fivefold.tune.instances import Choice, Found

__all__ = ["ACTIONS", "Instances", "Tune"]


def _option(metavar: str, *, name: str | None = None, hint: str = "") -> object:
    return tyro.conf.arg(name=name, metavar=metavar, help_behavior_hint=hint)


@dataclass(frozen=True)
class Instances:
    """How many processes train a recipe or a model fastest on this node, and with how many threads.

    Trains for a minute: one process of all cores, and more of fewer threads, bound to cores of their own and
    not, taking turns; the better half goes on. Then workers of the loader, for a recipe, and beside the best
    one what would change results: images with channels last, bfloat16, batch statistics of each process,
    twice the batch. That is shown, and chosen only where --allow says so, several at once where that is
    faster. What was found for a recipe or a model of Fivefold's own is kept, and told at once the next time.

    Example: fivefold tune instances resnet20 --input 3x32x32 --batch 64 --out plan.toml
    """

    what: Annotated[str, tyro.conf.Positional, _option("RECIPE|MODEL")]
    """a recipe, such as digits, or a model: resnet50 and the like,
    package.module:callable or torchvision:NAME"""
    data: Annotated[Path | None, _option("DIR")] = None
    """where the images of the recipe lie"""
    size: Annotated[int | None, _option("PIXELS")] = None
    """height and width of the recipe's images, where it leaves the choice"""
    shape: Annotated[str, _option("CxHxW", name="input", hint="(default: 3x224x224)")] = "3x224x224"
    """shape of a sample of the model"""
    batch: Annotated[int | None, _option("N")] = None
    """samples of the global batch; default: that of the recipe, or 32"""
    classes: Annotated[int, _option("N", hint="(default: 10)")] = 10
    """how many classes a model of Fivefold's own tells apart"""
    integers: Annotated[int, _option("N", hint="(default: 0)")] = 0
    """the model takes whole numbers below N, such as tokens, instead of images"""
    minutes: Annotated[float, _option("M", hint="(default: 1)")] = 1.0
    """how long it should take; three rounds are made in any case"""
    allow: Annotated[tuple[str, ...], _option("CHANGE...")] = ()
    """what may be chosen though it changes results: channels_last, bfloat16, replica, batch; and compile,
    which takes a minute, and is only tried then"""
    again: Annotated[bool, tyro.conf.FlagCreatePairsOff, _option("")] = False
    """measure though it is known"""
    out: Annotated[Path | None, _option("FILE")] = None
    """write the plan to this file"""
    plot: Annotated[Path | None, _option("FILE")] = None
    """draw the rates into this SVG file (needs matplotlib)"""

    def run(self) -> int:
        """Try, and tell."""
        plan, spec = self._checked()
        from rich.console import Console

        from fivefold.tune.instances import Found, choices
        from fivefold.tune.kept import Kept

        batch, cores = plan.train.batch_size, _cores()
        every = list(choices(cores, batch, bind=quota() is None))
        kept = Kept(**self._depends(plan, spec, cores))
        # A net of one's own may have changed meanwhile.
        record = None if self.again or ":" in self.what else kept.read()
        console = Console()
        if record is None:
            found = self._found(plan, spec, every, cores)
            if ":" not in self.what:
                kept.write(found.record())
        else:
            found = Found.of(record)
            console.print(
                f"measured before, see {kept.path}; --again measures anew", soft_wrap=True
            )
        _show(found, self._heading(spec, batch, cores), console)
        if self.out is not None:
            self._plan(plan, found).save(self.out)
            print(f"written to {self.out}")
        if self.plot is not None:
            from fivefold.tune.drawn import draw

            draw(found, self._heading(spec, batch, cores), self.plot)
            print(f"drawn to {self.plot}")
        return 0

    def _checked(self) -> tuple[Plan, dict[str, Any]]:
        """The plan that choices are made in, and what ranks are told; or what is wrong with the options."""
        from fivefold.tune.instances import CHANGES

        if unknown := next((word for word in self.allow if word not in CHANGES), None):
            raise UsageError(f"--allow {unknown}{suggest(unknown, CHANGES)}")
        for name, least in (("batch", 1), ("classes", 1), ("integers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"--{name} {value}: at least {least} is needed")
        if not self.minutes > 0:
            raise UsageError(f"--minutes {self.minutes:g}: a positive number is needed")
        for path in filter(None, (self.out, self.plot)):
            if not path.resolve().parent.is_dir():
                raise UsageError(f"there is no folder {path.resolve().parent} for {path.name}")
        if self.plot is not None and find_spec("matplotlib") is None:
            raise UsageError("--plot needs matplotlib: pip install 'fivefold[plot]'")
        if self.what in recipes.names():
            recipe = recipes.get(self.what)
            recipe.check(self.data, self.size)
            plan, batch = recipe.plan(), self.batch
            spec: dict[str, Any] = {
                "recipe": self.what, "size": self.size,
                "data": str(self.data.resolve()) if self.data else None,
            }  # fmt: skip
        else:
            models.check(self.what)
            shape = models.parse_shape(self.shape)
            models.check_shape(self.what, shape)
            plan, batch = Plan(), self.batch or 32
            spec = {
                "model": self.what, "shape": list(shape), "classes": self.classes,
                "integers": self.integers,
            }  # fmt: skip
        if batch is not None:
            plan = plan.replace({"train.batch_size": batch}, Provenance("user", "--batch"))
        return plan, spec

    def _depends(self, plan: Plan, spec: dict[str, Any], cores: int) -> dict[str, Any]:
        from importlib.metadata import version

        return {
            "form": 2, "spec": spec, "batch": plan.train.batch_size, "cores": cores,
            "cpu": processors().model,
            "allow": sorted(self.allow), "torch": version("torch"), "fivefold": version("fivefold"),
        }  # fmt: skip

    def _heading(self, spec: dict[str, Any], batch: int, cores: int) -> str:
        kind = "recipe" if "recipe" in spec else "x".join(map(str, spec["shape"]))
        return f"{self.what} ({kind}), batch {batch}, {cores} cores"

    def _found(
        self, plan: Plan, spec: dict[str, Any], every: Sequence[Choice], cores: int
    ) -> Found:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        from fivefold.tune.instances import tried

        workers = [0, 1, 2][: 1 + min(2, cores)] if "recipe" in spec else [0]
        console = Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with (
            tempfile.TemporaryDirectory(prefix="fivefold-tune-") as folder,
            Progress(
                *columns, transient=True, console=console, disable=not console.is_terminal
            ) as bar,
        ):
            task = bar.add_task("", total=None)

            def tell(what: str) -> None:
                bar.update(task, description=what)

            return tried(
                plan, spec, every, workers=workers, allowed=self.allow,
                seconds=60 * self.minutes, folder=Path(folder), progress=tell,
            )  # fmt: skip

    def _plan(self, plan: Plan, found: Found) -> Plan:
        best = next(row for row in found.rows if row.choice == found.best)
        reason = (
            f"{best.rate:,.1f} samples/s, {found.predicted:.2f} of one process's ({self.what}, batch "
            f"{plan.train.batch_size}, {_cores()} cores)"
        )
        return found.best.plan(plan, Provenance("tuned", reason))


def _cores() -> int:
    return min(granted_cores(), len(physical(os.sched_getaffinity(0))))


def _show(found: Found, heading: str, console: Any) -> None:
    from rich import box
    from rich.table import Table

    from fivefold.tune.instances import told

    console.print(heading, highlight=False, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for name in ("processes x threads", "samples/s", "of one", "trials", ""):
        table.add_column(name, justify="left" if name in ("processes x threads", "") else "right")
    for row in found.rows:
        kind = "changes results" if row.choice.changes else ""
        mark = "chosen" if row.choice == found.best else kind
        figures = (
            [f"{row.rate:,.1f}", f"{row.rate / found.one.rate:.2f}"] if row.rate else ["-", "-"]
        )
        table.add_row(str(row.choice), *figures, str(row.trials), row.problem or mark)
    console.print(table)
    for line in told(found):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


ACTIONS: dict[str, tuple[type[Command], str]] = {
    "instances": (Instances, "How many processes train fastest on this node"),
}

_HELP = """\
usage: fivefold tune ACTION [OPTIONS]

Finds by trials what cannot be told beforehand.

actions:
{actions}

options:
  -h, --help     show this help, or with an action, that action's

example:
  fivefold tune instances digits --out plan.toml
"""


@dataclass(frozen=True)
class Tune:
    """One of `ACTIONS`, with its options read."""

    action: Command

    def run(self) -> int:
        """Do it."""
        return self.action.run()

    @classmethod
    def parse(cls, words: Sequence[str]) -> Tune:
        """Read the action and its options."""
        return cls(parse_action(ACTIONS, words, "tune", _HELP))
