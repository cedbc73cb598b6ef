"""All that has to be tried on a GPU, by worth, within so many minutes; what was done is not done again.

    python benchmarks/share/campaign.py --out DIR [--minutes 8.5] [--list]

Cases, see cases.py, have a time limit each. The result of one is a file in DIR, so that any later call, on
another machine too, goes on where this one stopped; a case that fails stops no other. At the end it says what
is proved, what failed, and what has not run. `--again failed` takes those once more.

`--device cpu --tiny` tries the script, not the GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from cases import ROOT, Case, Launch, keep, launches

START_S, LEAST_S = 90.0, 30.0
"""what imports may take on busy cores, and a case at least"""
PATIENCE = {"cuda": 1, "cpu": 4}
"""times as much on cores, that ranks have to share"""
KEPT = 20_000
"""characters of what a command says"""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None)


@dataclass
class Campaign:
    """Where results are, and how long there is."""

    out: Path
    device: str
    tiny: bool
    ends: float
    """by `time.monotonic`"""

    @property
    def left_s(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()

    def found(self, case: Case) -> dict[str, Any] | None:
        """The result, once there is one."""
        path = self.out / f"{case.name}.json"
        return json.loads(path.read_text()) if path.exists() else None

    def environ(self, scratch: str) -> dict[str, str]:
        """Of commands."""
        paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
        told = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "TMPDIR": scratch}
        told["CAMPAIGN_OUT"] = str(self.out)
        if self.device == "cpu":
            told["CUDA_VISIBLE_DEVICES"] = ""
        if self.tiny:
            told["CAMPAIGN_TINY"] = "1"
        return {**os.environ, **told}

    def carry_out(self, launch: Launch, cases: Sequence[Case]) -> None:
        """Start the command for these cases, and anew after each that it does not survive.

        Cases that time does not suffice for are left without a result, and so are those of a command that
        twice did nothing.
        """
        todo, barren = list(cases), 0
        while todo and barren < 2:
            many, begun = len(todo), time.monotonic()
            words = [*launch.words, *(case.name for case in todo if launch.named)]
            code, said = self.run(words, todo)
            if not todo:
                return
            barren = barren + 1 if len(todo) == many else 0
            took = time.monotonic() - begun
            if code is None and self.left_s <= 0:
                return
            case = todo.pop(0)
            passed = code == 0 and not launch.named
            why = (
                said if code is not None else f"{said}\nended after {took:.0f} s: it took too long"
            )
            ended, command = "passed" if passed else "failed", " ".join(words)
            keep(case.name, ended, took, why[-KEPT:], command=command, code=code)
            self.tell(case)

    def run(self, words: Sequence[str], todo: list[Case]) -> tuple[int | None, str]:
        """Take off `todo` what has a result, until the command ends: its code, and what it said.

        The code is None if it had to be ended. Nothing that it started runs afterwards.
        """
        with tempfile.TemporaryDirectory(prefix="campaign-", ignore_cleanup_errors=True) as scratch:
            log = Path(scratch, "said")
            with log.open("wb") as out, ended_with_us():
                running = subprocess.Popen(
                    words, env=self.environ(scratch), stdin=subprocess.DEVNULL, stdout=out,
                    stderr=subprocess.STDOUT, cwd=scratch, start_new_session=True,
                    preexec_fn=dies_with_us,  # noqa: PLW1509 - there are no threads here
                )  # fmt: skip
                limit = time.monotonic() + START_S + self.limit_s(todo[0])
                while running.poll() is None and time.monotonic() < min(limit, self.ends):
                    time.sleep(0.1)
                    if self.taken(todo) and todo:
                        limit = time.monotonic() + self.limit_s(todo[0])
                code = running.poll()
            self.taken(todo)
            return code, log.read_text(errors="replace")

    def limit_s(self, case: Case) -> float:
        """After which a case is ended."""
        return PATIENCE[self.device] * max(LEAST_S, 180 * case.minutes)

    def taken(self, todo: list[Case]) -> bool:
        """Tell of those that have a result by now, and take them off."""
        many = len(todo)
        while todo and self.found(todo[0]) is not None:
            self.tell(todo.pop(0))
        return len(todo) < many

    def tell(self, case: Case) -> None:
        """One line on a result."""
        found = self.found(case)
        assert found is not None, "it was kept"
        lines = [line.strip() for line in found["said"].splitlines() if line.strip()]
        how = found["ended"] if found["ended"] == "passed" else found["ended"].upper()
        print(
            f"{how:8}{found['seconds']:7.1f} s  {case.name:40} {(lines or [''])[-1][:110]}",
            flush=True,
        )


def dies_with_us() -> None:
    """In a command that is about to begin: where the campaign is killed, it ends, and so do ranks."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def ended_with_us() -> Generator[None]:
    """What is started within the block is over after it, sessions of its own or not."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become ours
    try:
        yield
    finally:
        us = psutil.Process()
        while children := us.children(recursive=True):
            for child in children:
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            psutil.wait_procs(children, timeout=5)


def stopped(number: int, _frame: FrameType | None) -> None:
    """Leave in order, whoever asks for it."""
    raise SystemExit(128 + number)


def summary(campaign: Campaign, cases: Sequence[Case]) -> int:
    """Print what is known of them; 1 if one has failed."""
    known = [(case, campaign.found(case)) for case in cases]
    names = {
        ended: [case.name for case, found in known if found and found["ended"] == ended]
        for ended in ("passed", "failed", "refused")
    }
    left = [case for case, found in known if found is None]
    minutes = sum(case.minutes for case in left)
    print(f"proved: {len(names['passed'])} of {len(cases)}")
    print(f"refused: {', '.join(names['refused']) or 'nothing'}")
    print(f"failed: {', '.join(names['failed']) or 'nothing'}")
    print(
        f"not run: {', '.join(case.name for case in left) or 'nothing'}"
        + (f" (about {minutes:.1f} minutes)" if left else "")
    )
    return 1 if names["failed"] else 0


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--again", choices=("nothing", "failed"), default="nothing")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="cases whose names begin so, such as exact"
    )
    parser.add_argument(
        "--list", action="store_true", help="only say what has run, and how it ended"
    )
    return parser.parse_args()


def main() -> int:
    """As many cases as the minutes allow; the exit code is 1 if one has failed."""
    asked = options()
    asked.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + (0 if asked.list else 60 * asked.minutes)
    campaign = Campaign(asked.out.resolve(), asked.device, asked.tiny, ends)
    os.environ["CAMPAIGN_OUT"] = str(campaign.out)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, stopped)
    every: list[Case] = []
    for launch in launches(asked.device, asked.tiny):
        cases = [case for case in launch.cases if case.name.startswith(tuple(asked.only))]
        every += cases
        due: list[Case] = []
        needed_s = 0.0
        for case in cases:
            found = campaign.found(case)
            if found is not None and found["ended"] == "failed" and asked.again == "failed":
                (campaign.out / f"{case.name}.json").unlink()
                found = None
            if found is not None:
                campaign.tell(case)
            elif needed_s + 60 * case.minutes <= campaign.left_s:
                needed_s += 60 * case.minutes
                due.append(case)
        if due:
            campaign.carry_out(launch, due)
    return summary(campaign, every)


if __name__ == "__main__":
    sys.exit(main())
