"""Traces and `--explain` on nodes that share no folder, neither with each other nor with the launcher."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from commands import python, starting
from engine_places import SELDOM, Place, place_of
from fivefold.trace.file import TraceError
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import ProcessState
from waiting import awaited, launcher

TIMEOUT_S = 120.0
pytestmark = pytest.mark.timeout(3 * TIMEOUT_S)
STEPS = 40
RANK = f"""
import os, signal, sys, time
from pathlib import Path
from fivefold.trace.process import start
rank, again = int(os.environ["RANK"]), "FIVEFOLD_RESTART" in os.environ
folder = os.environ.get("FIVEFOLD_TRACE_SPOOL") or os.environ["FIVEFOLD_TRACE"]
trace = start(Path(folder), {{"rank": rank, "size": 4, "host": os.uname().nodename, "folder": folder}})
for step in range({STEPS}):
    trace.push(2)
    trace.pop()
    trace.step_ended(samples=rank)
while "waits" in sys.argv and not again and not Path("on").exists():
    time.sleep(0.05)
if "dies" in sys.argv and rank == 3 and not again:
    os.kill(os.getpid(), signal.SIGKILL)
"""
TRAINS = """
import torch, fivefold as ff
with ff.start() as mesh:
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    model = ff.parallelize(net, mesh, loss=torch.nn.MSELoss())
    samples = torch.utils.data.TensorDataset(torch.randn(80, 8), torch.randn(80, 1))
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    with ff.loader(samples, mesh, batch_size=16, seed=0) as data:
        for x, y in data:
            model.step(x, y)
            optim.step()
