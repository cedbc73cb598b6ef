"""What recording costs: per operation, and in steps of training, in alternating rounds.

    python benchmarks/introspection/overhead.py

measures both parts, prints the tables, keeps the results and renews README.md: twenty minutes, undisturbed.
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

from contender import Contender, Kind
from figures import environment
from report import CONTENDERS, HERE, PAGE, STATES, WAYS
from rounds import take_turns

RANKS = 2
_RUN = ("-m", "fivefold", "run", "-n", str(RANKS), "--log-dir", "{logs}")
_RECORDED = (*_RUN, "--trace")
KINDS = {name: Kind(name, title, _RECORDED, RANKS, 1) for name, title in CONTENDERS.items()}
OPERATIONS = Kind("operations", "operations", _RUN, RANKS, 1)


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument(
        "--parts", nargs="+", choices=("operations", "steps"), default=["operations", "steps"]
    )
    parser.add_argument("--contenders", nargs="+", choices=KINDS, default=tuple(KINDS))
    parser.add_argument("--rounds", type=int, default=21, help="of each part")
    parser.add_argument("--steps", type=int, default=40, help="of each state in a round")
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", help="folder of the figures"
    )
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for; the exit code."""
    asked = options()
    return PAGE.publish(
        [f"overhead-{part}" for part in asked.parts],
        lambda part: (operations if part == "overhead-operations" else steps)(asked),
        asked.results,
    )


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
    """Milliseconds of a step of ResNet-20, by contender, state and round."""
    before = environment()

    def told(done: int, answers: Mapping[str, Sequence[Any]]) -> str:
        shown = (f"{name} {by_state(own[-1])}" for name, own in answers.items())
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
        "step_ms": {
            name: {state: [by_state(one)[state] for one in own] for state in STATES}
            for name, own in answers.items()
        },
    }  # fmt: skip


def by_state(answers: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Milliseconds of a step in each state, of the slower rank."""
    states = answers[0]["step_s"]
    found = {
        state: max(statistics.median(answer["step_s"][state]) for answer in answers) * 1e3
        for state in states
    }
    found["watched"] = found["recorded"] * (1 + max(answer["watcher"] for answer in answers))
    return {state: round(found[state], 4) for state in STATES}


if __name__ == "__main__":
    sys.exit(main())
