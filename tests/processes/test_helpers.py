"""`--helpers` with every engine: helpers do the work, end with the job, and their own end ends nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import mpis
from commands import CLEAN, fivefold, starting
from nodes import Nodes, refusal
from waiting import alive, awaited

TIMEOUT_S = 90.0
PROMISED_S = 5.0

# Whoever makes a sample leaves a mark. The first pass is over before a helper has loaded PyTorch.
STREAM = """
import hashlib, os, sys, time
from pathlib import Path
import torch
import fivefold as ff

here = Path(sys.argv[1])

class Marked:
    def __len__(self):
        return 48

    def __getitem__(self, index):
        role = os.environ.get("FIVEFOLD_ROLE") or "trainer"
        (here / f"made-{role}-{os.environ.get('FIVEFOLD_HELPER_NUMBER', '')}").touch()
        time.sleep(0.002)
        return torch.rand(3, 8, 8) + index, index

mesh = ff.start()
(here / f"up-{mesh.role}-{os.getpid()}").touch()
data = ff.loader(Marked(), mesh, batch_size=8, seed=3)
digest = hashlib.sha256()
for epoch in range(3):
    for x, y in data:
        digest.update(x.numpy().tobytes())
        digest.update(y.numpy().tobytes())
    while epoch == 0 and not list(here.glob("made-helper*")) and WAITS:
        for x, y in data:
            pass
        data.load_state_dict({**data.state_dict(), "epoch": 0, "batch": len(data) - 1})
        time.sleep(0.05)
print(mesh.role, mesh.rank, digest.hexdigest(), flush=True)
"""

Run = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Start `fivefold run` of STREAM, or of another body; its argument is `tmp_path`."""
    numbers = itertools.count()
    with starting() as start:

        def launch(
            *options: str, body: str = STREAM, waits: bool = True, before: tuple[str, ...] = (),
            environment: dict[str, str] | None = None,
        ) -> subprocess.Popen[str]:  # fmt: skip
            script = tmp_path / "script.py"
            script.write_text(f"WAITS = {waits}\n{body}")
            logs = tmp_path / f"logs-{next(numbers)}"
            command = [sys.executable, "-m", "fivefold", "run", "--log-dir", str(logs), *options]
            words = [*before, *command, str(script), str(tmp_path)]
            environ = {**CLEAN, "OMP_NUM_THREADS": "1", **(environment or {})}
            return start(words, environ, tmp_path)

        yield launch


@pytest.fixture
def shared(tmp_path: Path) -> str:
    """A plan under which helpers may run on the cores of trainers: this machine may have but one."""
    (tmp_path / "shared.toml").write_text("[offload]\nshare_cores = true\n")
    return str(tmp_path / "shared.toml")


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, out, err


def digests(out: str) -> list[str]:
    return [line.split()[-1] for line in sorted(out.splitlines()) if " trainer " in line]


def helpers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.environ().get("FIVEFOLD_ROLE") == "helper":
                found.append(child)
    return found


def gone(*processes: psutil.Process) -> bool:
    return not any(alive(p.pid) for p in processes)


def sockets() -> set[str]:
    """Folders of sockets; those of jobs that run beside this test come and go."""
    import tempfile

    names = os.listdir(tempfile.gettempdir())  # noqa: PTH208
    return {name for name in names if re.fullmatch(r"fivefold-[0-9a-f]{16}", name)}


