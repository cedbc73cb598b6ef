"""`fivefold plan`: the fastest layout that fits into memory, predicted."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import tyro

from fivefold.cli import model as models
from fivefold.cli import parse_options
from fivefold.cluster.description import Cluster
from fivefold.errors import UsageError, suggest
from fivefold.sections import bytes_of

if TYPE_CHECKING:
    from rich.console import Console

    from fivefold.tune.report import Question
    from fivefold.tune.search import SearchResult
    from fivefold.tune.subject import Subject

__all__ = ["Plan"]

_OPTIMIZERS = ("sgd", "adam")


def _option(metavar: str, *, name: str | None = None, hint: str | None = None) -> object:
    if hint is None:
        return tyro.conf.arg(name=name, metavar=metavar)
    return tyro.conf.arg(name=name, metavar=metavar, help_behavior_hint=hint)


@dataclass(frozen=True)
class Plan:
    """Choose a layout: the fastest that fits into the memory of the devices.

    Looks at all ways to divide a model over data, stages and tiles, with all schedules, predicts the time of
    a training step and the memory of a rank, and explains its choice. Nothing is trained, and the devices
    need not be here: describe them in a cluster file. The model takes one tensor: images, volumes, tokens.

    Example: fivefold plan resnet50 --input 3x2048x2048 --batch 4 --devices 8 --memory 16GiB
    """

    model: Annotated[str, tyro.conf.Positional, _option("MODEL")]
    """resnet50 and the like, package.module:callable, or torchvision:NAME"""
    shape: Annotated[str, _option("CxHxW", name="input")] = "3x224x224"
    """shape of one sample"""
    batch: Annotated[int, _option("N")] = 8
    """samples of the global batch"""
    devices: Annotated[int | None, _option("N", hint="")] = None
    """how many; default: all of the cluster"""
    memory: Annotated[str | None, _option("SIZE", hint="")] = None
    """of each device, such as 16GiB; default: what the cluster has"""
    cluster: Annotated[Path | None, _option("FILE", hint="")] = None
    """TOML file of devices and links; default: the cores of this machine, measured"""
    optimizer: Annotated[str, _option("NAME")] = "sgd"
    """sgd (with momentum) or adam"""
    classes: Annotated[int, _option("N")] = 10
    """how many classes a model of Fivefold's own tells apart"""
    integers: Annotated[int, _option("N")] = 0
    """the model takes whole numbers below N, such as tokens, instead of images"""
    measure: bool = False
    """time the steps of candidates here, on one core, instead of estimating them"""
    out: Annotated[Path | None, _option("FILE", hint="")] = None
    """write the plan to this file"""

    @classmethod
    def parse(cls, words: Sequence[str]) -> Plan:
        """Read the options."""
        return cast(Plan, parse_options(cls, words, "plan"))

    def run(self) -> int:
        """Search, and tell."""
        sample, memory = self._checked()
        told = None if self.cluster is None else Cluster.load(self.cluster)
        self._check_cluster(told)

        from rich.console import Console

        from fivefold.tune.report import Question, nothing_fits, plan_of

        cluster = told or _here(self.devices)
        question = Question(
            self.model, sample, self.batch, self.devices or cluster.devices,
            memory or cluster.device.memory_bytes, cluster, self.optimizer, self.measure,
        )  # fmt: skip
        try:
            found, question = self._found(question)
        except UsageError as problem:
            raise UsageError(models.with_hint(str(problem), self.integers)) from None
        if not found.best:
            raise nothing_fits(found, question)
        _show(found, question, Console())
        if self.out is not None:
            plan_of(found, question).save(self.out)
            print(f"written to {self.out}")
        return 0

    def _checked(self) -> tuple[tuple[int, ...], int | None]:
        """Shape of a sample, and memory; or what is wrong with the options."""
        models.check(self.model)
        sample = models.parse_shape(self.shape)
        models.check_shape(self.model, sample)
        if self.integers < 0:
            raise UsageError(f"--integers {self.integers}: at least 0 is needed")
        counts = {"batch": self.batch, "classes": self.classes, "devices": self.devices}
        for name, value in counts.items():
            if value is not None and value < 1:
                raise UsageError(f"--{name} {value}: at least 1 is needed")
        if self.optimizer not in _OPTIMIZERS:
            raise UsageError(
                f"unknown optimizer {self.optimizer!r}{suggest(self.optimizer, _OPTIMIZERS)}"
            )
        if self.out is not None and not self.out.resolve().parent.is_dir():
            raise UsageError(f"--out {self.out}: there is no folder {self.out.resolve().parent}")
        return sample, None if self.memory is None else _memory(self.memory)

    def _check_cluster(self, cluster: Cluster | None) -> None:
        if cluster is None:
            return
        if self.measure:
            raise UsageError(
                "--measure times steps on this machine, --cluster describes another one: use one of them"
            )
        if self.devices is not None and self.devices > cluster.devices:
            raise UsageError(
                f"--devices {self.devices}, but {self.cluster} describes {cluster.nodes} x "
                f"{cluster.devices_per_node} = {cluster.devices}: use as many or fewer"
            )

    def _found(self, question: Question) -> tuple[SearchResult, Question]:
        """What the search comes to, and the question with the figures that it went by."""
        from rich.console import Console
        from rich.progress import Progress

        from fivefold.tune.candidates import candidates
        from fivefold.tune.search import search

        console = Console(stderr=True)
        with Progress(transient=True, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("", total=None)

            def told(done: int, of: int) -> None:
                bar.update(task, description="search", completed=done, total=of)

            with self._subject(
                question, lambda what: bar.update(task, description=what)
            ) as subject:
                every = candidates(
                    question.devices, subject.pixels, self.batch, subject.most_stages
                )
                memory = question.memory_bytes
                found = search(subject, every, self.batch, memory, self.optimizer, progress=told)
                return found, replace(question, cluster=subject.cluster)

    @contextmanager
    def _subject(self, question: Question, progress: Callable[[str], None]) -> Generator[Subject]:
        import torch

        from fivefold.tune.measure import measuring
        from fivefold.tune.subject import Subject

        net = models.load(self.model, self.classes, question.sample[0])
        dtype = torch.int64 if self.integers else torch.float32
        if not self.measure:
            yield Subject(net, question.sample, question.cluster, dtype=dtype)
            return
        with measuring(
            net, question.sample, question.devices, optimizer=self.optimizer,
            progress=lambda what: progress(f"time {what}"), dtype=dtype,
        ) as measured:  # fmt: skip
            yield Subject(net, question.sample, question.cluster, measured=measured, dtype=dtype)


def _here(devices: int | None) -> Cluster:
    from fivefold.tune.machine import this_machine

    return this_machine(devices)


def _memory(text: str) -> int:
    try:
        return bytes_of(text)
    except UsageError as problem:
        raise UsageError(f"--memory: {problem}") from None


def _show(found: SearchResult, question: Question, console: Console) -> None:
    from rich import box
    from rich.table import Table

    from fivefold.tune.report import reasons, rows

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    shape = "x".join(map(str, question.sample))
    say(
        f"{question.model}, {question.batch} samples of {shape}, on {question.devices} devices of "
        f"{question.cluster.name}: predictions, nothing was trained"
    )
    if not question.cluster.here:
        say("A simulation of devices that are not here, from these figures:")
    say(question.basis)
    heading, *lines = rows(found)
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for name in heading:
        right = name in ("micro-batches", "recompute", "step", "memory")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "layout")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    for line in reasons(found, question):
        say(line)