"""


@pytest.fixture(params=SELDOM, scope="module")
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    with place_of(request.param, tmp_path_factory.mktemp("site")) as made:
        if made.own is None:
            pytest.skip("all files are shared there")
        yield made


@pytest.fixture
def home(place: Place) -> Iterator[Path]:
    """Where commands are called: every node has a folder of this name, with scripts alone."""
    assert place.own is not None
    for folder in place.seen(place.own):
        (folder / "rank.py").write_text(RANK)
        (folder / "train.py").write_text(TRAINS)
    yield place.own
    awaited(lambda: not place.processes(), "the nodes to be empty", TIMEOUT_S)
    for found in place.seen(place.own):
        for path in found.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin(place: Place, home: Path) -> Iterator[Begin]:
    """Start `fivefold run` on two nodes with two slots each."""
    with starting() as start:

        def call(*words: str, folder: Path = home) -> subprocess.Popen[str]:
            command = [sys.executable, "-m", "fivefold", "run", "--log-dir", str(folder / "logs")]
            return start([*place.before(folder), *command, *place.where, *words], place.environ)

        yield call


def said(process: subprocess.Popen[str], code: int) -> str:
    _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return err


def reported(folder: Path) -> dict[str, Any]:
    command = [python(), "-m", "fivefold", "report", str(folder), "--json", "--html", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def traces(folder: Path) -> list[RankTrace]:
    return [RankTrace.load(path) for path in sorted(folder.glob("*.trace"))]


def stepped(folder: Path) -> list[int]:
    """The steps of each rank, as its trace tells."""
    return [int(one.windows["steps"].sum()) for one in traces(folder)]


def has_come(folder: Path) -> bool:
    """Whether all that four ranks trace is here: a file comes before what it says of its rank."""
    with suppress(TraceError):
        return stepped(folder) == [STEPS] * 4
    return False


def go_on(place: Place, folder: Path, first: Callable[[], object] = bool) -> None:
    """Let ranks that wait go on, once all that they have traced is here."""
    awaited(lambda: has_come(folder), "the traces to come", TIMEOUT_S)
    first()
    for disk in place.disks:
        (disk / "on").touch()


def test_traces_come_while_ranks_run_and_the_spools_go(begin: Begin, home: Path) -> None:
    job, folder = begin("--trace", "rank.py", "waits"), home / "logs" / "trace"
    awaited(lambda: has_come(folder), "the traces to come", TIMEOUT_S)
    assert {one.state for one in traces(folder)} == {ProcessState.RUNNING}
    spools = {Path(one.meta["folder"]) for one in traces(folder)}
    assert len(spools) == 2 and all(len(list(spool.iterdir())) == 2 for spool in spools)
    job.send_signal(signal.SIGUSR2)  # ends the ranks, which do not handle it
    assert "warning" not in said(job, 128 + signal.SIGUSR2)
    assert reported(home / "logs")["run"]["steps"] == STEPS
    assert {path.suffix for path in folder.iterdir()} == {".trace"}
    assert not any(spool.exists() for spool in spools)


def test_a_report_tells_what_it_tells_of_a_shared_folder(
    begin: Begin, home: Path, tmp_path: Path
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    for folder in (home, tmp_path):
        assert "warning" not in said(begin("--trace", "rank.py", folder=folder), 0)
        assert {path.suffix for path in (folder / "logs" / "trace").iterdir()} == {".trace"}
    one, other = (traces(folder / "logs" / "trace") for folder in (home, tmp_path))
    assert {rank.meta["folder"] for rank in other} == {str(tmp_path / "logs" / "trace")}
    assert len(one) == len(other) == 4
    for a, b in zip(one, other, strict=True):
        assert not a.problems
        assert [a.state, a.windows["steps"].tolist(), a.windows["samples"].tolist()] == [
            ProcessState.ENDED,
            b.windows["steps"].tolist(),
            b.windows["samples"].tolist(),
        ]
        assert a.sums["count"].tolist() == b.sums["count"].tolist() == [STEPS]
        assert a.events["seq"].tolist() == b.events["seq"].tolist()


@pytest.mark.long
def test_a_model_that_is_trained(begin: Begin, home: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    found: list[dict[str, Any]] = []
    for folder in (home, tmp_path):
        said(begin("--trace", "--ppn", "1", "train.py", folder=folder), 0)
        found.append(reported(folder / "logs"))
    counts = [
        {
            (op["operation"], op["tag"], op["size_from_bytes"]): op["count"]
            for op in one["operations"]
        }
        for one in found
    ]
    assert counts[0] == counts[1]
    for one in found:
        assert one["run"]["steps"] == 5 and one["ranks"]["host"] == ["node0", "node1"]


def test_a_rank_that_is_killed_and_starts_again(begin: Begin, home: Path, place: Place) -> None:
    logs = home / "logs"
    job = begin("--trace", "--restarts", "1", "rank.py", "waits", "dies")
    go_on(place, logs / "trace")
    err = said(job, 0)
    assert "restart 1 of 1 now" in err and "traces" not in err
    assert stepped(logs / "trace") == stepped(logs / "restart-1" / "trace") == [STEPS] * 4
    first, again = traces(logs / "trace"), traces(logs / "restart-1" / "trace")
    assert first[3].state == ProcessState.RUNNING  # so it said when it was killed
    assert {one.state for one in again} == {ProcessState.ENDED}
    assert not any(Path(one.meta["folder"]).exists() for one in (*first, *again))


@pytest.mark.long
def test_an_agent_that_is_killed(begin: Begin, home: Path, place: Place) -> None:
    job, folder = begin("--trace", "rank.py", "waits"), home / "logs" / "trace"
    awaited(lambda: has_come(folder), "the traces to come", TIMEOUT_S)
    spools = [traces(folder)[rank].meta["folder"] for rank in (0, 3)]
    os.kill(place.agents()[1], signal.SIGKILL)
    err = said(job, 1)
    [(name, node)] = re.findall(
        r"^error: node (node(\d)) with ranks . to . of 4 was lost", err, re.MULTILINE
    )
    spool = spools[int(node)]
    assert re.findall(r"^warning: not all of the traces .*$", err, re.MULTILINE) == [
        f"warning: not all of the traces has come; the rest is in {name}:{spool}"
    ]
    assert stepped(folder) == [STEPS] * 4
    shutil.rmtree(spool)


@pytest.mark.long
def test_a_full_disk_of_the_launcher_is_told_once(begin: Begin, home: Path, place: Place) -> None:
    job, folder = begin("--trace", "rank.py", "waits"), home / "logs" / "trace"
    no_room = partial(launcher(job).rlimit, psutil.RLIMIT_FSIZE, (4096, 4096))
    go_on(place, folder, no_room)
    err = said(job, 0)
    assert stepped(folder) == [STEPS] * 4
    assert err.count("traces of other nodes stay there: cannot write") == 1
    [left] = re.findall(r"the rest is in (.*)", err)
    spools = [Path(one.partition(":")[2]) for one in left.split(", ")]
    assert [stepped(spool) for spool in spools] == [[STEPS] * 2] * 2
    for spool in spools:
        shutil.rmtree(spool)


def test_where_the_ranks_of_all_nodes_run(begin: Begin, home: Path, place: Place) -> None:
    if "--fork" in place.options:
        pytest.skip("--explain and --fork do not go together")
    err = said(begin("--explain", "--", "true"), 0)
    assert "[0] placement, as the ranks found it:" in err
    report = json.loads((home / "logs" / "placement.json").read_text())
    assert report["missing"] == [] and report["observed"]
    assert [(one["rank"], one["host"]) for one in report["ranks"]] == [
        (0, "node0"), (1, "node0"), (2, "node1"), (3, "node1"),
    ]  # fmt: skip
    assert not (home / "logs" / "placement").exists()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_a_launcher_that_is_stopped(
    begin: Begin, home: Path, place: Place, signum: signal.Signals
) -> None:
    job, folder = begin("--trace", "rank.py", "waits"), home / "logs" / "trace"
    awaited(lambda: has_come(folder), "the traces to come", TIMEOUT_S)
    spools = {Path(one.meta["folder"]) for one in traces(folder)}
    launcher(job).send_signal(signum)
    _, err = job.communicate(timeout=TIMEOUT_S)
    awaited(lambda: not place.processes(), "the nodes to be empty", TIMEOUT_S)
    assert stepped(folder) == [STEPS] * 4
    assert "traces" not in err and "warning" not in err
    told = "".join(path.read_text() for path in (home / "logs").glob("*.log"))
    assert all((f"traces are in {spool}" in told) == (signum == signal.SIGKILL) for spool in spools)
    assert all(spool.exists() == (signum == signal.SIGKILL) for spool in spools)
    for spool in spools:
        shutil.rmtree(spool, ignore_errors=True)


@pytest.mark.long
@pytest.mark.parametrize("first", ["node0", "localhost"])
def test_a_recipe_that_is_trained(home: Path, place: Place, first: str) -> None:
    words = ("train", "digits", "--epochs", "1", "--batch-size", "256", "--ppn", "1")
    where = ["--engine", "ssh", "-H", f"{first},node1"]
    done = subprocess.run(
        [*place.before(home), sys.executable, "-m", "fivefold", *words, *where],
        env=place.environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    # Its directory is where rank 0 is; else the launcher has the folder of the logs alone.
    [logs] = (home / ("runs" if first == "localhost" else "fivefold-logs")).iterdir()
    found = reported(logs)
    assert found["ranks"]["host"][1] == "node1" and found["run"]["state"] == "ended"
    assert len(list((logs / "trace").iterdir())) == found["run"]["size"] == 2
    assert not (logs / "logs" / "trace").exists()
