"""What becomes of a job on several nodes when nodes, cables, agents and launchers fail."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from login_site import Site
from nodes import refusal
from waiting import awaited, launcher

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())

TIMEOUT_S = 90.0
PROMISED_S = 5.0
SILENT_S = 20.0
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


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(3, tmp_path) as made:
        yield made


Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run(site: Site, tmp_path: Path) -> Iterator[Run]:
    """Start `fivefold run` of a script; its first argument is `tmp_path`."""
    started: list[subprocess.Popen[str]] = []

    def launch(
        body: str, *options: str, arguments: Sequence[str] = (), **variables: str
    ) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(body)
        command = [sys.executable, "-m", "fivefold", "run", *options]
        if "--log-dir" not in options:
            command += ["--log-dir", str(tmp_path / "logs")]
        process = subprocess.Popen(
            [*site.entering(tmp_path), *command, str(script), str(tmp_path), *arguments],
            env=site.environ | {"LOCAL": str(site.nodes.local(0))} | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield launch
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.communicate()


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


def ready(folder: Path, ranks: int) -> None:
    awaited(lambda: len(list(folder.glob("*.ready"))) == ranks, "all ranks to start", TIMEOUT_S)


def emptied(site: Site, timeout_s: float = PROMISED_S) -> None:
    awaited(lambda: not site.processes(), "the nodes to be empty", timeout_s)


def test_a_node_that_is_lost_is_named_and_the_others_end(
    site: Site, run: Run, tmp_path: Path
) -> None:
    process = run(WAITS, "-H", "node0:1,node1:2,node2:1")
    ready(tmp_path, 4)
    site.nodes.kill(1)
    code, _, err = finish(process)
    assert code == 1
    assert re.search(
        "error: node node1 with ranks 1 to 2 of 4 was lost: .*the other ranks were", err
    )
    emptied(site)


@pytest.mark.long
def test_a_cable_that_is_cut_is_noticed_on_both_ends(site: Site, run: Run, tmp_path: Path) -> None:
    process = run(WAITS, "-H", "node0:1,node1:1")
    ready(tmp_path, 2)
    began = time.monotonic()
    site.nodes.cut(1)
    code, _, err = finish(process)
    assert code == 1 and "error: node node1 with rank 1 of 2 was lost: " in err
    assert time.monotonic() - began < SILENT_S + 3 * PROMISED_S
    emptied(site, SILENT_S + 3 * PROMISED_S)


def test_an_agent_that_is_killed_takes_its_ranks_along(
    site: Site, run: Run, tmp_path: Path
) -> None:
    process = run(WAITS, "-H", "node0:1,node1:1")
    ready(tmp_path, 2)
    (agent,) = [
        pid
        for pid in site.nodes.processes(1)
        if "fivefold.launch.agent" in psutil.Process(pid).cmdline()
    ]
    os.kill(agent, signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1 and "error: node node1 with rank 1 of 2 was lost: " in err
    emptied(site)


def weights(out: str) -> set[str]:
    found = re.findall(r"\[\d\] weights (\w+)", out)
    assert len(found) == 4
    return set(found)


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_spare_takes_over_and_the_weights_are_those_of_a_run_without_loss(
    site: Site, run: Run, tmp_path: Path
) -> None:
    code, out, err = finish(run(TRAINS, "-H", "node0:2,node1:2", arguments=["0"]))
    assert code == 0, err
    undisturbed = weights(out)
    for path in tmp_path.glob("step-*"):
        path.unlink()
    subprocess.run(["rm", "-rf", str(tmp_path / "run")], check=True)
    options = ["-H", "node0:2,node1:2,node2:2", "--spares", "1", "--restarts", "3"]
    process = run(TRAINS, *options, "--log-dir", str(tmp_path / "again"), arguments=["0.2"])
    awaited((tmp_path / "step-9").exists, "nine steps", TIMEOUT_S)
    site.nodes.kill(1)
    code, out, err = finish(process)
    assert code == 0, err
    assert "note: node node2 takes the place of node1" in err
    assert "goes on after step" in err
    assert weights(out) == undisturbed
    emptied(site)


def test_without_a_spare_a_lost_node_is_the_end(site: Site, run: Run, tmp_path: Path) -> None:
    process = run(WAITS, "-H", "node0:1,node1:1", "--restarts", "3")
    ready(tmp_path, 2)
    site.nodes.kill(1)
    code, _, err = finish(process)
    assert code == 1
    assert "error: no spare is left for node node1: " in err and err.count("restart 1 of 3") == 1
    emptied(site)


def test_nodes_that_cannot_be_reached_are_all_named(site: Site, run: Run, tmp_path: Path) -> None:
    code, _, err = finish(run(WAITS, "-H", "node0:1,absent:1,node1:1,missing:1"))
    assert code == 1
    assert "error: 2 of 4 nodes cannot be used; no rank was started\n" in err
    for name in ("absent", "missing"):
        assert (
            f"    {name}: what started its agent exited with code 255: ssh: Could not resolve"
            in err
        )
    assert not list(tmp_path.glob("*.ready"))
    emptied(site)


def test_a_node_with_another_version_is_named(site: Site, run: Run, tmp_path: Path) -> None:
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n"
        "of = m.version\n"
        "m.version = lambda name: '0.0.1' if name == 'fivefold' else of(name)\n"
    )
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={fake} exec {sys.executable} $(echo "$@" | sed s/-P//)\n'
    )
    python.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text(f"node0\nnode1 python={python}\n")
    code, _, err = finish(run(WAITS, "--hostfile", str(hosts)))
    assert code == 1
    assert re.search(r"node1: it has fivefold 0.0.1 \(here .*\); all nodes need the same", err)
    emptied(site)


def test_a_folder_that_a_node_lacks_is_told_once(site: Site, run: Run, tmp_path: Path) -> None:
    own = site.nodes.local(0) / "here"  # on the login node; every node has a disk of its own there
    subprocess.run([*site.entering(tmp_path), "mkdir", str(own)], check=True)
    process = subprocess.run(
        [*site.entering(own), sys.executable, "-m", "fivefold", "run", "-H", "node0:2,node1:2",
         "--log-dir", str(tmp_path / "logs"), "--", "true"],
        env=site.environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert process.returncode == 2
    assert process.stderr.count("\n") == 1
    assert re.match(rf"error: node\d has no directory {own}: ranks run in that", process.stderr)
    emptied(site)


@pytest.mark.long
def test_a_launcher_that_stands_still_holds_up_no_rank(
    site: Site, run: Run, tmp_path: Path
) -> None:
    lines = 60_000
    process = run(
        f"""
