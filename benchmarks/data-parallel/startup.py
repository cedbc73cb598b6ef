"""Start-up: seconds until two processes have met, summed a number and ended.

    python benchmarks/data-parallel/startup.py

`run.py` measures this too. The bound is what no launcher can avoid: Python importing torch, once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import report
from bystanders import Bystanders
from contender import BenchmarkError, leave_properly
from contenders import HERE, RANKS
from figures import environment

LIMIT_S = 60.0
WARM_UP = 2


def commands(logs: Path) -> dict[str, list[str]]:
    """What is compared; the launchers are the installed commands, as a user types them."""
    beside = Path(sys.executable).parent
    return {
        "bound: python -c 'import torch'": [sys.executable, "-c", "import torch"],
        "torchrun": [
            *(str(beside / "torchrun"), "--standalone", f"--nproc-per-node={RANKS}"),
            str(HERE / "hello_torch.py"),
        ],
        "fivefold run": [
            *(str(beside / "fivefold"), "run", "-n", str(RANKS), "--log-dir", str(logs)),
            str(HERE / "hello.py"),
        ],
    }


def measure(rounds: int) -> dict[str, Any]:
    """Alternate the commands; their wall times by round."""
    before = environment()
    wall_s: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as name:
        folder = Path(name)
        others = Bystanders(rounds, _ended_children_s)
        attempt, done = 0, -WARM_UP
        while done < rounds:
            others.begin()
            turn = list(commands(folder / f"logs-{attempt}").items())
            order = turn if attempt % 2 else turn[::-1]
            latest = {title: round(_wall_s(command, folder), 4) for title, command in order}
            attempt += 1
            if done >= 0 and not others.were_quiet():
                continue
            done += 1
            for title, seconds in latest.items() if done > 0 else ():
                wall_s.setdefault(title, []).append(seconds)
    wall_s = {title: wall_s[title] for title in commands(folder)}
    torch = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.__version__)"],
        capture_output=True, text=True, check=True, timeout=LIMIT_S,
    ).stdout.strip()  # fmt: skip
    return {
        "benchmark": "startup",
        "ranks": RANKS,
        "rounds": rounds,
        "environment": {**before, "torch": torch, **others.told()},
        "wall_s": wall_s,
    }


def _ended_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wall_s(command: list[str], folder: Path) -> float:
    log = folder / "last.log"
    with log.open("wb") as output:
        begun = time.perf_counter()
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            code = process.wait(LIMIT_S)
        except BaseException:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            process.kill()
            process.wait()
            raise
        taken = time.perf_counter() - begun
    if code:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise BenchmarkError(f"{' '.join(command)}: ended with code {code}; it last wrote\n{last}")
    return taken


def main() -> int:
    """Measure start-up alone; the exit code."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, help="folder of the figures"
    )
    asked = parser.parse_args()
    with leave_properly():
        result = measure(asked.rounds)
        print(f"\n{report.startup(result)}\n", flush=True)
        report.keep(result, "startup", asked.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
