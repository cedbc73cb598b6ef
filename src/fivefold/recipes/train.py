"""A recipe from its plan to its weights."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fivefold.checkpoint import Checkpointer
from fivefold.data import Loader, loader
from fivefold.errors import CheckpointWarning
from fivefold.launch import locate
from fivefold.mesh import Mesh, start
from fivefold.mesh.duty import help_instead
from fivefold.mesh.recording import record
from fivefold.offload import Validator
from fivefold.parallel import ParallelModel, parallelize
from fivefold.plan import Plan
from fivefold.recipes import models
from fivefold.recipes.recipe import Images, Recipe
from fivefold.train import Arithmetic, RunDirectory, Summary, fit, settle_precision, warmup_cosine
from fivefold.train.loop import is_trained
from fivefold.train.optimizer import optimizer_of
from fivefold.train.progress import suited
from fivefold.train.task import CLASSES, PICTURES, Task
from fivefold.train.validation import validator

__all__ = ["train"]


def train(
    recipe: Recipe,
    plan: Plan,
    *,
    directory: Path | None = None,
    size: int | None = None,
    out: Path = Path("runs"),
    checkpoints: str = "",
    begin_again: bool = False,
    console: Console | None = None,
) -> Summary | None:
    """Train `recipe` as `plan` says, on the processes that were started with this one. Collective.

    Args:
        recipe: images and what is done to them.
        plan: everything else; `recipe.plan()`, changed at will.
        directory: where the images lie, if the recipe needs to know.
        size: height and width of the images, where the recipe leaves the choice.
        out: a new directory for this run is made in it, once data and plan have proved to be good.
        checkpoints: directory, or URL, where the state is saved as the plan's section `[checkpoint]` says;
            a run that was saved there goes on; of one that is finished, the result is None.
        begin_again: whether it begins anew where it was saved and all saves are lost.
        console: where rank 0 tells how it goes; standard output by default.

    Raises `UsageError`, of which `DataError` and `PlanError` are kinds, for what cannot be done as asked.
    """
    recipe.check_model(plan.train.model)
    task = PICTURES if recipe.returns == "picture" else CLASSES
    train_images, test_images = recipe.images(directory, size)
    torch.manual_seed(plan.numerics.seed)
    net = models.build(plan.train.model, len(train_images.classes), recipe.channels)
    with start(plan, traced=plan.trace.enabled) as mesh:
        plan = settle_precision(mesh.plan, mesh)
        console = (console or Console()) if mesh.rank == 0 else Console(quiet=True)
        net = Arithmetic(plan.numerics, mesh.device).net(net)
        model = parallelize(net, mesh, example=_example(recipe, plan, size), loss=task.loss())
        with (
            _loader(train_images, mesh, shuffle=True) as batches,
            _loader(test_images, mesh, shuffle=False) as tests,
            validator(model, tests, task, plan.numerics) as checked,
        ):
            help_instead()  # before anything is written
            run = RunDirectory.create(out, recipe.name, mesh)
            run.write("plan.toml", plan.to_toml())
            if plan.trace.enabled:
                record(mesh, run.path / "trace")
            _say(console, _heading(plan, len(train_images), len(test_images), mesh))
            summary = _fit(
                model, batches, checked, plan, task, run=run, console=console,
                saves=_Saves(checkpoints, begin_again) if checkpoints else None,
            )  # fmt: skip
        if summary is not None:
            for line in summary.lines():
                _say(console, line)
            if recipe.baseline is not None and mesh.rank == 0:
                _say(console, recipe.baseline(test_images))
        _say(console, f"written to     {run.path}: {', '.join(run.files)}")
    return summary


def _example(recipe: Recipe, plan: Plan, size: int | None) -> torch.Tensor | None:
    """The shape of a batch, for those layouts that need it before the first one."""
    if plan.layout.pipe == 1:
        return None
    pixels = recipe.size if size is None else size
    return torch.empty(plan.train.batch_size, recipe.channels, pixels, pixels, device="meta")


def _loader(images: Images, mesh: Mesh, *, shuffle: bool) -> Loader:
    t, seed = mesh.plan.train, mesh.plan.numerics.seed
    return loader(images, mesh, batch_size=t.batch_size, seed=seed, shuffle=shuffle)


@dataclass(frozen=True)
class _Saves:
    """Where a run is saved, and whether it begins anew where all saves are lost."""

    directory: str
    begin_again: bool


def _fit(
    model: ParallelModel,
    batches: Loader,
    validator: Validator,
    plan: Plan,
    task: Task,
    *,
    run: RunDirectory,
    console: Console,
    saves: _Saves | None,
) -> Summary | None:
    t, mesh = plan.train, model.mesh
    optimizer = optimizer_of(model, t)
    schedule = warmup_cosine(
        optimizer, steps=t.epochs * len(batches), warmup=round(t.warmup_epochs * len(batches))
    )
    with contextlib.ExitStack() as held:
        saved = None
        if saves is not None:
            held.enter_context(_warnings_on(console))
            saved = Checkpointer(
                saves.directory, mesh, begin_again=saves.begin_again,
                model=model, optim=optimizer, schedule=schedule, data=batches, validator=validator,
            )  # fmt: skip
            held.enter_context(saved)
            step = saved.load()
            if step is not None and is_trained(batches, validator, t.epochs):
                _say(
                    console,
                    f"finished       the run in {saves.directory} was trained to step {step}, the end of "
                    f"epoch {t.epochs}; for more, raise --epochs",
                )
                run.save_weights(model.full_state_dict())
                return None
            if step is not None:
                _say(console, f"going on {saved.resumed}")
        return fit(
            model,
            optimizer,
            schedule,
            batches,
            validator.tests,
            mesh=mesh,
            epochs=t.epochs,
            task=task,
            numerics=plan.numerics,
            run=run,
            progress=suited(console, locate().launcher) if mesh.rank == 0 else None,
            checkpoints=saved,
            validator=validator,
        )


@contextlib.contextmanager
def _warnings_on(console: Console) -> Generator[None]:
    """Tell of saves that failed where the run tells how it goes: errors of ranks go to their logs."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, CheckpointWarning):
                _say(console, f"warning        {message}")
            else:
                others(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _heading(plan: Plan, images: int, tests: int, mesh: Mesh) -> str:
    n = plan.numerics
    where = (
        f"{mesh.size} process{'es' if mesh.size > 1 else ''} ({plan.layout}, {mesh.device.type})"
    )
    why = plan.origin("numerics.precision").reason
    precision = f"{n.precision} ({why})" if why.endswith("bfloat16") else n.precision
    return (
        f"{plan.train.recipe}: {plan.train.model} on {images:,} images, tested on {tests:,}; "
        f"{where}, {precision}, {n.memory_format}"
    )


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
