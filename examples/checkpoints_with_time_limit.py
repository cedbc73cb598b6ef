"""Training that ends before the time limit of a job, with code 75, and goes on when it is started again.

    fivefold run -n 2 checkpoints_with_time_limit.py          # until it is done, or a signal comes
    fivefold run -n 2 checkpoints_with_time_limit.py 3300     # for 55 minutes at most
    until fivefold run -n 2 checkpoints_with_time_limit.py 3300; do [ $? -eq 75 ] || break; done

A run that was stopped, killed or lost a node goes on from its newest save, on as many processes as before or
on others, and ends with the loss of one that never stopped. The batch files beside it start it again.
"""

import os
import signal
import sys
import threading

import torch
from torch import nn
from torch.utils.data import TensorDataset

import fivefold as ff

EPOCHS = 12


def ask_to_end_after(limit_s):
    """As if the scheduler had sent the signal, for those that send none. One rank's is enough."""
    timer = threading.Timer(limit_s, os.kill, (os.getpid(), signal.SIGUSR1))
    timer.daemon = True
    timer.start()


def waves(count):
    draw = torch.Generator().manual_seed(0)
    points = torch.rand(count, 4, generator=draw)
    return TensorDataset(points, torch.sin(4 * points).sum(1, keepdim=True))


def main():
    torch.manual_seed(0)
    with ff.start() as mesh:
        net = nn.Sequential(
            nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 1)
        )
        model = ff.parallelize(net, mesh, loss=nn.MSELoss())
        optim = torch.optim.Adam(model.parameters(), lr=0.001)
        data = ff.loader(waves(2048), mesh, batch_size=64, seed=0)
        saved = {"model": model, "optim": optim, "data": data}
        # A directory that all nodes see. Saves lie on each node's own disk first: in TMPDIR, or where
        # checkpoint.local in the plan says.
        with ff.Checkpointer("runs/waves", mesh, **saved) as checkpoints:
            if len(sys.argv) > 1:
                ask_to_end_after(float(sys.argv[1]))
            begun = False
            for step, (x, y) in checkpoints.resume(data, EPOCHS):
                if mesh.rank == 0 and not begun:
                    print(f"begins with step {step}", flush=True)
                begun = True
                loss = model.step(x, y)
                optim.step()
                optim.zero_grad()
                checkpoints.maybe_save(step)  # saves when it is time; ends here when it has to
                if mesh.rank == 0 and step % 64 == 0:
                    print(f"step {step}  loss {loss.item():.5f}", flush=True)
            checkpoints.save(
                data.cursor.step
            )  # the end, so that another start has nothing left to do
        data.close()


if __name__ == "__main__":
    main()
