"""What PyTorch says of itself, asked in a process of its own: it may be slow, broken, or not there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass

from fivefold.closing import Closing
from fivefold.launch.guard import dies_with_parent

__all__ = ["Probe", "TorchFacts"]

LIMIT_S = 60.0

_ASK = """
import json, torch
kind = next((f"{name} {v}" for name, v in
             [("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)] if v), "")
kind = kind or ("XPU" if getattr(torch.version, "xpu", None) else "")
part = torch.xpu if kind == "XPU" else torch.cuda
print(json.dumps({"version": torch.__version__, "gpus_of": kind, "devices": part.device_count()}))
"""


@dataclass(frozen=True)
class TorchFacts:
    """What is known of PyTorch."""

    version: str = ""
    """empty if it could not be asked"""
    gpus_of: str = ""
    """what GPUs it was built for, such as `CUDA 13.0`; empty: for none"""
    devices: int = 0
    """GPUs that it sees"""
    seconds: float = 0.0
    """that the import took, and the look for GPUs"""
    problem: str = ""
    """why it could not be asked"""


class Probe(Closing):
    """A question to PyTorch that is under way; closing it leaves no process behind."""

    def __init__(self, environ: Mapping[str, str] = os.environ, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._began = time.monotonic()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _ASK],
            # It is no rank: importing torch must not begin the trace of one.
            env={name: value for name, value in environ.items() if name != "FIVEFOLD_TRACE"},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=dies_with_parent(),  # noqa: PLW1509 - no threads yet
        )

    def answer(self) -> TorchFacts:
        """Wait for the answer, or for the end of the time that there is. Never raises for what torch does."""
        try:
            code = self._process.wait(max(0.0, self._began + self._limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._end()
            return TorchFacts(problem=f"it was not imported within {self._limit_s:g} s")
        seconds = time.monotonic() - self._began
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines() or [""]
        return _understood(lines[-1], code, seconds)

    def close(self) -> None:
        """End the process if it has not answered."""
        self._end()
        self._output.close()

    def _end(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _understood(line: str, code: int, seconds: float) -> TorchFacts:
    if code < 0:
        return TorchFacts(
            problem=f"importing it ended with {signal.Signals(-code).name}", seconds=seconds
        )
    if code > 0:
        return TorchFacts(problem=line or f"importing it ended with code {code}", seconds=seconds)
    try:
        told = json.loads(line)
        return TorchFacts(str(told["version"]), str(told["gpus_of"]), int(told["devices"]), seconds)
    except (ValueError, KeyError, TypeError):
        return TorchFacts(problem=f"it answered {line[:80]!r}", seconds=seconds)