import os, sys, time
from pathlib import Path
here, rank = Path(sys.argv[1]), os.environ["RANK"]
(here / f"{{rank}}.ready").touch()
while not (here / "go").exists():
    time.sleep(0.01)
for start in range(0, {lines}, 100):
    sys.stdout.write("".join(f"{{n}} {{'x' * 100}}\\n" for n in range(start, start + 100)))
(here / f"{{rank}}.written").touch()
""",
        "-H",
        "node0:1,node1:1",
    )
    ready(tmp_path, 2)
    held = launcher(process)
    held.suspend()
    (tmp_path / "go").touch()
    awaited(lambda: len(list(tmp_path.glob("*.written"))) == 2, "ranks to write", TIMEOUT_S)
    held.resume()
    code, out, err = finish(process)
    assert code == 0, err
    expected = [f"{n} {'x' * 100}" for n in range(lines)]
    for rank in "01":
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert log == expected
        assert out.count(f"[{rank}] ") == lines


def test_too_few_slots_start_nothing(site: Site, run: Run, tmp_path: Path) -> None:
    code, _, err = finish(run(WAITS, "-H", "node0:1,node1:1", "-n", "3"))
    assert code == 2 and err.startswith(
        "error: 3 processes are asked for, and there are 2 slots on 2"
    )
    assert not (tmp_path / "logs").exists()


@pytest.mark.long
def test_a_rank_that_writes_all_the_time_holds_up_neither_signals_nor_failures(
    site: Site, run: Run, tmp_path: Path
) -> None:
    flood = """
import os, sys, time
from pathlib import Path
here, rank = Path(sys.argv[1]), os.environ["RANK"]
(here / f"{rank}.ready").touch()
lines = ("y" * 199 + "\\n") * 300
while rank == "0" or sys.argv[2] == "stop":
    sys.stdout.write(lines)
