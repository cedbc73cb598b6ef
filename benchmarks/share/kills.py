"""One of several instances is killed while they train: how long until they go on, and from where?

    python benchmarks/share/kills.py [--fork]

Four instances of a device save every five steps; the last of them is killed by SIGKILL after the twelfth.
With `--restarts` the job has to go on after the tenth, with the losses that it had, and end. Goal: 30 s from
the kill to the end of the next step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TINY = bool(os.environ.get("CAMPAIGN_TINY"))
INSTANCES, NET, IMAGES = (2, "resnet20", 8) if TINY else (4, "resnet18", 256)
EVERY, KILLED, LAST = 5, 12, 16
GOAL_S = 30.0


def train(folder: Path) -> None:
    """What an instance does; the first writes a line for each step."""
    import torch
    from torch import nn

    import fivefold as ff
    from fivefold.recipes.models import build

    restarted = "FIVEFOLD_RESTART" in os.environ
    with ff.start() as mesh:
        torch.manual_seed(0)
        images = torch.randn(LAST * IMAGES, 3, 32, 32)
        samples = torch.utils.data.TensorDataset(images, torch.randint(10, (len(images),)))
        data = ff.loader(samples, mesh, batch_size=IMAGES, seed=0)
        model = ff.parallelize(build(NET, 10), mesh, loss=nn.CrossEntropyLoss())
        optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        far, near = folder / "far", folder / "near"
        with ff.Checkpointer(
            far, mesh, local=near, every=EVERY, model=model, optim=optim, data=data
        ) as saves:
            for step, (x, y) in saves.resume(data, 1):
                loss = float(model.step(x, y))
                optim.step()
                optim.zero_grad()
                if mesh.rank == 0:
                    line = json.dumps([step, loss, time.time(), restarted])
                    with (folder / "steps").open("a") as steps:
                        steps.write(line + "\n")
                saves.maybe_save(step)
                saves.wait()
                if step == KILLED and mesh.rank == mesh.size - 1 and not restarted:
                    (folder / "killed").write_text(str(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)


def judged(folder: Path) -> str:
    """What is wrong with a run that has ended well; if nothing is, the seconds are printed."""
    steps = [json.loads(line) for line in (folder / "steps").read_text().splitlines()]
    before = {step: loss for step, loss, _, restarted in steps if not restarted}
    after = {step: (loss, ended) for step, loss, ended, restarted in steps if restarted}
    saved = KILLED // EVERY * EVERY
    if list(after) != list(range(saved + 1, LAST + 1)):
        return (
            f"after the kill it made the steps {list(after)}, not those from {saved + 1} to {LAST}"
        )
    for step in set(before) & set(after):
        if abs(before[step] - after[step][0]) > 1e-3 * abs(before[step]):
            return f"the loss of step {step} was {before[step]}, and was {after[step][0]} again"
    took = after[saved + 1][1] - float((folder / "killed").read_text())
    met = "tried only" if TINY else "met" if took <= GOAL_S else "missed"
    print(
        f"from the kill to the next step: {took:.1f} s (goal: {GOAL_S:.0f} s, {met}); "
        f"{INSTANCES} instances went on after step {saved}"
    )
    return ""


def main() -> int:
    """Start the job, and look at what it has left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fork", action="store_true", help="as of `fivefold run`")
    parser.add_argument("--train", type=Path, help="be an instance, and leave files in this folder")
    asked = parser.parse_args()
    if asked.train:
        train(asked.train)
        return 0
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        done = subprocess.run(
            [
                sys.executable, "-m", "fivefold", "run", "--instances", str(INSTANCES), "--restarts", "1",
                *["--fork"] * asked.fork, __file__, "--train", folder,
            ],
            check=False,
        )  # fmt: skip
        wrong = f"the job ended with {done.returncode}" if done.returncode else judged(Path(folder))
    if wrong:
        print(f"error: {wrong}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
