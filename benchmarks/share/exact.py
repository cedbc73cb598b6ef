"""Ranks that stay for many models and plans: are their steps, in float64, those of one process?

    PYTHONPATH=tests fivefold run -n 4 benchmarks/share/exact.py NAME...      names as in cases.py

The models, their losses and batches are those of benchmarks/exactness, and so is the judge. What it judges by
is computed by fivefold/train/verify/one_process.py, on the same device: plain torch, which imports nothing of
Fivefold. The mesh is started anew for each case. What a layout or a device refuses is told as that; whatever
else is raised ends all ranks, so that none waits for one that is lost.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import traceback
import warnings

import torch
from cases import EXACT, Exact, keep

import fivefold as ff
from fivefold.cli.settings import changed
from fivefold.errors import PlanError, UsageError
from fivefold.train.verify import verify
from fivefold.train.verify.report import Report
from small_models import batch_of, loss_of, net_of

STEPS = 2


def judged(case: Exact) -> Report:
    """The figures of one case. Collective."""
    plan = changed(ff.Plan(), case.layout, case.settings)
    staged = plan.layout.pipe > 1
    # Replicas and micro-batches do not divide evenly.
    samples = 4 * plan.layout.data + 1 if staged else plan.layout.data + 1
    with ff.start(plan) as mesh:
        net = net_of(case.model)
        torch.manual_seed(3)
        batches = [batch_of(case.model, samples) for _ in range(STEPS)]
        return verify(
            lambda: copy.deepcopy(net), mesh,
            loss=loss_of(case.model), batch=batches.__getitem__, steps=STEPS,
        )  # fmt: skip


def tried(case: Exact) -> tuple[str, str]:
    """How it ended, and the line that says so."""
    try:
        report = judged(case)
    except (PlanError, UsageError) as problem:
        return "refused", str(problem)
    return ("passed" if report.passed else "failed"), report.verdict()


def main() -> None:
    """A line for each case, from the first rank."""
    warnings.simplefilter("ignore")
    known = {case.name: case for case in EXACT}
    first = os.environ.get("RANK", "0") == "0"
    for name in sys.argv[1:]:
        begun = time.monotonic()
        try:
            ended, said = tried(known[name])
        except Exception:  # noqa: BLE001 - told, whatever it is
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # not by way of the mesh, which would wait for the others
        if first:
            print(f"{name}: {said}", flush=True)
            keep(name, ended, time.monotonic() - begun, said)


if __name__ == "__main__":
    main()
