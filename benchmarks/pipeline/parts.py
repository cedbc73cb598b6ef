"""The parts of the benchmark: who takes part in each, and what is computed from their answers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from contender import BenchmarkError, Contender
from contenders import HERE, KINDS
from figures import environment
from rounds import take_turns
from sharing import most_at_once, on_cores
from ways import COUNT_MEMORY, SCHEDULES, STAGES, TORCH_SCHEDULES, WAYS
from workload import Workload

from fivefold.parallel.pipeline.schedule import Schedule
from fivefold.parallel.pipeline.schedules import make
from fivefold.parallel.pipeline.simulate import StageTimes, simulate

Answers = Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]
"""by contender, round and rank"""
CORES = 2
AGREE = 1e-3
"""relative: how far the first loss of contenders may differ, in float32"""
FOUR = ("layer-4", "gems-4", "gems-overlap-4", "1f1b-recompute-4")
TWO = ("tiles", "tiles-shared", "tiles-never", "1f1b-2", "layer-2")


def with_torch(work: Workload, rounds: int, steps: int) -> dict[str, Any]:
    """Two schedules beside torch.distributed.pipelining, and beside what the schedules promise."""
    ours = [name for name in WAYS if name.startswith(("gpipe-2", "1f1b-2"))]
    names = ("stages-2", *ours, *TORCH_SCHEDULES)
    answers, result = _measured(names, work, rounds, steps)
    ideal = {
        name: [_ideal_s(name, work, ranks) for ranks in answers["stages-2"]]
        for name in ("gpipe-2", "1f1b-2")
    }
    return {"benchmark": "torch", **result, "ideal_s": ideal}


def _ideal_s(name: str, work: Workload, ranks: Sequence[Mapping[str, Any]]) -> float:
    """A step of a schedule whose messages take no time, with its update."""
    schedule = make(WAYS[name].schedule, len(ranks), work.micro_batches)
    alone = (
        0.0,
    ) * schedule.stages  # no other rank holds a stage: its gradients are summed with nobody's
    times = dataclasses.replace(_times(ranks, "busy_s"), reduce_s=alone)
    made = simulate(schedule, times).makespan_s
    return round(made + max(rank["update_s"] for rank in ranks), 5)


def pairs(work: Workload, rounds: int, steps: int) -> dict[str, Any]:
    """Two directions beside layer parallelism at four stages, and beside 1f1b that computes again."""
    answers, result = _measured(("stages-4", *FOUR), work, rounds, steps, memory=True)
    ideal = {name: [_shared_s(name, work, ranks) for ranks in answers["stages-4"]] for name in FOUR}
    most = {
        name: most_at_once(on_cores(schedule, even, even, CORES))
        for name in FOUR
        for schedule in [_schedule(name, work)]
        for even in [StageTimes.even(4)]
    }
    return {"benchmark": "pairs", **result, "ideal_s": ideal, "most_at_once": most}


def _shared_s(name: str, work: Workload, ranks: Sequence[Mapping[str, Any]]) -> float:
    """A step on as many cores as there are, see `sharing`."""
    schedule = _schedule(name, work)
    alone, busy = (
        _again(_times(ranks, key)) if WAYS[name].recompute != "none" else _times(ranks, key)
        for key in ("alone_s", "busy_s")
    )
    passes = work.micro_batches // schedule.micro_batches
    updates = [rank["update_s"] * schedule.chains for rank in ranks]
    update_s = max(*updates, sum(updates) / CORES)
    return round(passes * on_cores(schedule, alone, busy, CORES).makespan_s + update_s, 5)


def _schedule(name: str, work: Workload) -> Schedule:
    way = WAYS[name]
    together = 1 if way.by_itself else work.micro_batches
    return make(way.schedule, 4, together, way.stages_per_rank)


def _times(ranks: Sequence[Mapping[str, Any]], key: str) -> StageTimes:
    forward = tuple(rank[key][0] for rank in ranks)
    backward = tuple(rank[key][1] for rank in ranks)
    half = tuple(seconds / 2 for seconds in backward)
    return StageTimes(forward, backward, half, half, tuple(rank["reduce_s"] for rank in ranks))


def _again(times: StageTimes) -> StageTimes:
    """With forward computed again in front of backward."""
    longer = tuple(f + b for f, b in zip(times.forward_s, times.backward_s, strict=True))
    return dataclasses.replace(times, backward_s=longer)


def headline(work: Workload, rounds: int, steps: int, cap_bytes: int) -> dict[str, Any]:
    """What two ranks can do with a few large images."""
    _, result = _measured(TWO, work, rounds, steps, memory=True)
    return {"benchmark": "headline", **result, "cap_bytes": cap_bytes}


def memory(work: Workload) -> dict[str, Any]:
    """What every schedule keeps alive, as the simulator says and as it is. Counts need no rounds."""
    before = environment()
    found: dict[str, Any] = {}
    for name in ("layer", *(n for n in SCHEDULES if n != "layer")):
        own = dataclasses.replace(work, micro_batches=1) if name == "layer" else work
        with _running((f"{name}-4",), own) as (contender,):
            saved = [rank["saved_bytes"] for rank in contender.ask(COUNT_MEMORY)]
        schedule = _schedule(f"{name}-4", own)
        timeline = simulate(schedule, StageTimes.even(schedule.stages))
        one = found["layer"]["saved_bytes"] if found else saved
        each = [one[s % 4] * 4 // schedule.stages for s in range(schedule.stages)]
        found[name] = {
            "predicted": timeline.peak_live,
            "predicted_bytes": timeline.peak_bytes(each),
            "saved_bytes": saved,
        }
        print(f"{name}: {timeline.peak_live} predicted, {saved} bytes", flush=True)
    told = {**before, "torch": torch.__version__}
    return {"benchmark": "memory", **_said(work), "found": found, "environment": told}


def _measured(
    names: Sequence[str], work: Workload, rounds: int, steps: int, *, memory: bool = False
) -> tuple[Answers, dict[str, Any]]:
    """Rounds in which all take turns; the answers, and what every part keeps of them."""
    before = environment()

    def told(done: int, answers: Mapping[str, Sequence[Any]]) -> str:
        shown = "  ".join(
            f"{n} {_step_s(own[-1]):.3f}" for n, own in answers.items() if n not in STAGES
        )
        return f"{work.model} {done}/{rounds} s: {shown}"

    with _running(names, work) as running:
        kept = {c.kind.name: c.ask(COUNT_MEMORY) for c in running if memory and c.kind.name in WAYS}
        answers, others = take_turns(running, rounds, lambda c: c.ask(steps), told)
        torch_version = running[-1].greeting["torch"]
        threads = {c.kind.name: c.greeting["threads"] for c in running}
    steps_of = {n: own for n, own in answers.items() if n not in STAGES}
    _agree({name: own[0] for name, own in steps_of.items()})
    return answers, {
        **_said(work),
        "rounds": rounds,
        "steps_per_block": steps,
        "environment": {**before, "torch": torch_version, **others.told()},
        "threads": threads,
        "step_s": {name: [round(_step_s(a), 5) for a in own] for name, own in steps_of.items()},
        "stages": {n: [list(map(dict, a)) for a in own] for n, own in answers.items() if n in STAGES},
        "memory": kept,
    }  # fmt: skip


@contextlib.contextmanager
def _running(names: Sequence[str], work: Workload) -> Any:
    """Contenders that have built everything and wait."""
    with (
        tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        found: list[Contender] = []
        for name in names:
            contender = Contender(KINDS[name], HERE / "worker.py", work.words(), Path(folder))
            found.append(stack.enter_context(contender))
            contender.wait_until_ready()  # one after the other: never do two compute at once
        yield found


def _step_s(ranks: Sequence[Mapping[str, Any]]) -> float:
    """Seconds per step of the rank that takes longest."""
    return max(statistics.mean(rank["step_s"]) for rank in ranks)


def _agree(first: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """All contenders have computed the same loss from the same weights, or something is wrong."""
    losses = {
        name: next(rank["first"] for rank in reversed(ranks) if rank["first"] is not None)
        for name, ranks in first.items()
    }
    least, most = min(losses.values()), max(losses.values())
    if not most - least <= AGREE * abs(most):
        raise BenchmarkError(f"the contenders do not compute the same: losses {losses}")


def _said(work: Workload) -> dict[str, Any]:
    return {"work": dataclasses.asdict(work), "cores": os.cpu_count()}
