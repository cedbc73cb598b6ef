"""`fivefold verify`: proof that a model is exact under a layout."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import tyro

from fivefold.cli import model as models
from fivefold.cli import parse_options
from fivefold.cli.nodes import IN_LINE, NodeOptions
from fivefold.cli.settings import changed
from fivefold.errors import LaunchError, UsageError, suggest
from fivefold.launch.environment import launched, locate
from fivefold.launch.hosts import Hosts
from fivefold.launch.job import RankFailure, log_path
from fivefold.plan import AXES, Plan, Provenance
from fivefold.writing import write_whole

if TYPE_CHECKING:
    from fivefold.mesh import Mesh
    from fivefold.train.verify import Named
    from fivefold.train.verify.report import Report
    from fivefold.train.verify.sample import Targets

__all__ = ["LOSSES", "Verify"]

_TO_LAUNCHER = "/dev/stderr"
"""where rank 0 writes its figures: errors of ranks go to their logs, from all nodes, and are not shown"""
_FIGURES = '{"passed": '
"""how they begin"""

_KINDS = ("classes", "likewise", "binary")


class _Loss(NamedTuple):
    kind: str
    """name of the class in torch.nn"""
    targets: Targets


LOSSES: Mapping[str, _Loss] = {
    "cross_entropy": _Loss("CrossEntropyLoss", "classes"),
    "nll": _Loss("NLLLoss", "classes"),
    "mse": _Loss("MSELoss", "likewise"),
    "l1": _Loss("L1Loss", "likewise"),
    "smooth_l1": _Loss("SmoothL1Loss", "likewise"),
    "huber": _Loss("HuberLoss", "likewise"),
    "bce_with_logits": _Loss("BCEWithLogitsLoss", "binary"),
}
"""What --loss offers."""


def _option(metavar: str, *, name: str | None = None, hint: str | None = None) -> object:
    if hint is None:
        return tyro.conf.arg(name=name, metavar=metavar)
    return tyro.conf.arg(name=name, metavar=metavar, help_behavior_hint=hint)


@dataclass(frozen=True)
class Verify:
    """Check that a model is exact: that a layout computes what the unmodified model computes in one process.

    Trains a few steps on random data, once plainly and once under the layout, and compares loss, outputs,
    gradients, buffers and updated weights. The model takes one tensor, of floating-point numbers or of
    integers. The exit code is 0 if the layout is exact, 1 if it is not.

    Example: fivefold verify resnet20 --layout data=2
    """

    model: Annotated[str, tyro.conf.Positional, _option("MODEL")]
    """resnet20 and the like, package.module:callable, or torchvision:NAME"""
    layout: Annotated[str, _option("AXIS=N,...")] = "data=2"
    """the layout in question; as many processes are started"""
    shape: Annotated[str, _option("CxHxW", name="input")] = "3x32x32"
    """shape of one sample"""
    integers: Annotated[int, _option("N")] = 0
    """feed whole numbers below N, such as tokens; 0: floating-point numbers"""
    batch: Annotated[int, _option("N")] = 8
    """samples of the global batch; need not be a multiple of anything"""
    dtype: Annotated[str, _option("NAME")] = "float64"
    """float64, or float32 (then compared with what one process loses in float32)"""
    steps: Annotated[int, _option("N")] = 3
    """how many steps, each from where the reference stands"""
    loss: Annotated[str, _option("NAME")] = "cross_entropy"
    """cross_entropy, nll, mse, l1, smooth_l1, huber, bce_with_logits,
    or package.module:callable of outputs and targets
    """
    targets: Annotated[str, _option("KIND")] = "classes"
    """of a loss of your own: classes, likewise (as the outputs) or binary"""
    classes: Annotated[int, _option("N")] = 10
    """how many classes a model of Fivefold's own tells apart"""
    seed: Annotated[int, _option("N")] = 0
    """of weights, data and random masks"""
    batch_norm: Annotated[str, _option("NAME")] = "global"
    """global, or replica (each rank its own statistics: not exact)"""
    settings: Annotated[
        tyro.conf.UseAppendAction[tuple[str, ...]],
        _option("KEY=VALUE", name="set", hint="(repeatable)"),
    ] = ()
    """any value of the plan, such as pipeline.schedule=gems"""
    json: Annotated[Path | None, _option("FILE", hint="")] = None
    """write all figures to this file as well"""
    nodes: Annotated[NodeOptions, IN_LINE] = field(default_factory=NodeOptions)
    words: tyro.conf.Suppress[tuple[str, ...]] = ()

    @classmethod
    def parse(cls, words: Sequence[str]) -> Verify:
        """Read the options, and keep them as they are for the ranks."""
        return replace(cast(Verify, parse_options(cls, words, "verify")), words=tuple(words))

    def run(self) -> int:
        """Start the ranks, or be one."""
        plan = self._checked()
        if launched():
            self.nodes.refuse_when_launched()
            return self._verify(plan)
        hosts = self.nodes.hosts_told()
        if plan.layout.size == 1 and not hosts.trainers and _alone():
            return self._verify(plan)
        return self._launch(hosts, plan.layout.size)

    def _checked(self) -> Plan:
        """The plan, or what is wrong with the options, before anything has been started."""
        models.check(self.model)
        models.check_shape(self.model, models.parse_shape(self.shape))
        for name, value in {
            "batch": self.batch,
            "steps": self.steps,
            "classes": self.classes,
        }.items():
            if value < 1:
                raise UsageError(f"--{name} {value}: at least 1 is needed")
        if self.dtype not in ("float64", "float32"):
            hint = suggest(self.dtype, ("float64", "float32"))
            raise UsageError(f"--dtype {self.dtype} cannot be verified{hint}")
        if self.integers < 0:
            raise UsageError(f"--integers {self.integers}: at least 0 is needed")
        self._check_loss()
        if self.json is not None and not self.json.resolve().parent.is_dir():
            raise UsageError(f"--json {self.json}: there is no folder {self.json.resolve().parent}")
        plan = changed(Plan(), self.layout, ()).replace(
            {"parallel.batch_norm": self.batch_norm}, Provenance("user", "--batch-norm")
        )
        plan = plan.replace({"numerics.seed": self.seed}, Provenance("user", "--seed"))
        return changed(plan, None, self.settings)

    def _check_loss(self) -> None:
        home, colon, name = self.loss.partition(":")
        if not (home and name) and (colon or self.loss not in LOSSES):
            raise UsageError(
                f"unknown loss {self.loss!r}{suggest(self.loss, LOSSES)}, or package.module:callable"
            )
        if self.targets not in (kinds := _KINDS):
            raise UsageError(f"unknown --targets {self.targets}{suggest(self.targets, kinds)}")
        if self.targets != "classes" and not colon:
            raise UsageError(
                f"--targets is for a loss of your own; {self.loss} has its own targets"
            )

    def _loss(self) -> tuple[Named, Targets]:
        from fivefold.train.verify import Named

        if ":" in self.loss:
            return Named("fivefold.cli.model", "load_loss", (self.loss,)), cast(
                "Targets", self.targets
            )
        kind, targets = LOSSES[self.loss]
        return Named("torch.nn", kind), targets

    def _launch(self, hosts: Hosts, processes: int) -> int:
        command = [sys.executable, "-m", "fivefold", "verify", *self.words, "--json", _TO_LAUNCHER]
        logs = Path(tempfile.mkdtemp(prefix="fivefold-verify-"))
        keep = False
        try:
            job, engine = self.nodes.job(hosts, command, processes, logs, {})
            engine.run(job)
            if (told := _told(logs)) is None:
                raise LaunchError(f"rank 0 ended well and told no figures; logs: {logs}/rank-*.log")
        except LaunchError as failure:
            # Ranks end with 1 as well if the layout is not exact, but not before they have told so.
            inexact = isinstance(failure, RankFailure) and failure.code == 1
            if not inexact or (told := _told(logs)) is None:
                keep = True  # the message names the logs
                raise
        finally:
            if not keep:
                shutil.rmtree(logs, ignore_errors=True)
        if self.json is not None:
            write_whole(self.json, json.dumps(told, indent=2) + "\n", "the figures")
        return 0 if told["passed"] else 1

    def _verify(self, plan: Plan) -> int:
        from fivefold import start

        with start(plan) as mesh:
            try:
                report = self._report(mesh)
            except UsageError as problem:
                raise UsageError(models.with_hint(str(problem), self.integers)) from None
            if mesh.rank == 0:
                self._tell(report)
            _wait_for_first(mesh)
        return 0 if report.passed else 1

    def _report(self, mesh: Mesh) -> Report:
        import warnings

        import torch

        from fivefold.train.verify import Named, verify
        from fivefold.train.verify.sample import random_batches

        dtype: torch.dtype = getattr(torch, self.dtype)
        shape, (loss, targets) = models.parse_shape(self.shape), self._loss()
        build = Named("fivefold.cli.model", "load", (self.model, self.classes, shape[0]))
        batch = random_batches(
            build(), shape, self.batch, targets,
            seed=self.seed, dtype=dtype, device=mesh.device, integers=self.integers,
        )  # fmt: skip
        # What the net makes for itself, torch.zeros(n), is made in the dtype it runs in.
        torch.set_default_dtype(dtype)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", UserWarning)
            report = verify(build, mesh, loss=loss, batch=batch, steps=self.steps, dtype=dtype)
        said = dict.fromkeys(f"warning: {warning.message}" for warning in told)
        return replace(report, model=self.model, notes=(*report.notes, *said))

    def _tell(self, report: Report) -> None:
        from rich.console import Console

        from fivefold.cli.table import show

        show(report, Console())
        if str(self.json) == _TO_LAUNCHER:
            with os.fdopen(2, "w", closefd=False) as stream:  # a model may have replaced sys.stderr
                stream.write(f"\n{json.dumps(report.figures())}\n")
        elif self.json is not None:
            write_whole(self.json, json.dumps(report.figures(), indent=2) + "\n", "the figures")


def _told(logs: Path) -> dict[str, Any] | None:
    """The figures in the log of rank 0, if it got so far."""
    lines = log_path(logs, 0).read_text(errors="replace").splitlines()
    for line in reversed(lines):
        if line.startswith(_FIGURES):
            return json.loads(line)
    return None


def _alone() -> bool:
    """Whether one process can start here; in the shell of an allocation it would be asked for srun."""
    try:
        return locate().world_size == 1
    except UsageError:
        return False


def _wait_for_first(mesh: Mesh) -> None:
    """Ranks that end with 1 stop the others: not before rank 0 has told the outcome."""
    from fivefold import comm

    comm.broadcast_text("told", mesh.group(*AXES), mesh.device)
