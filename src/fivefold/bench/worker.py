"""A rank of a contender: waits for requests on a socket, and answers each with its own times.

Between requests it is blocked in the kernel, so that only one contender at a time uses the cores.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from typing import Any

from fivefold.bench.contender import KEY, PROTOCOL
from fivefold.bench.work import MESSAGES, Check, CommWay, Mpi, Run, Torch, partner_of
from fivefold.launch.agent_call import call

__all__ = ["main"]

_LEAST_S = 0.02
"""a compute phase of a non-blocking test is made of pieces, at least so long in all"""


def main(words: list[str]) -> int:
    """`CONTENDER SOCKET`; whoever started this process tells rank and size in its environment."""
    contender, address = words
    backend, _, how = contender.partition("-")
    work: CommWay = Mpi() if contender in ("openmpi", "mpich") else Torch(backend, how)
    with _called(address) as line:
        wire = line.makefile("rw", encoding="utf-8")
        print(json.dumps({"rank": work.rank, "pid": os.getpid()}), file=wire, flush=True)
        for text in wire:
            print(json.dumps(_answer(work, json.loads(text))), file=wire, flush=True)
    work.close()
    return 0


def _called(address: str) -> socket.socket:
    """A line to the command: at the path of a socket, or at one of some addresses HOST:PORT."""
    if KEY in os.environ:
        line = call(address.split(","), bytes.fromhex(os.environ[KEY]), PROTOCOL)
        line.settimeout(None)
        return line
    line = socket.socket(socket.AF_UNIX)
    line.connect(address)
    return line


def _answer(work: CommWay, request: dict[str, Any]) -> dict[str, Any]:
    try:
        if request["overlap"]:
            return _overlap(work, request)
        return _blocking(work, request)
    except (ValueError, RuntimeError) as problem:
        return {"error": str(problem)}


def _blocking(work: CommWay, request: dict[str, Any]) -> dict[str, Any]:
    run, check = _prepared(work, request)
    right = check()
    for _ in range(request["warmup"]):
        run()
    times: list[float] = []
    for _ in range(request["iterations"]):
        work.meet()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    operation = request["operation"]
    if operation.endswith("p2p"):
        times = [there_and_back / 2 for there_and_back in times]
    if operation in MESSAGES and partner_of(operation, work.rank, work.size) is None:
        times = []
    return {"times_s": times, "right": right}


def _overlap(work: CommWay, request: dict[str, Any]) -> dict[str, Any]:
    """OSU's definition: pure, compute and total time of a call that goes on while the caller computes."""
    begin, check = _prepared(work, request)
    right = check()
    for _ in range(request["warmup"]):
        begin().wait()
    pure_s = _mean(work, request["iterations"], lambda: begin().wait())
    pieces = _pieces(pure_s)

    def both() -> None:
        started = begin()
        _compute(pieces)
        started.wait()

    compute_s = _mean(work, request["iterations"], lambda: _compute(pieces))
    total_s = _mean(work, request["iterations"], both)
    return {"pure_s": pure_s, "compute_s": compute_s, "total_s": total_s, "right": right}


def _prepared(work: CommWay, request: dict[str, Any]) -> tuple[Run, Check]:
    return work.prepare(
        request["operation"], request["size_bytes"], request["dtype"], later=request["overlap"]
    )


def _mean(work: CommWay, iterations: int, act: Any) -> float:
    spent = 0.0
    for _ in range(iterations):
        work.meet()
        start = time.perf_counter()
        act()
        spent += time.perf_counter() - start
    return spent / iterations


def _compute(pieces: int) -> None:
    import numpy as np

    left = np.ones((32, 32), np.float32)
    for _ in range(pieces):
        np.matmul(left, left)


def _pieces(seconds: float) -> int:
    """How many pieces of computing take so long."""
    pieces = 16
    while True:
        start = time.perf_counter()
        _compute(pieces)
        spent = time.perf_counter() - start
        if spent > min(_LEAST_S, max(seconds, 1e-4)):
            return max(1, round(pieces * seconds / spent))
        pieces *= 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
