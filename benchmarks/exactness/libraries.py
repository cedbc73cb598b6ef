"""Models of other people's libraries under layouts of every kind, against one process, in float64.

    pip install --no-deps -r benchmarks/exactness/library_models/requirements.txt
    python benchmarks/exactness/libraries.py

builds small models of torchvision, timm, MONAI, transformers and segmentation-models-pytorch, trains each two
steps in processes of every layout, and has a process without Fivefold judge loss, outputs, gradients,
buffers, weights and what the net says in eval mode. Every case is kept as soon as it is done: a run that was
ended goes on where it was, and `--again wrong` runs those anew that were wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from figures import table
from library_models import nets
from page import circumstances, show

from fuzz.compare import OUTCOMES, judged
from fuzz.judge import Judge, Rejected, request
from fuzz.pool import Ranks
from fuzz.runner import checked

HERE = Path(__file__).resolve().parent
KEPT = HERE / "results" / "libraries.jsonl"
LIMIT_S = 120.0
RATE = {"lr": 0.01}
CAP = 1e-7
"""as `fivefold verify` has it"""

Row = dict[str, Any]
_STAGES = {"pipeline.micro_batches": 2}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data=2": ({"data": 2}, {}),
    "pipe=2, 1f1b": ({"pipe": 2}, {**_STAGES, "pipeline.schedule": "1f1b"}),
    "pipe=2, zero-bubble": ({"pipe": 2}, {**_STAGES, "pipeline.schedule": "zero-bubble"}),
    "pipe=2, recompute=all": (
        {"pipe": 2},
        {**_STAGES, "pipeline.schedule": "1f1b", "memory.recompute": "all"},
    ),
    "height=2, width=2": ({"height": 2, "width": 2}, {}),
}


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--libraries", nargs="+", choices=nets.LIBRARIES, default=nets.LIBRARIES)
    parser.add_argument("--models", nargs="+", default=[], metavar="LIBRARY/FAMILY")
    parser.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=tuple(LAYOUTS))
    parser.add_argument("--again", nargs="+", default=[], choices=("all", *OUTCOMES, "rejected"))
    parser.add_argument(
        "--kept", type=Path, default=KEPT, metavar="FILE", help="where outcomes are"
    )
    parser.add_argument("--details", action="store_true", help="print all about what is not exact")
    return parser.parse_args()


def main() -> int:
    """Judge what is asked for and not known, renew the page; 1 if anything is neither exact nor refused."""
    asked = options()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    torch.set_num_threads(1)
    os.environ["PYTHONPATH"] = str(HERE)  # of the processes of ranks
    known = {(row["model"], row["layout"]): row for row in _kept(asked.kept)}
    warm = [f"library_models.of_{name}" for name in asked.libraries]
    judge, ranks = Judge(LIMIT_S), Ranks(LIMIT_S, warm=warm)
    try:
        for row in _judged(asked, known, judge, ranks):
            known[row["model"], row["layout"]] = row
            with asked.kept.open("a") as file:
                file.write(json.dumps(row) + "\n")
    finally:
        judge.close()
        ranks.close()
    cases = list(_cases())
    rows = [known[case] for case in cases if case in known]
    print(_counts(rows))
    if len(rows) == len(cases) and asked.kept == KEPT:
        KEPT.write_text("".join(json.dumps(row) + "\n" for row in rows))
        show("libraries", shown(rows), circumstances())
    return 0 if all(row["outcome"] in ("exact", "refused") for row in rows) else 1


def _cases() -> Iterator[tuple[str, str]]:
    """Every model with every layout that makes sense for it."""
    for library in nets.LIBRARIES:
        for name in nets.names(library):
            for layout, (axes, _) in LAYOUTS.items():
                if nets.model(name).tiled or "height" not in axes:
                    yield name, layout


def _kept(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _judged(
    asked: argparse.Namespace, known: dict[tuple[str, str], Row], judge: Judge, ranks: Ranks
) -> Iterator[Row]:
    truths: dict[str, Any] = {}
    for name, layout in _cases():
        before = known.get((name, layout), {}).get("outcome")
        fresh = before is None or "all" in asked.again or before in asked.again
        listed = name in asked.models if asked.models else name.partition("/")[0] in asked.libraries
        if not (fresh and listed and layout in asked.layouts):
            continue
        begun = time.monotonic()
        case = case_of(name, layout)
        key = json.dumps([name, request(case)["steps"]])
        if key not in truths:
            truths = {k: v for k, v in truths.items() if json.loads(k)[0] == name}
        try:
            truth = truths[key] = truths.get(key) or checked(judge, case)
            outcome = judged(case, truth, ranks.run(case))
            kind, text, details = outcome.kind, outcome.text, outcome.details
        except Rejected as why:
            kind, text, details = "rejected", str(why), []
        taken_s = round(time.monotonic() - begun, 1)
        print(f"{name:28} {layout:22} {taken_s:5.1f} s  {kind} {text[:200]}", flush=True)
        if asked.details and kind != "exact":
            print("\n".join(f"    {line}" for line in details), flush=True)
        yield {"model": name, "layout": layout, "outcome": kind, "text": text, "taken_s": taken_s}


def case_of(name: str, layout: str) -> dict[str, Any]:
    """What processes are told about a model under a layout."""
    axes, plan = LAYOUTS[layout]
    rows, rounds = nets.model(name).rows, nets.model(name).rounds
    arguments = {"build": [name], "loss": [name], "batch": [name, rows]}
    made = {
        what: {"module": nets.__name__, "function": function, "arguments": arguments[function]}
        for what, function in (("net", "build"), ("loss", "loss"), ("batch", "batch"))
    }
    return {
        "seed": 7, "made_by": made, "path": [str(HERE)], "layout": axes, "plan": plan, "backend": "gloo",
        "example": False, "optimizer": RATE,
        "tolerance": (rounds, max(rounds, CAP)), "batches": [{"rows": rows}] * 2,
        "steps": [{"batch": 0}, {"batch": 1}],
    }  # fmt: skip


def _counts(rows: list[Row]) -> str:
    """Of every library and layout, how many are exact."""
    lines: list[list[str]] = []
    for library in (*nets.LIBRARIES, ""):
        line = [library or "all"]
        for layout in LAYOUTS:
            some = [
                row["outcome"]
                for row in rows
                if row["layout"] == layout and row["model"].startswith(library)
            ]
            line.append(_told(Counter(some)))
        lines.append(line)
    return table(["library", *LAYOUTS], lines)


def _told(counts: Counter[str]) -> str:
    others = [f"{n} {kind}" for kind, n in counts.most_common() if kind != "exact"]
    return "; ".join([f"{counts['exact']} of {counts.total()}", *others]) if counts else "-"


def shown(rows: list[Row]) -> str:
    """How many are exact, what is refused and why, and every model."""
    by_case = {(row["model"], row["layout"]): row["outcome"] for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    every = [[name, *(by_case.get((name, layout), "-") for layout in LAYOUTS)] for name in models]
    others = [[r["model"], r["layout"], r["text"]] for r in rows if r["outcome"] != "exact"]
    parts = [_counts(rows)]
    if others:
        parts.append(table(["model", "layout", "not exact"], others))
    return "\n\n".join([*parts, table(["model", *LAYOUTS], every)])


if __name__ == "__main__":
    sys.exit(main())
