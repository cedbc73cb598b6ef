"""Runs of scripts on the nodes of a site, for tests of what becomes of them.

@pytest.fixture
def run(site: Site, tmp_path: Path) -> Iterator[Run]:
    with running(site, tmp_path) as run:
        yield run
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from commands import starting
from login_site import Site
from waiting import awaited

__all__ = [
    "PROMISED_S",
    "TIMEOUT_S",
    "TRAINS",
    "WAITS",
    "Run",
    "emptied",
    "finish",
    "ready",
    "running",
]

TIMEOUT_S = 90.0
PROMISED_S = 5.0
WAITS = """
import os, sys, time
from pathlib import Path
here, rank = Path(sys.argv[1]), os.environ["RANK"]
(here / f"{rank}.ready").write_text(str(os.getpid()))
time.sleep(300)
"""
TRAINS = """
import hashlib, os, sys, time
from pathlib import Path
import torch, fivefold as ff
here = Path(sys.argv[1])
with ff.start() as mesh:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).double()
    samples = torch.utils.data.TensorDataset(torch.randn(64, 8).double(), torch.randn(64, 1).double())
    data = ff.loader(samples, mesh, batch_size=16, seed=0)
    model = ff.parallelize(net, mesh, loss=torch.nn.MSELoss())
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    things = {"model": model, "optim": optim, "data": data}
    with ff.Checkpointer(here / "run", mesh, local=os.environ["LOCAL"], every=2, **things) as ckpt:
        for step, (x, y) in ckpt.resume(data, 6):
            model.step(x, y)
            optim.step()
            optim.zero_grad()
            ckpt.maybe_save(step)
            (here / f"step-{step}").touch()
            time.sleep(float(sys.argv[2]))
    data.close()
    whole = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print("weights", hashlib.sha256(whole).hexdigest())
"""

Run = Callable[..., subprocess.Popen[str]]


@contextlib.contextmanager
def running(site: Site, folder: Path) -> Generator[Run]:
    """Start `fivefold run` of a script; its first argument is `folder`."""
    with starting() as start:

        def launch(
            body: str, *options: str, arguments: Sequence[str] = (), **variables: str
        ) -> subprocess.Popen[str]:
            script = folder / "script.py"
            script.write_text(body)
            command = [sys.executable, "-m", "fivefold", "run", *options]
            if "--log-dir" not in options:
                command += ["--log-dir", str(folder / "logs")]
            words = [*site.entering(folder), *command, str(script), str(folder), *arguments]
            return start(words, site.environ | {"LOCAL": str(site.nodes.local(0))} | variables)

        yield launch


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """How it ends, and what it has written."""
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


def ready(folder: Path, ranks: int) -> None:
    """Wait until so many ranks say that they are there."""
    awaited(lambda: len(list(folder.glob("*.ready"))) == ranks, "all ranks to start", TIMEOUT_S)


def emptied(site: Site, timeout_s: float = PROMISED_S) -> None:
    """Wait until nothing runs on the nodes."""
    awaited(lambda: not site.processes(), "the nodes to be empty", timeout_s)
