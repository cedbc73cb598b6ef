"""All that has to be tried on a GPU, by worth, within so many minutes; what was done is not done again.

    python benchmarks/share/campaign.py --out DIR [--minutes 8.5] [--list]

Each case is a command with a time limit of its own. Its result is a file in DIR, so that any later call, on
another machine too, goes on where this one stopped; a case that fails stops no other. At the end it says what
is proved, what failed, and what has not run. `--again failed` takes those once more.

`--device cpu --tiny` tries the script, not the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FIVEFOLD = [sys.executable, "-m", "fivefold"]
SCHEDULES = ("layer", "gpipe", "1f1b", "zero-bubble", "gems", "gems-overlap", "chimera")


@dataclass(frozen=True)
class Case:
    """Something to try."""

    name: str
    words: Sequence[str]
    minutes: float
    """how long it is expected to take; it is ended after three times that"""
    tiny: bool = False
    """whether it takes part where only the script is tried"""


def verified(name: str, model: str, layout: str, *more: str, tiny: bool = False) -> Case:
    """A model under a layout, all ranks on one GPU, equal to one process."""
    words = [*FIVEFOLD, "verify", model, "--layout", layout, "--batch", "5", "--steps", "2", *more]
    return Case(f"exact-{name}", words, 0.4, tiny)


def cases() -> Iterator[Case]:
    """All of them, by worth."""
    yield Case("probe", [sys.executable, str(HERE / "probe.py")], 0.3, tiny=True)
    yield verified("data", "resnet20", "data=2", tiny=True)
    yield verified("data-fivefold", "resnet20", "data=2", "--set", "comm.backend=fivefold")
    yield verified("width", "resnet20", "width=2")
    yield verified("tiles", "unet", "height=2,width=2", "--loss", "mse")
    yield verified("edsr", "edsr_small", "height=2", "--loss", "l1")
    for schedule in SCHEDULES:
        yield verified(schedule, "resnet20", "pipe=2", "--set", f"pipeline.schedule={schedule}")
    every = ("resnet20", "data=2,pipe=2,height=2")
    yield verified("all-axes", *every)
    yield verified("all-axes-fivefold", *every, "--set", "comm.backend=fivefold")
    yield verified("turns", "resnet20", "data=1", "--set", "tiles.turns=height=2,width=2")
    yield verified("compiled", "resnet20", "data=1", "--set", "parallel.compile=true")
    yield verified("budget", "resnet20", "data=1", "--set", "memory.budget=24MiB")
    tests = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"]
    yield Case("tests", [*tests, str(ROOT / "tests" / "gpu")], 6.0)
    collectives = [*FIVEFOLD, "run", "-n", "2", "--set", "comm.backend=fivefold"]
    yield Case("collectives", [*collectives, str(HERE / "collectives.py")], 1.0, tiny=True)
    memory = [sys.executable, str(ROOT / "benchmarks" / "memory" / "gpu.py"), "--parts", "exact"]
    yield Case("memory", [*memory, "--minutes", "3"], 3.5)
    for instances in (1, 2, 4, 8):
        words = [*FIVEFOLD, "run", "--instances", str(instances), str(HERE / "steps.py")]
        yield Case(f"steps-{instances}", words, 1.2, tiny=instances == 2)


def tried(case: Case, limit_s: float, device: str, tiny: bool) -> dict[str, Any]:
    """Run it; whatever it does, it ends within `limit_s` seconds, and so do its children."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    if device == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""
    if tiny:
        environ["CAMPAIGN_TINY"] = "1"
    began = time.monotonic()
    with subprocess.Popen(
        case.words, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True,
    ) as running:  # fmt: skip
        try:
            said, _ = running.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            said, _ = running.communicate()
    return {
        "case": case.name, "device": device, "command": " ".join(case.words), "code": running.returncode,
        "seconds": round(time.monotonic() - began, 1), "said": said[-20_000:],
    }  # fmt: skip


def told(found: dict[str, Any]) -> str:
    """One line on a result."""
    how = "passed" if found["code"] == 0 else f"FAILED ({found['code']})"
    last = next((line for line in reversed(found["said"].splitlines()) if line.strip()), "")
    return f"{found['case']:24} {how:14} {found['seconds']:7.1f} s  {last.strip()[:90]}"


def main() -> int:
    """As many cases as the minutes allow; the exit code is 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--again", choices=("nothing", "failed"), default="nothing")
    parser.add_argument("--only", default="", help="cases whose names begin so, such as exact")
    parser.add_argument(
        "--list", action="store_true", help="only say what has run, and how it ended"
    )
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + (0 if asked.list else 60 * asked.minutes)
    failed: list[str] = []
    left: list[Case] = []
    for case in cases():
        if not case.name.startswith(asked.only) or (asked.tiny and not case.tiny):
            continue
        path = asked.out / f"{case.name}.json"
        found = json.loads(path.read_text()) if path.exists() else None
        if found is not None and found["code"] and asked.again == "failed":
            found = None
        left_s = ends - time.monotonic()
        if found is None and left_s < 60 * case.minutes:
            left.append(case)
            continue
        if found is None:
            found = tried(case, min(180 * case.minutes, left_s), asked.device, asked.tiny)
            path.write_text(json.dumps(found, indent=1) + "\n")
        failed += [case.name] * (found["code"] != 0)
        print(told(found), flush=True)
    print(f"failed: {', '.join(failed) or 'nothing'}")
    minutes = sum(case.minutes for case in left)
    names = ", ".join(case.name for case in left) or "nothing"
    print(f"not run: {names}" + (f" (about {minutes:.0f} minutes)" if left else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
