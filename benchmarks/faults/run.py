"""How often a report names rank and cause of a fault, after ten steps.

    python benchmarks/faults/run.py

Each fault is made anew so many times (tests/fault_cases.py), in an order that changes from round to round,
and one run per round has no fault.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from figures import environment, table
from publishing import Page, conditions

from fault_cases import CASES, CONTROL, Case
from template import Template

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="part of the names of faults")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of figures")
    asked = parser.parse_args()
    return PAGE.publish(PAGE.order, lambda _: measured(asked.rounds, asked.only), asked.results)


def measured(rounds: int, only: str = "") -> dict[str, Any]:
    """Which verdicts were right, by fault."""
    before = environment()
    chosen = [case for case in (*CASES, CONTROL) if only in case.name]
    absent = {case.name: why for case in chosen if (why := case.needs())}
    cases = [case for case in chosen if case.name not in absent]
    named = {case.name: 0 for case in cases}
    missed: dict[str, list[str]] = {case.name: [] for case in cases}
    with Template() as template:
        for number in range(rounds):
            for case in random.Random(number).sample(cases, len(cases)):
                text = verdict(case, template)
                right = case.right(text)
                named[case.name] += right
                if not right:
                    missed[case.name].append(text)
                said = "named" if right else f"NOT named: {text}"
                print(f"{number + 1}/{rounds} {case.name}: {said}", flush=True)
    import torch

    return {
        "rounds": rounds, "named": named, "missed": missed, "absent": absent,
        "environment": {**before, "torch": torch.__version__},
    }  # fmt: skip


def verdict(case: Case, template: Template) -> str:
    """What the report says; how it went wrong, if the run did."""
    with tempfile.TemporaryDirectory(prefix="fivefold-fault-") as folder:
        try:
            return case.verdict(template, Path(folder)).text
        except AssertionError as problem:
            time.sleep(0.5)
            return f"the run went wrong: {str(problem)[-300:]}"


def section(result: dict[str, Any]) -> str:
    """As it stands in the README."""
    rows = [[name, f"{count} / {result['rounds']}"] for name, count in result["named"].items()]
    lines = [table(["fault", "verdict names rank and cause"], rows), ""]
    for name, texts in result["missed"].items():
        lines += [f"Missed, {name}: {text}" for text in dict.fromkeys(texts[:2])]
    lines += [f"Without {name}: {why}." for name, why in result["absent"].items()]
    where = conditions({"environment": result["environment"]})
    return "\n".join(
        [*lines, "", f"{result['rounds']} runs each, whatever others computed meanwhile. {where}"]
    )


PAGE = Page(HERE, section, ("faults",))


if __name__ == "__main__":
    sys.exit(main())
