"""A rank of the recovery benchmark: saves a state once, or brings it back in one of several ways."""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from torch.distributed.checkpoint.state_dict import get_state_dict
from workload import Training, training

import fivefold as ff

SHARED, LOCAL = os.environ["SHARED"], os.environ["LOCAL"]


def main() -> None:
    """Do it, and print the seconds that loading took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=("save", "load", "dcp"))
    parser.add_argument("--layers", type=int, default=4)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    dist.init_process_group("gloo")
    run = training("mlp", asked.layers, 8, "replicated")
    run.step()
    dist.barrier()
    begun = time.perf_counter()
    if asked.way == "dcp":
        load_with_dcp(run)
    else:
        with ff.Checkpointer(
            f"{SHARED}/run", local=LOCAL, scheme="xor", flush_every=1, flush_bytes_per_s=0,
            model=run.net, optim=run.optimiser,
        ) as checkpoints:  # fmt: skip
            if asked.way == "save":
                checkpoints.save(1)
            else:
                begun = time.perf_counter()  # a run makes its Checkpointer anyway
                assert checkpoints.load() is not None
                dist.barrier()
                print("seconds", time.perf_counter() - begun, flush=True)
    dist.barrier()
    if asked.way == "dcp":
        print("seconds", time.perf_counter() - begun, flush=True)
    print("bytes", run.state_bytes, flush=True)
    # Not destroy_process_group: it holds the interpreter while it waits for gloo's threads, which
    # may need it.
    os._exit(0)


def load_with_dcp(run: Training) -> None:
    """What a script without Fivefold reads of the same files."""
    model, optim = get_state_dict(run.net, run.optimiser)
    state = {"model": model, "optim": {"state": optim["state"]}}
    [newest] = Path(SHARED, "run").glob("step-*")
    dcp.load(state, checkpoint_id=newest)


if __name__ == "__main__":
    main()
