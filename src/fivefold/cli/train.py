"""`fivefold train`: a recipe, on as many processes as asked for."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, cast

import tyro

from fivefold import recipes
from fivefold.cli import parse_options
from fivefold.cli.helpers import chosen_helpers
from fivefold.cli.instances import environment_of, layout_values, nodes_for, with_instances
from fivefold.cli.nodes import IN_LINE, RestartOptions
from fivefold.cli.settings import changed
from fivefold.errors import FivefoldError, PlanError, UsageError
from fivefold.launch.environment import launched, locate
from fivefold.launch.job import default_log_dir
from fivefold.launch.role import is_helper
from fivefold.launch.variables import read_seconds
from fivefold.plan import Layout, Plan, Provenance

__all__ = ["Train", "resolve"]


def _option(metavar: str, *aliases: str, name: str | None = None, hint: str = "") -> object:
    return tyro.conf.arg(name=name, metavar=metavar, aliases=aliases, help_behavior_hint=hint)


@dataclass(frozen=True)
class Train:
    """Train a recipe: digits, cifar10, svhn, folder (any directory of images) or photos.

    Writes plan.toml, metrics.jsonl and weights.pt to a new directory, runs/RECIPE-001 or the next free
    number. Also starts under torchrun, mpirun or srun, then without -n.

    Example: fivefold train digits -n 2
    """

    recipe: Annotated[str, tyro.conf.Positional, _option("RECIPE")]
    """what to train"""
    processes: Annotated[int | None, _option("N", "-n", "-np")] = None
    """number of processes; default: as many as the layout of the plan needs, or the hosts have room
    for, or 1"""
    data: Annotated[Path | None, _option("DIR")] = None
    """where the images lie"""
    model: Annotated[str | None, _option("NAME")] = None
    """resnet20, resnet56, resnet18, resnet34, resnet50,
    shufflenet_v2_x1_0, mobilenet_v2, vgg16_bn, densenet121 or amoebanet_d; for photos
    edsr or edsr_small; unet, unet_bilinear, unet3d and deeplabv3
    are there to be verified
    """
    size: Annotated[int | None, _option("PIXELS")] = None
    """height and width of the model's images (folder, photos)"""
    epochs: Annotated[int | None, _option("E")] = None
    """how often every image is seen"""
    batch_size: Annotated[int | None, _option("B")] = None
    """images per step, over all processes"""
    plan: Annotated[Path | None, _option("FILE")] = None
    """plan whose values replace those of the recipe, such as that of an earlier run"""
    settings: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        _option("KEY=VALUE", name="set", hint="(repeatable)"),
    ] = ()
    """any value of the plan, such as train.learning_rate=0.05"""
    instances: Annotated[int | None, _option("K")] = None
    """processes on each GPU, or on each node without any; they multiply the data axis, not the batch"""
    helpers: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        _option("HOST:N", hint="(repeatable)"),
    ] = ()
    """helpers to start beside the processes, such as local:2 or
    dpu01:4; default: those of the plan
    """
    out: Annotated[Path | None, _option("DIR")] = None
    """where runs are written; default: FIVEFOLD_RUN_DIR, or runs"""
    checkpoint: Annotated[str | None, _option("DIR")] = None
    """where the state is saved now and then; a run that was saved there goes on"""
    begin_again: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")
    ] = False
    """begin at step 0 where that run has made saves and none can be loaded"""
    nodes: Annotated[RestartOptions, IN_LINE] = field(default_factory=RestartOptions)
    words: tyro.conf.Suppress[tuple[str, ...]] = ()

    @classmethod
    def parse(cls, words: Sequence[str]) -> Train:
        """Read the options, and keep them as they are for the ranks."""
        return replace(cast(Train, parse_options(cls, words, "train")), words=tuple(words))

    def run(self) -> int:
        """Start the ranks, or be one."""
        recipe = recipes.get(self.recipe)
        recipe.check(self.data, self.size)
        plan = resolve(self, recipe, os.environ)
        recipe.check_model(plan.train.model)
        if not launched():
            return self._launch(plan, recipe)
        self._refuse_helpers()
        self.nodes.refuse_when_launched()
        from fivefold.recipes.train import train

        out = self.out or Path(os.environ.get("FIVEFOLD_RUN_DIR") or "runs")
        train(
            recipe, plan,
            directory=self.data, size=self.size, out=out, checkpoints=self.checkpoint or "",
            begin_again=self.begin_again,
        )  # fmt: skip
        return 0

    def _launch(self, plan: Plan, recipe: recipes.Recipe) -> int:
        """Start this command in ranks; their logs end up in the directory of the run, if it is here."""
        hosts, processes = self.nodes.hosts_told(), plan.layout.size
        nodes = nodes_for(self.nodes, plan, self.processes, hosts)
        if self.processes is None and plan.layout == Layout():
            if not hosts.trainers:
                locate()  # one process in an allocation of many tasks: was srun forgotten?
            processes = nodes.room(hosts) or 1
            if processes > 1:
                why = Provenance("user", "room on the hosts")
                plan = plan.replace(layout_values(plan, recipe.axis, processes), why)
        logs = default_log_dir()
        ending = self.nodes.ending(logs)
        command = [sys.executable, "-m", "fivefold", "train", *self.words]
        told = environment_of(plan, processes) | {"FIVEFOLD_LOG_DIR": str(logs.resolve())}
        job, engine = nodes.job(
            hosts, command, processes, logs, told,
            helpers=chosen_helpers(self.helpers, hosts, plan, command),
        )  # fmt: skip
        try:
            if code := self.nodes.carry_out(engine, job, ending):
                return code
        except UsageError:
            _remove(logs)  # the message says it all
            raise
        except FivefoldError:
            _show_cursor()  # of a terminal whose progress bar was killed
            raise
        run = logs / "run"
        if not run.is_symlink():
            sys.stdout.write(
                f"logs           {logs}; the run's directory is on the node of rank 0\n"
            )
            return 0
        home = run.resolve()
        run.unlink()
        again = len([*logs.glob("restart-*")])
        traces = (logs / f"restart-{again}" if again else logs) / "trace"
        if traces.is_dir():  # of nodes that do not see that directory
            shutil.copytree(traces, home / "trace", dirs_exist_ok=True)
            shutil.rmtree(traces)
        shutil.move(logs, home / "logs")
        _remove(logs)
        return 0

    def _refuse_helpers(self) -> None:
        if self.helpers and not os.environ.get("FIVEFOLD_ENGINE") and not is_helper():
            raise UsageError(
                f"--helpers: {locate().launcher} started this process, and it would start its own for every "
                "rank; start helpers by `fivefold helper`, or the ranks by `fivefold train -n`"
            )


