r"""A contender's side of the socket.

    run.py  ──"12\n"──►  every rank        12 steps after one that is not timed
            ◄──JSON────  every rank        seconds of each step, on rank 0's clock

The line comes over a Unix socket. Waiting for it, a rank is blocked and uses no processor; at the end of
the file it exits, so no contender outlives the benchmark.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from wire import answering


@dataclass
class Clock:
    """Marks in time: those of the GPU's stream where there is one, which nothing then has to wait for."""

    device: torch.device
    marks: list[Any] = field(default_factory=list[Any])

    def mark(self) -> None:
        """Now, or when the GPU has come to here."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def intervals_s(self) -> list[float]:
        """Seconds between marks."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return [before.elapsed_time(after) / 1e3 for before, after in pairs]
        return [after - before for before, after in pairs]


def timed(
    step: Callable[[], None], steps: int, device: torch.device, *, untimed: int = 1
) -> list[float]:
    """Seconds of each of `steps` steps, after `untimed` ones that fetch the caches back."""
    for _ in range(untimed):
        step()
    clock = Clock(device)
    clock.mark()
    for _ in range(steps):
        step()
        clock.mark()
    return clock.intervals_s()


def serve(address: str, answer: Callable[[int], dict[str, Any]], device: torch.device) -> None:
    """Answer every number that comes, until the socket closes."""
    gpu = device.type == "cuda"
    greeting = {
        "rank": int(os.environ.get("RANK", "0")),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if gpu else "cpu",
    }
    answering(address, greeting, answer)
