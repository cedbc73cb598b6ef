"""Chooses the fixed cases of the test suite: few, valid, and together with every tag and every layout.

PYTHONPATH=tests python -m fuzz.choose 100
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from fuzz.campaign import Source, Wanted
from fuzz.cases import Case, label, ranks_of, tags

__all__ = ["FIXED", "chosen"]

FIXED = Path(__file__).parent / "fixed.json"


def chosen(cases: list[Case], count: int) -> list[Case]:
    """Cases that cover all tags and layouts of many, those first that bring most per process."""
    features = [{*tags(case), label(case)} for case in cases]
    left = set(range(len(cases)))
    seen: Counter[str] = Counter()
    picked: list[int] = []
    while left and len(picked) < count:

        def worth(number: int) -> float:
            new = sum(2.0 ** -(3 * seen[feature]) for feature in features[number])
            return new / (2 + ranks_of(cases[number]) + len(cases[number]["steps"]))

        best = max(sorted(left), key=worth)
        left.remove(best)
        picked.append(best)
        seen.update(features[best])
    return [cases[number] for number in sorted(picked)]


def main(count: int, of: int = 1500, seed: int = 20) -> None:
    """Choose `count` of `of` valid cases and write them."""
    source = Source(Wanted(seed=seed, cases=of))
    cases: list[Any] = [case for case, _ in source]
    source.close()
    picked = chosen(cases, count)
    every = {feature for case in cases for feature in (*tags(case), label(case))}
    held = {feature for case in picked for feature in (*tags(case), label(case))}
    FIXED.write_text("[\n" + ",\n".join(json.dumps(case) for case in picked) + "\n]\n")
    print(f"{len(held)} of {len(every)} features; without: {', '.join(sorted(every - held))}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
