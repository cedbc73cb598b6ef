"""What recording costs: per operation, and in steps of training, in alternating rounds.

    python benchmarks/introspection/overhead.py

measures both parts, prints the tables, keeps the results and renews README.md: ten minutes, undisturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import publishing
from contender import Contender, Kind, leave_properly
from figures import Median, environment, ratio, table
from publishing import conditions
from rounds import take_turns

HERE = Path(__file__).resolve().parent
RANKS = 2
GOAL_SHARE, GOAL_US = 1.01, 0.5
_RUN = ("-m", "fivefold", "run", "-n", str(RANKS), "--log-dir", "{logs}")
_RECORDED = (*_RUN, "--trace")
KINDS = {
    kind.name: kind
    for kind in (
        Kind("fivefold", "Fivefold", _RUN, RANKS, 1),
        Kind("fivefold-recorded", "Fivefold, recorded", _RECORDED, RANKS, 1),
        Kind("fivefold-profiled", "Fivefold, torch.profiler", _RUN, RANKS, 1),
        Kind("ddp", "DistributedDataParallel, gloo", _RUN, RANKS, 1),
        Kind("ddp-recorded", "DistributedDataParallel, recorded", _RECORDED, RANKS, 1),
        Kind("ddp-profiled", "DistributedDataParallel, torch.profiler", _RUN, RANKS, 1),
    )
}
OPERATIONS = Kind("operations", "operations", _RUN, RANKS, 1)
WAYS = {
    "trace": "Trace.issue and Trace.ended alone, adding up included",
    "span": "a span of a phase alone",
    "step": "Trace.step_ended with 20 operations, those not counted",
    "gloo": "all_reduce of 4 bytes, gloo as torch makes it",
    "gloo-passed": "the same through the group that passes on, nothing recorded",
    "gloo-recorded": "the same, recorded",
    "fivefold": "all_reduce of 4 bytes, fivefold",
    "fivefold-recorded": "the same, recorded",
}


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument(
        "--parts", nargs="+", choices=("operations", "steps"), default=["operations", "steps"]
    )
    parser.add_argument("--contenders", nargs="+", choices=KINDS, default=tuple(KINDS))
    parser.add_argument("--rounds", type=int, default=17, help="of each part")
    parser.add_argument("--steps", type=int, default=8, help="timed steps in a block")
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", help="folder of the figures"
    )
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for; the exit code."""
    asked = options()
    with leave_properly():
        for part in asked.parts:
            result = operations(asked) if part == "operations" else steps(asked)
            print(f"\n{section(result)}\n", flush=True)
            publishing.keep(result, f"overhead-{part}", asked.results, HERE, _renewed)
    return 0


def operations(asked: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of each way, by round."""
    before = environment()
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder, Contender(
        OPERATIONS, HERE / "overhead_worker.py", [], Path(folder)
    ) as running:  # fmt: skip
        running.wait_until_ready()
        rounds, others = take_turns(
            [running],
            asked.rounds,
            lambda c: c.ask(1)[0]["us"],
            lambda done, _: f"operations {done}/{asked.rounds}",
        )
    return {
        "benchmark": "overhead-operations", "rounds": asked.rounds,
        "environment": {**before, "torch": running.greeting["torch"], **others.told()},
        "us": {way: [found[way] for found in rounds[OPERATIONS.name]] for way in WAYS},
    }  # fmt: skip


def steps(asked: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a step of ResNet-20, by contender and round."""
    before = environment()

    def told(done: int, answers: Mapping[str, Sequence[Any]]) -> str:
        shown = (f"{name} {_mean_ms(own[-1]):.1f}" for name, own in answers.items())
        return f"{done}/{asked.rounds} ms: {'  '.join(shown)}"

    with (
        tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        running: list[Contender] = []
        for name in asked.contenders:
            contender = Contender(KINDS[name], HERE / "overhead_worker.py", [], Path(folder))
            running.append(stack.enter_context(contender))
            contender.wait_until_ready()
        answers, others = take_turns(running, asked.rounds, lambda c: c.ask(asked.steps), told)
        greeting = running[-1].greeting
    return {
        "benchmark": "overhead-steps", "rounds": asked.rounds, "steps_per_block": asked.steps,
        "environment": {**before, "torch": greeting["torch"], **others.told()},
        "step_ms": {name: [_mean_ms(one) for one in own] for name, own in answers.items()},
    }  # fmt: skip


def _mean_ms(answers: Sequence[Mapping[str, Any]]) -> float:
    """Of the slower rank."""
    return round(max(statistics.mean(answer["step_s"]) for answer in answers) * 1e3, 4)


def section(result: dict[str, Any]) -> str:
    """A part as it stands in the README."""
    title = (
        "Per operation"
        if "us" in result
        else "Steps of ResNet-20, 64 images of 32 pixels, two ranks"
    )
    body = _operations(result["us"]) if "us" in result else _steps(result["step_ms"])
    return f"### {title}\n\n{body}\n\n{conditions(result)}"


def _operations(us: dict[str, list[float]]) -> str:
    base = {"gloo-passed": "gloo", "gloo-recorded": "gloo", "fivefold-recorded": "fivefold"}
    rows: list[list[str]] = []
    for way, found in us.items():
        more = ""
        if way in base:
            added = [own - plain for own, plain in zip(found, us[base[way]], strict=True)]
            more = _interval(added)
        rows.append([WAYS[way], _interval(found), more])
    goal = Median.of(us["trace"]).at_most(GOAL_US)
    return "\n\n".join([
        table(["", "us [95 %]", "more than without, us [95 %]"], rows),
        f"Goal, at most {GOAL_US} us for an operation: {goal}.",
    ])  # fmt: skip


def _interval(values: Sequence[float]) -> str:
    found = Median.of(values)
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _steps(step_ms: dict[str, list[float]]) -> str:
    rows: list[list[str]] = []
    goals: list[str] = []
    for name, found in step_ms.items():
        plain = step_ms.get(name.partition("-")[0])
        same = plain is None or plain is found
        over = "" if same else str(ratio(found, plain))
        rows.append([KINDS[name].title, f"{statistics.median(found):.2f}", over])
        if name.endswith("-recorded") and not same:
            said = ratio(found, plain).at_most(GOAL_SHARE)
            goals.append(f"Goal, {KINDS[name].title} at most {GOAL_SHARE} of without: {said}.")
    return "\n\n".join([table(["", "ms", "times without [95 %]"], rows), *goals])


def _renewed(text: str, folder: Path) -> str:
    return publishing.with_figures(text, folder, section, ("overhead-operations", "overhead-steps"))


if __name__ == "__main__":
    sys.exit(main())