@pytest.fixture(params=["local", "torchrun", "openmpi", "mpich"])
def engine(request: pytest.FixtureRequest) -> tuple[str, dict[str, str]]:
    name: str = request.param
    if name in ("local", "torchrun"):
        return name, {}
    return "mpirun", {"FIVEFOLD_MPIRUN": str(mpis.find(name))}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What two trainers read without helpers: the same whatever has started them."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "script.py").write_text(f"WAITS = False\n{STREAM}")
    done = fivefold("run", "-n", 2, "script.py", folder, cwd=folder, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return digests(done.stdout)


@pytest.mark.long
def test_helpers_work_with_every_engine(
    run: Run, engine: tuple[str, dict[str, str]], alone: list[str], shared: str, tmp_path: Path
) -> None:
    name, environment = engine
    options = ("-n", "2", "--engine", name, "--plan", shared, "--helpers", "local:1")
    before = sockets()
    code, out, err = finish(run(*options, environment=environment))
    assert code == 0, err
    assert digests(out) == alone and len(alone) == 2
    assert (tmp_path / "made-helper-0").exists(), err
    assert "helper" not in out, "a helper's script ends where it serves"
    assert (tmp_path / "logs-0/helper-0.log").exists()
    assert not sockets() - before


@pytest.mark.long
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_helpers_have_cores_of_their_own(run: Run, engine: tuple[str, dict[str, str]]) -> None:
    body = """
import os, sys, time
from pathlib import Path
role = os.environ.get("FIVEFOLD_ROLE", "trainer")
print(role, *sorted(os.sched_getaffinity(0)), "with", os.environ["OMP_NUM_THREADS"], flush=True)
Path(sys.argv[1], f"up-{role}").touch()
while not Path(sys.argv[1], "up-helper").exists():
    time.sleep(0.02)
time.sleep(0.2)
"""
    name, environment = engine
    process = run("-n", "2", "--engine", name, "--helpers", "local:1", "-x", "OMP_NUM_THREADS=7",
                  body=body, environment=environment)  # fmt: skip
    code, out, err = finish(process)
    assert code == 0, err
    rows = [line.split(maxsplit=2)[1:] for line in out.splitlines()]
    cores = {role: set(told.partition(" with ")[0].split()) for role, told in rows}
    assert cores["trainer"] and not cores["trainer"] & cores["helper"]
    assert {told.rpartition(" ")[2] for role, told in rows if role == "trainer"} == {"7"}
    assert {told.rpartition(" ")[2] for role, told in rows if role == "helper"} != {"7"}


@pytest.mark.long
def test_a_helper_that_is_killed_helps_again(run: Run, shared: str, tmp_path: Path) -> None:
    code, out, err = finish(run("-n", "1", waits=False))
    assert code == 0, err
    alone = digests(out)
    body = (
        STREAM
        + """
while not (here / "killed").exists():
    time.sleep(0.02)
helped = False
while not helped:
    helped = bool(list(here.glob("made-helper*")))  # once more when one has come back
    data.load_state_dict({**data.state_dict(), "epoch": 0, "batch": -1})
    again = hashlib.sha256()
    for epoch in range(3):
        for x, y in data:
            again.update(x.numpy().tobytes())
            again.update(y.numpy().tobytes())
    assert again.hexdigest() == digest.hexdigest()
"""
    )
    process = run("-n", "1", "--plan", shared, "--helpers", "local:2", body=body)
    awaited(lambda: list(tmp_path.glob("made-helper*")), "helpers to work", TIMEOUT_S)
    helpers = helpers_of(process)
    for helper in helpers:
        helper.kill()
    awaited(lambda: gone(*helpers), "helpers to be gone", TIMEOUT_S)
    for mark in tmp_path.glob("made-helper*"):
        mark.unlink()
    (tmp_path / "killed").touch()
    code, out, err = finish(process)
    assert code == 0, err
    assert digests(out) == alone
    for number in (0, 1):
        assert (
            f"warning: helper {number} (this node) was killed by SIGKILL (out of memory?); it is started "
            "again (1 of 3 times)" in err
        )


def test_a_helper_is_started_three_times_again(run: Run, shared: str, tmp_path: Path) -> None:
    body = """
import os, sys, time
from pathlib import Path
here = Path(sys.argv[1])
if os.environ.get("FIVEFOLD_ROLE") == "helper":
    print("helping", flush=True)
    (here / f"up-{os.getpid()}").touch()
while not (here / "over").exists():
    time.sleep(0.02)
"""
    process = run("-n", "1", "--plan", shared, "--helpers", "local:1", body=body)
    for times in range(1, 5):
        awaited(lambda n=times: len(list(tmp_path.glob("up-*"))) == n, "the helper", TIMEOUT_S)
        (helper,) = helpers_of(process)
        helper.kill()
        awaited(lambda h=helper: gone(h), "the helper to be gone", TIMEOUT_S)
    (tmp_path / "over").touch()
    code, out, err = finish(process)
    assert (code, out) == (0, "[h0] helping\n" * 4)
    killed = "warning: helper 0 (this node) was killed by SIGKILL (out of memory?); "
    assert re.findall(r"^warning: .*\n", err, re.MULTILINE) == [
        *(f"{killed}it is started again ({n} of 3 times)\n" for n in (1, 2, 3)),
        f"{killed}the job goes on without it, which has been started again 3 times\n",
    ]


def test_a_helper_that_fails_is_quoted(run: Run, shared: str) -> None:
    body = """
import os, sys, time
from pathlib import Path
here = Path(sys.argv[1])
if os.environ.get("FIVEFOLD_ROLE") == "helper":
    (here / f"up-{os.getpid()}").touch()
    sys.exit("error: the images are not here")
while not (up := list(here.glob("up-*"))):
    time.sleep(0.02)
while Path("/proc", up[0].name.removeprefix("up-")).exists():  # until the launcher knows
    time.sleep(0.02)
"""
    process = run("-n", "1", "--plan", shared, "--helpers", "local:1", body=body)
    code, _, err = finish(process)
    assert code == 0
    assert "[h0] error: the images are not here\n" in err
    assert re.search(
        r"helper 0 \(this node\) exited with code 1; the job goes on without it\n"
        r"  last lines of .*helper-0\.log:\n    error: the images are not here\n",
        err,
    )


WAITING = """
import os, subprocess, sys, time
from pathlib import Path
child = subprocess.Popen(["sleep", "300"])
Path(sys.argv[1], f"pid-{os.getpid()}-{child.pid}").touch()
time.sleep(300)
"""


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("where", ["local", "elsewhere"])
def test_nothing_is_left_when_the_launcher_ends(
    run: Run, shared: str, tmp_path: Path, signum: signal.Signals, where: str
) -> None:
    before = sockets()
    host = "local:1" if where == "local" else "elsewhere:1"
    process = run(
        "-n", "1", "--plan", shared, "--helpers", host, body=WAITING,
        environment={"FIVEFOLD_RSH": shell(tmp_path)},
    )  # fmt: skip
    awaited(lambda: len(list(tmp_path.glob("pid-*"))) == 2, "rank and helper to start", TIMEOUT_S)
    numbers = [int(n) for path in tmp_path.glob("pid-*") for n in path.name.split("-")[1:]]
    mine = [psutil.Process(number) for number in numbers]
    assert any(p.environ().get("FIVEFOLD_ROLE") == "helper" for p in mine)
    process.send_signal(signum)
    process.wait(TIMEOUT_S)
    awaited(lambda: gone(*mine), "processes to be gone", PROMISED_S)
    awaited(lambda: not sockets() - before, "sockets to be gone", PROMISED_S)


def test_helpers_end_with_the_ranks(run: Run, shared: str, tmp_path: Path) -> None:
    body = """
import os, sys, time
from pathlib import Path
role = os.environ.get("FIVEFOLD_ROLE", "trainer")
Path(sys.argv[1], f"up-{role}-{os.getpid()}").touch()
while role == "helper" or len(list(Path(sys.argv[1]).glob("up-helper*"))) < 2:
    time.sleep(0.02)
sys.exit(3)
"""
    process = run(
        "-n", "1", "--plan", shared, "--helpers", "local:1", "--helpers", "far:1", body=body,
        environment={"FIVEFOLD_RSH": shell(tmp_path)},
    )  # fmt: skip
    code, _, err = finish(process)
    assert code == 3
    assert "rank 0 of 1 exited with code 3" in err
    helpers = [int(path.name.split("-")[-1]) for path in tmp_path.glob("up-helper*")]
    awaited(lambda: not any(map(psutil.pid_exists, helpers)), "helpers to be gone", PROMISED_S)


def shell(folder: Path, inner: str = 'exec sh -c "$2"') -> str:
    """A remote shell that goes no farther than this host."""
    script = folder / "rsh"
    script.write_text(f"#!/bin/sh\ncd /\n{inner}\n")
    script.chmod(0o755)
    return f"{script}"


def test_what_a_remote_helper_gets(run: Run, tmp_path: Path) -> None:
    body = """
import os, sys, time
from pathlib import Path
if os.environ.get("FIVEFOLD_ROLE") == "helper":
    told = (os.getcwd(), os.environ["GIVEN"], len(os.environ["FIVEFOLD_HELPER_KEY"]), sys.stdin.read())
    Path(sys.argv[1], "told.tmp").write_text(repr(told))
    Path(sys.argv[1], "told.tmp").rename(Path(sys.argv[1], "told"))
    print(os.environ["FIVEFOLD_HELPER_LISTEN"], *sorted(os.sched_getaffinity(0)), flush=True)
while not Path(sys.argv[1], "told").exists():
    time.sleep(0.02)
"""
    core = min(os.sched_getaffinity(0))
    hosts = tmp_path / "hosts"
    hosts.write_text(f"localhost slots=1\nfar role=helper port=21999 cores={core}\n")
    process = run(
        "--hostfile", str(hosts), "-x", "GIVEN=two 'words'", body=body,
        environment={"FIVEFOLD_RSH": shell(tmp_path, 'echo "to $1: $2"\nexec sh -c "$2"')},
    )  # fmt: skip
    code, out, err = finish(process)
    assert code == 0, err
    assert (tmp_path / "told").read_text() == repr((str(tmp_path), "two 'words'", 64, ""))
    words = f"exec {sys.executable} -P -m fivefold.launch.remote"
    assert f"[h0] to far: {words}\n" in out
    assert f"[h0] 0.0.0.0:21999 {core}\n" in out


@pytest.mark.long
@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_a_helper_on_another_node(run: Run, tmp_path: Path) -> None:
    code, out, err = finish(run("-n", "1", waits=False))
    assert code == 0, err
    alone = digests(out)
    with Nodes(1) as nodes:
        enter = nodes.entry(0)
        rsh = shell(tmp_path, f'exec {shlex.join(enter)} sh -c "hostname; $2"')
        process = run(
            "-n", "1", "--helpers", f"{nodes.address(0)}:1",
            before=tuple(nodes.login()), environment={"FIVEFOLD_RSH": rsh},
        )  # fmt: skip
        code, out, err = finish(process)
        assert code == 0, err
        assert digests(out) == alone
        assert "[h0] node0\n" in out
        assert (tmp_path / "made-helper-0").exists(), err
        awaited(lambda: not nodes.processes(0), "the node to be empty", PROMISED_S)