time.sleep(1)
sys.exit(3)
"""
    for ending, code in (("fail", 3), ("stop", 130)):
        folder = tmp_path / ending
        process = run(
            flood, "-H", "node0:1,node1:1", "--log-dir", str(folder), arguments=[ending], FIVEFOLD_GRACE_S="2"
        )  # fmt: skip
        ready(tmp_path, 2)
        if ending == "stop":
            launcher(process).send_signal(signal.SIGINT)
        drained = subprocess.Popen(["cat"], stdin=process.stdout, stdout=subprocess.DEVNULL)
        assert process.wait(30) == code
        drained.wait(30)
        for path in tmp_path.glob("*.ready"):
            path.unlink()
        emptied(site)


@pytest.mark.long
def test_ranks_save_to_the_end_though_the_first_has_ended_and_a_restart_were_left(
    site: Site, run: Run, tmp_path: Path
) -> None:
    process = run(
        """
import os, signal, sys, time
from pathlib import Path
here, rank = Path(sys.argv[1]), int(os.environ["RANK"])
def save(*_):
    time.sleep(1.5 * rank)
    (here / f"{rank}.saved").touch()
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
(here / f"{rank}.ready").touch()
time.sleep(300)
""",
        "-H", "node0:1,node1:1", "--restarts", "3",
    )  # fmt: skip
    ready(tmp_path, 2)
    launcher(process).send_signal(signal.SIGUSR1)
    code, _, err = finish(process)
    assert code == 75 and "the same command goes on" in err
    assert len([*tmp_path.glob("*.saved")]) == 2


def test_a_launcher_that_is_killed_leaves_ranks_the_time_to_save_and_to_say_so(
    site: Site, run: Run, tmp_path: Path
) -> None:
    process = run(
        """
import os, signal, sys, time
from pathlib import Path
here, rank = Path(sys.argv[1]), int(os.environ["RANK"])
def save(*_):
    print("saving " * 40_000, flush=True)
    (here / f"{rank}.saved").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
(here / f"{rank}.ready").touch()
time.sleep(300)
""",
        "-H", "node0:1,node1:1",
    )  # fmt: skip
    ready(tmp_path, 2)
    launcher(process).kill()
    emptied(site, 2 * PROMISED_S)
    assert len([*tmp_path.glob("*.saved")]) == 2


def test_what_the_user_sets_reaches_ranks_whatever_its_length_and_files_are_closed_between_starts(
    site: Site, run: Run, tmp_path: Path
) -> None:
    process = run(
        """
import os, sys
print(os.environ["TMPDIR"], os.environ["CUDA_VISIBLE_DEVICES"], len(os.environ["LONG"]), os.environ["PWD"])
sys.exit(os.environ.get("FIVEFOLD_RESTART") != "2")
""",
        "-H", "node0:12,node1:12", "--restarts", "2", "-x", "TMPDIR=/var/tmp", "-x", "CUDA_VISIBLE_DEVICES=1",
        LONG="ä" * 60_000, **{f"LONG{n}": "ä" * 60_000 for n in range(4)},
    )  # fmt: skip
    pid = launcher(process).pid
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (90, 90))
    code, _, err = finish(process)
    assert code == 0, err
    logs = [(tmp_path / "logs" / "restart-2" / f"rank-{n}.log").read_text() for n in range(24)]
    assert logs == [f"/var/tmp 1 60000 {tmp_path}\n"] * 24


@pytest.mark.long
def test_what_escapes_from_a_start_does_not_write_into_the_logs_of_the_next(
    site: Site, run: Run, tmp_path: Path
) -> None:
    process = run(
        """
import os, subprocess, sys, time
again = os.environ.get("FIVEFOLD_RESTART", "0")
if again == "0":
    escaped = "import time\\nfor n in range(60): print('escaped', flush=True); time.sleep(0.05)"
    subprocess.Popen([sys.executable, "-c", escaped], start_new_session=True)
    time.sleep(1)
    sys.exit(1)
time.sleep(1)
print("well")
""",
        "-H", "node0:1,node1:1", "--restarts", "1",
    )  # fmt: skip
    code, _, err = finish(process)
    assert code == 0, err
    for rank in "01":
        assert "escaped" in (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert (tmp_path / "logs" / "restart-1" / f"rank-{rank}.log").read_text() == "well\n"
