"""One rank that predicts the memory of a training step, and then measures it."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from memory_worker import LAYOUTS, SMALL, measured
from workload import Workload, parser

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from serving import serve

import fivefold as ff
from fivefold.parallel.model import ParallelModel
from fivefold.plan import Comm


def predicting(model: ParallelModel, work: Workload) -> dict[str, float]:
    """Both, of this rank."""
    images, targets = work.batches()[0]
    begin = time.process_time()
    told = model.memory(images, targets)
    predict_s = time.process_time() - begin
    model.tile_plan(images)  # the plan is made before what is measured
    parts = model.shard(images, targets)
    found = measured(lambda: model.step(*parts))
    return {
        "saved_bytes": found["saved_bytes"],
        "peak_bytes": found["peak_bytes"],
        "predicted_saved_bytes": told.saved_bytes,
        "predicted_peak_bytes": told.peak_bytes,
        "predict_s": round(predict_s, 2),
    }


def main() -> None:
    """Build, make a small step, and serve until the socket closes."""
    asked = parser(list(LAYOUTS), __doc__).parse_args()
    work = Workload.of(asked)
    layout = ff.Layout(**LAYOUTS[asked.contender])
    with ff.start(ff.Plan(layout=layout, comm=Comm(backend="gloo")), device="cpu") as mesh:
        model = ff.parallelize(work.net(), mesh, loss=work.loss())
        model.step(*model.shard(*replace(work, height=SMALL, width=SMALL).batches()[0]))
        serve(asked.socket, lambda _: predicting(model, work), torch.device("cpu"))


if __name__ == "__main__":
    main()
