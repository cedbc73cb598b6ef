"""The case in one process: a client of the program that shares no code with Fivefold."""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fuzz.cases import Case, coarse, micro_batches

__all__ = ["DEVICE", "Judge", "Rejected", "called", "made_by", "request"]

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = TESTS.parent / "src" / "fivefold" / "train" / "verify" / "one_process.py"
DEVICE = os.environ.get("FUZZ_DEVICE", "cpu")
"""where both sides compute; a variable, since every process of a campaign needs it"""
OPTIMIZER = {"lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}


class Rejected(Exception):
    """A case that one process cannot run: what was raised there."""

    def __init__(self, kind: str, where: str, text: str) -> None:
        super().__init__(f"{where}: {kind}: {text.strip().splitlines()[0] if text.strip() else ''}")


def made_by(case: Case) -> dict[str, Any]:
    """Functions that make the net, its loss and its batches: those that the case names, or the grammar's."""
    grammar = {
        "net": {"module": "fuzz.nets", "function": "build", "arguments": [case.get("net")]},
        "loss": {"module": "fuzz.losses", "function": "build", "arguments": [case.get("loss")]},
        "batch": {"module": "fuzz.data", "function": "batch", "arguments": [case]},
    }
    return case.get("made_by", grammar)


def called(function: dict[str, Any], *more: Any) -> Any:
    """What one of them returns; the loss is given the net, and batches their number."""
    module = importlib.import_module(function["module"])
    return getattr(module, function["function"])(*function["arguments"], *more)


def request(case: Case) -> dict[str, Any]:
    """What the judge is asked, but for the file that it answers in."""
    made = made_by(case)
    steps = []
    for step in case["steps"]:
        rows = case["batches"][step["batch"]]["rows"]
        steps.append({**step, "micro_batches": micro_batches(case, rows)})
    last = case["steps"][-1]["batch"]
    return {
        "path": [str(TESTS), *case.get("path", [])],
        "seed": case["seed"],
        "device": DEVICE,
        "dtype": "float64",
        "net": made["net"],
        "loss": {**made["loss"], "with_net": True},
        "batch": made["batch"],
        "event": {"module": "fuzz.events", "function": "happen"},
        "state": {"module": "fuzz.nets", "function": "state"},
        "masks": case["plan"].get("numerics.seed", 0),
        "optimizer": {**OPTIMIZER, **case.get("optimizer", {})},
        "steps": steps,
        "evaluate": [last, last],
        "nudged": coarse(case) / 20 or True,
    }


class Judge:
    """A process that stays and answers one case after the other."""

    def __init__(self, limit_s: float = 90.0) -> None:
        self.limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-")
        self._process: subprocess.Popen[str] | None = None

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            )
        return self._process

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The records of a request. Raises `Rejected` for what one process cannot run."""
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        file = Path(self._folder.name) / "answer.pt"
        process.stdin.write(json.dumps({**asked, "answer": str(file)}) + "\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], self.limit_s)[0]:
            self.stop()
            raise Rejected("Timeout", "the judge", f"no answer within {self.limit_s} s")
        line = process.stdout.readline()
        if not line:
            self.stop()
            raise Rejected("Crash", "the judge", "the process ended")
        told = json.loads(line)
        if told["error"] is not None:
            raise Rejected(told["kind"], told["where"], told["error"])
        found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        file.unlink()
        return found

    def of(self, case: Case) -> dict[str, Any]:
        """The truth about a case. Raises `Rejected`."""
        return self.ask(request(case))

    def by_rows(self, case: Case) -> dict[str, Any]:
        """The same where regions of low precision round each sample alone. Raises `Rejected`."""
        net = {"module": "fuzz.nets", "function": "by_rows", "arguments": [case["net"]]}
        return self.ask({**request(case), "net": net, "nudged": False})

    def stop(self) -> None:
        """End the process; the next question starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None

    def close(self) -> None:
        """End for good."""
        self.stop()
        self._folder.cleanup()