def resolve(options: Train, recipe: recipes.Recipe, environ: Mapping[str, str]) -> Plan:
    """The plan of a run: explicit arguments over the environment, over the plan file, over the recipe.

    Raises `PlanError` for what cannot be, and for a layout that does not fit the processes.
    """
    plan = recipe.plan()
    if path := options.plan or environ.get("FIVEFOLD_PLAN"):
        told = Plan.load(path)
        for key, why in told.provenance.items():
            section, _, name = key.partition(".")
            plan = plan.replace({key: getattr(getattr(told, section), name)}, why)
    if environ.get("FIVEFOLD_TIMEOUT_S"):
        seconds = read_seconds("FIVEFOLD_TIMEOUT_S", plan.comm.timeout_s, environ)
        plan = plan.replace({"comm.timeout_s": seconds}, Provenance("user", "FIVEFOLD_TIMEOUT_S"))
    plan = with_instances(changed(plan, None, options.settings), options.instances)
    flags = {"--model": "model", "--epochs": "epochs", "--batch-size": "batch_size"}
    for flag, name in flags.items():
        value = getattr(options, name)
        if value is not None:
            plan = plan.replace({f"train.{name}": value}, Provenance("user", flag))
    plan = plan.replace({"train.recipe": recipe.name}, Provenance("user", "train"))
    return _fitted(plan, options.processes, recipe.axis, environ)


def _fitted(plan: Plan, asked: int | None, axis: str, environ: Mapping[str, str]) -> Plan:
    """The plan with a layout for the processes asked for, or started by somebody else."""
    if asked is not None and asked < 1:
        raise UsageError(f"-n {asked}: at least 1 process is needed")
    if is_helper(environ):
        return plan  # whose layout is that of the trainers
    why, processes = Provenance("user", "-n"), asked
    if launched(environ):
        place = locate(environ)
        if asked not in (None, place.world_size):
            raise UsageError(
                f"-n {asked}, but {place.launcher} started {place.world_size} processes; leave -n out"
            )
        if asked is None:
            processes = place.world_size
            why = Provenance("user", f"processes started by {place.launcher}")
    if processes in (None, plan.layout.size):
        return plan
    if plan.layout != Layout():
        raise PlanError(
            f"the layout {plan.layout} ({_reason(plan)}) needs {plan.layout.size} processes, not "
            f"{processes}; leave -n out, or change the layout"
        )
    return plan.replace(layout_values(plan, axis, processes), why)


def _reason(plan: Plan) -> str:
    keys = (f"layout.{axis}" for axis in ("data", "pipe", "depth", "height", "width"))
    return next(str(plan.origin(key)) for key in keys if plan.origin(key).kind != "default")


def _remove(logs: Path) -> None:
    shutil.rmtree(logs, ignore_errors=True)
    with contextlib.suppress(OSError):  # it may hold the logs of other runs
        logs.parent.rmdir()


def _show_cursor() -> None:
    from rich.console import Console

    Console().show_cursor()
