"""Helpers on the command line: by hand, beside a run, in what a dry run prints; and mistakes in it."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from commands import CLEAN, fivefold, mistake, python
from template import Order, Template

KEY = "5f" * 32
TIMEOUT_S = 60.0

STREAM = """
import hashlib, os, sys, time
from pathlib import Path
import torch
import fivefold as ff

class Marked:
    def __len__(self):
        return 32
    def __getitem__(self, index):
        Path(sys.argv[1], os.environ.get("FIVEFOLD_ROLE", "trainer")).touch()
        time.sleep(0.005)
        return torch.rand(4) + index

mesh = ff.start()
data = ff.loader(Marked(), mesh, batch_size=4, seed=1)
digest = hashlib.sha256()
for epoch in range(2):
    for x in data:
        digest.update(x.numpy().tobytes())
        while "FIVEFOLD_HELPERS" in os.environ and not Path(sys.argv[1], "helper").exists():
            time.sleep(0.02)
print(digest.hexdigest())
"""

SERVES = """
import sys
import torch
import fivefold as ff
mesh = ff.start(ff.Plan(layout=ff.Layout(data=3, height=2)))
print(mesh.role, mesh.rank, mesh.size, mesh.layout, mesh.device, flush=True)
net = torch.nn.Linear(2, 2)
model = ff.parallelize(net, mesh, loss=torch.nn.MSELoss())
data = ff.loader([torch.ones(2)] * 8, mesh, batch_size=4) if "loader" in sys.argv else None
if "checkpointer" in sys.argv:
    ff.Checkpointer(sys.argv[1] + "/saves", mesh, model=model)
if "step" in sys.argv:
    model.step(torch.ones(4, 2), torch.ones(4, 2))
print("went on")
"""

ENDS = """
import os, time
from pathlib import Path
if os.environ.get("FIVEFOLD_ROLE") == "helper":
    Path("began").write_text(str(os.getpid()))
    os.replace("began", "helper")
    raise SystemExit
while not Path("helper").exists() or Path("/proc", Path("helper").read_text()).exists():
    time.sleep(0.02)
