"""Rare faults of jobs on several nodes: networks in halves, clocks, the launcher's node, passwords."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import ssh_servers
from commands import starting
from login_site import Site
from nodes import refusal
from waiting import alive, awaited

pytestmark = [
    pytest.mark.skipif(bool(refusal()), reason=refusal()),
    pytest.mark.long,
    pytest.mark.timeout(200),
]

TIMEOUT_S = 90.0
STEPS = 12
TRAINS = f"""
import hashlib, os, sys, time
from pathlib import Path
import torch, fivefold as ff
here = Path(sys.argv[1])
with ff.start() as mesh:
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1).double()
    samples = torch.utils.data.TensorDataset(torch.randn(64, 8).double(), torch.randn(64, 1).double())
    data = ff.loader(samples, mesh, batch_size=16, seed=0)
    model = ff.parallelize(net, mesh, loss=torch.nn.MSELoss())
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    things = {{"model": model, "optim": optim, "data": data}}
    with ff.Checkpointer(here / "run", mesh, local=os.environ["LOCAL"], every=2, **things) as ckpt:
        for step, (x, y) in ckpt.resume(data, {STEPS // 4}):
            model.step(x, y)
            optim.step()
            optim.zero_grad()
            ckpt.maybe_save(step)
            (here / f"step-{{step}}").touch()
            time.sleep(float(sys.argv[2]))
    data.close()
    whole = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
    print("at", int(time.time()))
    print("weights", hashlib.sha256(whole).hexdigest())
"""
Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(3, tmp_path) as made:
        yield made


@pytest.fixture
def run(site: Site, tmp_path: Path) -> Iterator[Run]:
    """Start `fivefold run` of `TRAINS`, with so many seconds between steps."""
    (tmp_path / "script.py").write_text(TRAINS)
    with starting() as start:

        def launch(pause_s: float, *options: str, **variables: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "fivefold", "run", *options]
            words = [*site.entering(tmp_path), *command, "script.py", str(tmp_path), str(pause_s)]
            return start(words, site.environ | {"LOCAL": str(site.nodes.local(0))} | variables)

        yield launch
    awaited(lambda: not site.processes(), "the nodes to be empty", TIMEOUT_S)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


def weights(out: str) -> set[str]:
    return set(re.findall(r"\] weights (\w+)", out))


def undisturbed(run: Run, folder: Path) -> set[str]:
    """The weights of a run that nobody disturbs, of which nothing is left."""
    code, out, err = finish(run(0, "-H", "node0:1,node1:1"))
    assert code == 0, err
    for path in folder.glob("step-*"):
        path.unlink()
    shutil.rmtree(folder / "run")
    return weights(out)


def test_of_a_network_in_two_halves_the_one_with_the_launcher_goes_on(
    site: Site, run: Run, tmp_path: Path
) -> None:
    """The other half has the first rank, and still reaches the directory in which both save."""
    right = undisturbed(run, tmp_path)
    job = run(0.3, "-H", "node0:1,node1:1,node2:1", "--spares", "1", "--restarts", "2")
    awaited((tmp_path / "step-5").exists, "five steps", TIMEOUT_S)
    site.nodes.cut(0)
    code, out, err = finish(job)
    assert code == 0, err
    assert "note: node node2 takes the place of node0" in err and err.count("\nrestart ") == 1
    assert "goes on after step" in err
    assert weights(out) == right and len(right) == 1


_LATER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

#define LATER_S (3 * 3600)

int clock_gettime(clockid_t clock, struct timespec *now) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, now);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) now->tv_sec += LATER_S;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
"""
"""clocks of a process go three hours ahead; those of its files do not"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_clocks_that_are_hours_apart(site: Site, run: Run, tmp_path: Path) -> None:
    right = undisturbed(run, tmp_path)
    (tmp_path / "later.c").write_text(_LATER)
    library = tmp_path / "later.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, tmp_path / "later.c", "-ldl"], check=True
    )
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nLD_PRELOAD={library} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text(f"node0 python={python}\nnode1\nnode2\n")
    job = run(0.3, "--hostfile", str(hosts), "--spares", "1", "--restarts", "2", "--trace")
    awaited((tmp_path / "step-5").exists, "five steps", TIMEOUT_S)
    site.nodes.kill(1)
    code, out, err = finish(job)
    assert code == 0, err
    assert "note: node node2 takes the place of node1" in err and err.count("\nrestart ") == 1
    assert weights(out) == right
    at = sorted(map(int, re.findall(r"\] at (\d+)", out)))
    assert at[1] - at[0] > 10_000, "they are"
    [logs] = (tmp_path / "fivefold-logs").glob("*/restart-1")
    words = [sys.executable, "-m", "fivefold", "report", str(logs), "--html", "none", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    told = json.loads(done.stdout)["run"]
    assert 0 < told["seconds"] < 60, "of one clock"


@pytest.mark.skipif(bool(ssh_servers.refusal()), reason=ssh_servers.refusal())
def test_nodes_that_ask_for_a_password_are_told(site: Site, tmp_path: Path) -> None:
    """Neither at the terminal nor in a window: nobody may sit there."""
    asks = tmp_path / "asks"
    asks.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\nsleep 300\n")
    asks.chmod(0o755)
    command = [sys.executable, "-m", "fivefold", "run", "-H", "node0,node1", "--", "true"]
    window = {"SSH_ASKPASS": str(asks), "DISPLAY": ":0"}
    with ssh_servers.ssh_servers(site, tmp_path, ask=True) as words:
        done = subprocess.run(
            ["script", "-qec", shlex.join([*site.entering(tmp_path), *command]), "/dev/null"],
            env=site.environ | window | {"FIVEFOLD_RSH": words}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "error: 2 of 2 nodes cannot be used; no rank was started" in done.stdout
    assert done.stdout.count("Permission denied (publickey,password") == 2
    assert not (tmp_path / "asked").exists()


@pytest.mark.skipif(bool(ssh_servers.refusal()), reason=ssh_servers.refusal())
def test_when_the_node_of_the_launcher_dies_the_others_end_and_the_run_goes_on_later(
    site: Site, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(TRAINS)

    def start(node: int, hosts: str, pause_s: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "fivefold", "run", "-H", hosts, "--restarts", "1"]
        words = [
            *site.nodes.entry(node),
            "sh",
            "-c",
            'cd "$0" && exec "$@"',
            str(tmp_path),
            *command,
        ]
        environ = site.environ | {"FIVEFOLD_RSH": shell, "LOCAL": str(site.nodes.local(0))}
        return begin([*words, "script.py", str(tmp_path), pause_s], environ)

    def left() -> list[int]:
        """But for sshd, which waits for its client."""
        return [pid for pid in site.processes() if alive(pid) and not name(pid).startswith("sshd")]

    def name(pid: int) -> str:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(pid).name()
        return ""

    with ssh_servers.ssh_servers(site, tmp_path) as shell, starting() as begin:
        start(0, "node0,node1,node2", "0.3")
        awaited((tmp_path / "step-5").exists, "five steps", TIMEOUT_S)
        site.nodes.kill(0, silently=True)
        awaited(lambda: not left(), "the other nodes to be empty", TIMEOUT_S)
        code, out, err = finish(start(1, "node1,node2", "0"))
    assert code == 0, err
    [told] = re.findall(r"goes on after step (\d+)", err)
    assert int(told) >= 4 and len(weights(out)) == 1
