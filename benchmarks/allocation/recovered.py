"""A rank of the restart benchmark: it trains a small net, saves each step, and tells when each step ended.

python recovered.py ours|undisturbed|torch FOLDER STEPS
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

COMPARED_EVERY = 25
way, folder, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])


def ended(step: int) -> None:
    """Tell that a step has ended, and which process this is."""
    with (folder / f"steps-{os.environ['RANK']}").open("a") as file:
        file.write(f"{step} {time.time()} {os.getpid()}@{os.uname().nodename}\n")


def tell_weights(step: int, optim: torch.optim.Optimizer) -> None:
    """What the weights are after a step, in short."""
    told = hashlib.sha256()
    for group in optim.param_groups:
        for weight in group["params"]:
            told.update(weight.detach().numpy().tobytes())
    with (folder / "weights").open("a") as file:
        file.write(f"{step} {told.hexdigest()}\n")


def net() -> torch.nn.Module:
    """A million parameters."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 512)
    )


def ours() -> None:
    """Fivefold: a Checkpointer that saves to memory of the node."""
    import fivefold as ff

    times = [time.time()]
    with ff.start() as mesh:
        times.append(time.time())
        torch.manual_seed(0)
        samples = torch.utils.data.TensorDataset(torch.randn(64, 512), torch.randn(64, 512))
        data = ff.loader(samples, mesh, batch_size=16, seed=0)
        model = ff.parallelize(net(), mesh, loss=torch.nn.MSELoss())
        optim = torch.optim.SGD(model.parameters(), lr=0.01)
        things: dict[str, Any] = {"model": model, "optim": optim, "data": data}
        local = os.environ.get("LOCAL") or folder / "local"
        every = 1 if way == "ours" else steps
        with ff.Checkpointer(
            folder / "run", mesh, local=local, every=every, **things
        ) as checkpointer:
            for step, (x, y) in checkpointer.resume(data, steps // 4):
                if len(times) == 2:
                    times.append(time.time())
                    with (folder / f"parts-{mesh.rank}").open("a") as file:
                        file.write(" ".join(map(str, times)) + "\n")
                model.step(x, y)
                optim.step()
                optim.zero_grad()
                checkpointer.maybe_save(step)
                ended(step)
                if mesh.rank == 0 and step % COMPARED_EVERY == 0:
                    tell_weights(step, optim)
                if way == "ours":
                    time.sleep(0.05)
        data.close()


def theirs() -> None:
    """torch: DistributedDataParallel, and a distributed checkpoint after each step."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(net())
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    complete = sorted(path.parent for path in (folder / "dcp").glob("*/.metadata"))
    first = 1
    if complete:
        weights, states = get_state_dict(model, optim)
        state: dict[str, Any] = {"model": weights, "optim": states}
        dcp.load(state, checkpoint_id=complete[-1])
        set_state_dict(
            model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        first = int(complete[-1].name) + 1
    torch.manual_seed(dist.get_rank())
    for step in range(first, steps + 1):
        x, y = torch.randn(8, 512), torch.randn(8, 512)
        torch.nn.functional.mse_loss(model(x), y).backward()
        optim.step()
        optim.zero_grad()
        weights, states = get_state_dict(model, optim)
        name = folder / "dcp" / f"{step:06d}"
        dcp.save({"model": weights, "optim": states}, checkpoint_id=name)
        ended(step)
        time.sleep(0.05)
    dist.destroy_process_group()


theirs() if way == "torch" else ours()