print("trained")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stream.py").write_text(STREAM)
    (tmp_path / "serves.py").write_text(SERVES)
    (tmp_path / "hosts").write_text("localhost slots=1\ndpu01 slot=4 role=helper\n")
    (tmp_path / "others").write_text("# ours\nnode7 slots=4 port=2000\n")
    (tmp_path / "plan.toml").write_text('[offload]\nhelpers = "local:many"\n')
    return tmp_path


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "--helpers", "local:", "stream.py"], "--helpers local:: 'nothing' is no number"),
        (["run", "--helpers", "local:x", "stream.py"], "--helpers local:x: 'x' is no number"),
        (["run", "--helpers", "local:999", "stream.py"], "leave no core for the trainers"),
        (["run", "--helpers", "stream.py"], "no script given"),
        (
            ["run", "--helper", "local:1", "stream.py"],
            "unknown option --helper; did you mean --hel",
        ),
        (["run", "--hostfile", "hots", "stream.py"], "cannot read the host file hots: No such"),
        (["run", "--hostfile", "hosts", "stream.py"], "hosts, line 2: 'slot=4' is not NAME=VALUE"),
        (["run", "--hostfile", "others", "stream.py"], "others, line 2: port= is for helpers"),
        (["run", "--plan", "plan.toml", "stream.py"], "offload.helpers = local:many: 'many' is no"),
        (["train", "digits", "--helpers", "a b"], "--helpers a b: expected HOST:PROCESSES"),
        (["helper", "stream.py"], "--listen is missing: expected HOST:PORT"),
        (["helper", "--listen", "here", "stream.py"], "--listen here: expected HOST:PORT"),
        (["helper", "--listen", "here:99999", "stream.py"], "--listen here:99999: expected"),
        (["helper", "--listen", "unix:", "stream.py"], "--listen unix:: expected HOST:PORT"),
        (["helper", "--listen", "here:2000"], "no script given; for example: fivefold helper"),
        (["helper", "--listen", "here:2000", "streaam.py"], "did you mean 'stream.py'?"),
        (["helper", "--listen", "--plan", "x", "stream.py"], "--listen is missing"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_mistakes_get_one_line(folder: Path, words: list[str], says: str) -> None:
    assert says in mistake(folder, *words, FIVEFOLD_HELPER_KEY=KEY)


@pytest.mark.parametrize("key", ["", "5f", "xy" * 32, "5f" * 33])
def test_a_helper_by_hand_needs_a_key(folder: Path, key: str) -> None:
    words = ("helper", "--listen", "localhost:0", "stream.py")
    told = mistake(folder, *words[:2], "localhost:2000", words[3], FIVEFOLD_HELPER_KEY=key)
    assert "FIVEFOLD_HELPER_KEY" in told and "openssl rand -hex 32" in told


def test_another_shell_is_needed_where_there_is_none(folder: Path) -> None:
    told = mistake(folder, "run", "--helpers", "dpu01:2", "stream.py", FIVEFOLD_RSH="rsh-to -x")
    assert "through 'rsh-to -x', and there is no such program: set FIVEFOLD_RSH" in told


def test_helpers_by_hand_exclude_those_of_the_launcher(folder: Path) -> None:
    told = mistake(folder, "run", "--helpers", "local:1", "stream.py", FIVEFOLD_HELPERS="a:1")
    assert "FIVEFOLD_HELPERS is set" in told


def test_an_unknown_role_is_refused(folder: Path) -> None:
    done = fivefold("run", "stream.py", folder, cwd=folder, FIVEFOLD_ROLE="helpr")
    assert "FIVEFOLD_ROLE=helpr is not a choice; did you mean 'helper'?" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_helper_by_hand(folder: Path, kind: str) -> None:
    alone = fivefold("run", "stream.py", folder, cwd=folder)
    assert alone.returncode == 0, alone.stderr
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}" if kind == "tcp" else f"unix:{folder}/h.sock"
    helper = subprocess.Popen(
        [python(), "-m", "fivefold", "helper", "--listen", address, "stream.py", str(folder)],
        cwd=folder, env=CLEAN | {"FIVEFOLD_HELPER_KEY": KEY}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert helper.stdout is not None
        assert f"export FIVEFOLD_HELPERS={address}," in helper.stdout.readline()
        told = {"FIVEFOLD_HELPERS": address, "FIVEFOLD_HELPER_KEY": KEY}
        done = fivefold("run", "stream.py", folder, cwd=folder, **told)
        assert (done.returncode, done.stdout) == (0, alone.stdout), done.stderr
        out, err = helper.communicate(timeout=TIMEOUT_S)  # it ends with the job
        assert (helper.returncode, out, err) == (0, "", "")
    finally:
        helper.kill()
        helper.communicate()


@pytest.mark.long
def test_a_helper_of_another_job_is_told_by_its_key(folder: Path) -> None:
    address = f"unix:{folder}/h.sock"
    helper = subprocess.Popen(
        [python(), "-m", "fivefold", "helper", "--listen", address, "stream.py", str(folder)],
        cwd=folder, env=CLEAN | {"FIVEFOLD_HELPER_KEY": KEY}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not (folder / "h.sock").exists():
            assert helper.poll() is None
            time.sleep(0.02)
        (folder / "helper").touch()  # nobody waits for its work
        told = {"FIVEFOLD_HELPERS": address, "FIVEFOLD_HELPER_KEY": "00" * 32}
        done = fivefold("run", "stream.py", folder, cwd=folder, **told)
        assert done.returncode == 0
        assert "knows another key: it belongs to another job" in done.stderr
    finally:
        helper.send_signal(signal.SIGTERM)
        assert helper.wait(TIMEOUT_S) == 0


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template() as found:
        yield found


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it said."""

    returncode: int
    stdout: str
    stderr: str


def helper_of(template: Template, folder: Path, *words: str, **environment: str) -> Ended:
    """The script as a helper, in a process that need not import torch."""
    told = {"FIVEFOLD_ROLE": "helper", "FIVEFOLD_HELPER_KEY": KEY, "FIVEFOLD_TIMEOUT_S": "0.3"}
    told["FIVEFOLD_HELPER_LISTEN"] = f"unix:{folder}/h.sock"
    out, err = folder / "said.log", folder / "said.errors"
    argv = [str(folder / "serves.py"), str(folder), *words]
    order = Order(argv, CLEAN | told | environment, str(folder), str(out), errors=str(err))
    code = template.start(order).wait(TIMEOUT_S)
    return Ended(code, out.read_text(), err.read_text())


@pytest.mark.long
@pytest.mark.parametrize("where", ["checkpointer", "step"])
def test_it_serves_where_a_trainer_would_begin(
    template: Template, folder: Path, where: str
) -> None:
    done = helper_of(template, folder, "loader", where)
    assert done.stdout == "helper 0 1 data=1 cpu\n"
    assert (done.returncode, done.stderr) == (
        1,
        "error: no trainer came within 0.3 s (FIVEFOLD_TIMEOUT_S), so this helper ends\n",
    )
    assert not (folder / "saves").exists() and not (folder / "h.sock").exists()


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"FIVEFOLD_HELPER_LISTEN": ""}, "FIVEFOLD_HELPER_LISTEN is not set"),
        ({"FIVEFOLD_HELPER_LISTEN": "nowhere"}, "'nowhere' is no address of a helper"),
        (
            {"FIVEFOLD_HELPER_LISTEN": "unix:/no/folder/a.sock"},
            "cannot listen at unix:/no/folder/a",
        ),
        ({"FIVEFOLD_HELPER_KEY": ""}, "FIVEFOLD_HELPER_KEY is not set"),
        ({"FIVEFOLD_HELPER_KEY": "xyz"}, "the key of helpers has 64 hexadecimal digits"),
    ],
)
def test_what_it_cannot_serve_by_is_one_line(
    template: Template, folder: Path, environment: dict[str, str], says: str
) -> None:
    done = helper_of(template, folder, "loader", "step", **environment)
    assert done.returncode == 2
    assert says in done.stderr and done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_script_that_offers_nothing(template: Template, folder: Path) -> None:
    done = helper_of(template, folder, "step")
    assert done.returncode == 1
    assert "this helper has nothing to offer" in done.stderr


def test_a_dry_run_shows_helpers_and_no_key(folder: Path) -> None:
    (folder / "plan.toml").write_text(
        '[offload]\nhelpers = "local:1, dpu01:1"\nshare_cores = true\n'
    )
    done = fivefold(
        "run", "-n", 2, "--plan", "plan.toml", "--dry-run", "--explain", "stream.py",
        cwd=folder, FIVEFOLD_RSH="sh -c",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert sum("FIVEFOLD_ROLE=helper" in line for line in lines) == 2
    assert sum(line.startswith("sh -c dpu01 ") for line in lines) == 1
    assert lines[-1] == "wait $ranks" and "kill $helpers" in done.stdout
    assert "FIVEFOLD_HELPER_KEY=$(openssl rand -hex 32)" in done.stdout
    assert "helpers   1 on this node, 1 on dpu01\n" in done.stderr


def in_a_shell(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-e", "-c", script],
        cwd=folder, env=CLEAN, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


@pytest.mark.long
def test_a_dry_run_with_helpers_can_be_run(folder: Path) -> None:
    (folder / "plan.toml").write_text('[offload]\nhelpers = "local:1"\nshare_cores = true\n')
    words = ("run", "--plan", "plan.toml", "--dry-run", "stream.py", folder)
    script = fivefold(*words, cwd=folder).stdout
    done = in_a_shell(folder, script)
    assert done.returncode == 0, done.stderr
    assert (folder / "helper").exists() and len(done.stdout.strip()) == 64


def test_a_dry_run_whose_helper_has_ended_succeeds(folder: Path) -> None:
    (folder / "stream.py").write_text(ENDS)
    (folder / "plan.toml").write_text("[offload]\nshare_cores = true\n")
    words = ("run", "--plan", "plan.toml", "--helpers", "local:1", "--dry-run", "stream.py")
    script = fivefold(*words, cwd=folder).stdout
    done = in_a_shell(folder, script)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


@pytest.mark.long
def test_a_recipe_with_a_helper(folder: Path) -> None:
    words = ("train", "digits", "--epochs", "1", "--set", "offload.share_cores=true")
    done = fivefold(*words, "--helpers", "local:1", "--out", "runs", cwd=folder)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / "runs").iterdir()
    logs = sorted(path.name for path in (run / "logs").iterdir())
    assert logs == ["helper-0.log", "rank-0.log"]
    assert (run / "logs/helper-0.log").read_text() == ""
    assert "warning" not in done.stderr
