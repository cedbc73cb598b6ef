"""Sums and messages over several nodes until told to stop: python cable_sums.py SILENCE_S [INTERFACES].

Each round is checked; the last line tells how many there were, or how the backend ended, and after how long.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

import fivefold.comm
from fivefold.comm.streams import configure
from fivefold.sections import Comm

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
plan = Comm(silence_s=float(sys.argv[1]), interfaces="".join(sys.argv[2:]))
configure(plan)
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0)
dist.init_process_group(fivefold.comm.BACKEND, store=store, rank=rank, world_size=size)
stop = Path(os.environ["SHARED"]) / "stop"
rounds, last = 0, time.monotonic()
try:
    going = True
    while going:
        last = time.monotonic()
        count = (1, 5000, 300_000)[rounds % 3]
        sums = torch.full((count,), float(rank + rounds))
        dist.all_reduce(sums)
        assert bool((sums == size * rounds + size * (size - 1) / 2).all()), sums
        got = torch.empty(count)
        sent = dist.isend(torch.full((count,), float(rank)), (rank + 1) % size)
        dist.recv(got, (rank - 1) % size)
        assert sent is not None
        sent.wait()
        assert bool((got == (rank - 1) % size).all()), got
        ends = torch.tensor([float(stop.exists())])
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        going, rounds = not ends.item(), rounds + 1
        print("round", flush=True)
    for name in plan.interface_names:
        print(f"{name} sent {psutil.net_io_counters(pernic=True)[name].bytes_sent}", flush=True)
    print(f"all of {rounds} rounds", flush=True)
except RuntimeError as problem:
    print(f"ended after {time.monotonic() - last:.1f} s: {problem}", flush=True)
    os._exit(3)
