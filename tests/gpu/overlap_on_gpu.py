"""What the ranks of test_mps.py run: overlap_on_gpu.py FILE; the first rank writes what it found."""

import json
import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

import fivefold as ff
from fivefold.mesh.overlap import slowdown
from fivefold.torch_private import default_store, spin


def main() -> None:
    with ff.start() as mesh:
        store = dist.PrefixStore("again", default_store())
        kernel = partial(spin, mesh.device)
        times = slowdown(store, mesh.rank, mesh.size, kernel, timedelta(seconds=60))
        if mesh.rank == 0:
            pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "")
            told = {"slowdown": times, "device": mesh.device.type, "pipes": pipes}
            Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
