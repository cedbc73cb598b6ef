"""What becomes of a job on several nodes when nodes, cables, agents and launchers fail."""

from __future__ import annotations

import itertools
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from login_site import Site
from nodes import refusal
from site_runs import (
    PROMISED_S,
    TIMEOUT_S,
    TRAINS,
    WAITS,
    Run,
    emptied,
    finish,
    ready,
    running,
)
from waiting import awaited, launcher

pytestmark = pytest.mark.skipif(bool(refusal()), reason=refusal())

SILENT_S = 20.0


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(3, tmp_path) as made:
        yield made


@pytest.fixture
def run(site: Site, tmp_path: Path) -> Iterator[Run]:
    """Start `fivefold run` of a script; its first argument is `tmp_path`."""
    with running(site, tmp_path) as run:
        yield run


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


def agent(site: Site, node: int) -> psutil.Process:
    """The agent of a node."""
    running = map(psutil.Process, site.nodes.processes(node))
    (found,) = [one for one in running if "fivefold.launch.agent" in one.cmdline()]
    return found


def test_an_agent_that_is_killed_takes_its_ranks_along(
    site: Site, run: Run, tmp_path: Path
) -> None:
    process = run(WAITS, "-H", "node0:1,node1:1")
    ready(tmp_path, 2)
    agent(site, 1).kill()
    code, _, err = finish(process)
    assert code == 1 and "error: node node1 with rank 1 of 2 was lost: " in err
    emptied(site)


@pytest.mark.long
def test_an_agent_that_is_stopped_is_not_asked_for_ever_where_ranks_meet(
    site: Site, run: Run
) -> None:
    fails_twice = "import os, sys\nsys.exit(os.environ.get('FIVEFOLD_RESTART', '0') < '2')"
    options = ("-H", "node0:1,node1:1,node2:1", "--spares", "1", "--restarts", "3")
    process = run(fails_twice, *options)
    assert process.stderr is not None
    assert any("restart 2 of 3 in 1 s" in line for line in process.stderr)
    agent(site, 0).suspend()
    code, _, err = finish(process)
    assert code == 0, err
    assert "node node0 with rank 0 of 2 was lost: its agent named no port for rank 0 in 10 s" in err
    assert "note: node node2 takes the place of node0\n" in err
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


def test_a_node_that_is_back_stands_by(site: Site, run: Run, tmp_path: Path) -> None:
    options = ["-H", "node0:1,node1:1,node2:1", "--spares", "1", "--restarts", "2"]
    process = run(WAITS, *options)
    ready(tmp_path, 2)
    held = launcher(process)
    held.suspend()
    site.nodes.replace(1)
    site.renew()
    for path in tmp_path.glob("*.ready"):
        path.unlink()
    held.resume()
    assert process.stderr is not None
    told = list(itertools.takewhile(lambda line: "node1 is back" not in line, process.stderr))
    assert any("note: node node2 takes the place of node1" in line for line in told)
    ready(tmp_path, 2)
    site.nodes.kill(2)
    told = list(itertools.takewhile(lambda line: "takes the place" not in line, process.stderr))
    awaited(lambda: len(site.processes()) >= 4, "ranks on the node that is back", TIMEOUT_S)
    assert not any("no spare is left" in line for line in told)
    held.send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    emptied(site)


def test_a_spare_imports_ahead_what_its_ranks_are_forked_from(
    site: Site, run: Run, tmp_path: Path
) -> None:
    options = ["-H", "node0:1,node1:1,node2:1", "--spares", "1", "--restarts", "1", "--fork"]
    process = run(WAITS, *options)

    def template() -> list[int]:
        running = [psutil.Process(pid) for pid in site.nodes.processes(2)]
        return [one.pid for one in running if any("launch.template" in w for w in one.cmdline())]

    ready(tmp_path, 2)
    awaited(lambda: len(template()) == 1, "the spare to import", TIMEOUT_S)
    ahead = template()
    (tmp_path / "1.ready").unlink()
    site.nodes.kill(1)
    ready(tmp_path, 2)
    assert [psutil.Process(pid).ppid() for pid in template() if pid not in ahead] == ahead
    launcher(process).send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    emptied(site)


@pytest.mark.long
def test_a_node_whose_network_is_dead_is_replaced_soon(
    site: Site, run: Run, tmp_path: Path
) -> None:
    options = ["-H", "node0:1,node1:1,node2:1", "--spares", "1", "--restarts", "1"]
    process = run(WAITS, *options)
    ready(tmp_path, 2)
    (tmp_path / "1.ready").unlink()
    began = time.monotonic()
    site.nodes.cut(1)
    ready(tmp_path, 2)
    assert time.monotonic() - began < SILENT_S / 2
    launcher(process).send_signal(signal.SIGINT)
    assert finish(process)[0] == 130
    emptied(site, SILENT_S + 3 * PROMISED_S)


def test_without_a_spare_a_lost_node_is_the_end(site: Site, run: Run, tmp_path: Path) -> None:
    process = run(WAITS, "-H", "node0:1,node1:1", "--restarts", "3")
    ready(tmp_path, 2)
    site.nodes.kill(1)
    code, _, err = finish(process)
    assert code == 1
    assert "error: no spare is left for node node1: " in err and err.count("restart 1 of 3") == 1
    emptied(site)


def test_ranks_get_a_plan_that_lies_on_the_node_of_the_launcher_alone(
    site: Site, run: Run, tmp_path: Path
) -> None:
    own = site.nodes.local(0) / "plan.toml"
    write = f"printf '[layout]\\ndata = 2\\n' > {own}"
    subprocess.run([*site.entering(tmp_path), "sh", "-c", write], check=True)
    body = (
        "import os\nfrom fivefold import Plan\nprint(Plan.load(os.environ['FIVEFOLD_PLAN']).layout)"
    )
    code, out, err = finish(run(body, "-H", "node0:1,node1:1", "--plan", str(own)))
    assert (code, out.count("] data=2\n")) == (0, 2), err
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


TELLS = """
import os, signal, sys, time
from fivefold.launch.progress import own_progress
told, restart = own_progress(), int(os.environ.get("FIVEFOLD_RESTART", 0))
for step in range(1, 4):
    if (step, os.environ["RANK"]) == (3, "1") and restart < 2:
        TROUBLE
    told.stepped()
time.sleep(60 if restart < 2 else 0.5)
print("ended")
"""


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "rank 1 was killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 held the others up"),
    ],
)
def test_a_node_on_which_failures_begin_twice_is_replaced(
    trouble: str, why: str, site: Site, run: Run
) -> None:
    options = ("-H", "node0:1,node1:1,node2:1", "--spares", "1", "--restarts", "4", "--stall", "1s")
    code, out, err = finish(run(TELLS.replace("TROUBLE", trouble), *options))
    assert (code, out.count("ended")) == (0, 2), err
    assert f"note: node node1 stands by, since failures began there: {why}; {why}\n" in err
    assert "note: node node2 takes the place of node1\n" in err
    emptied(site)


def test_what_a_script_does_wrong_is_blamed_on_no_node(site: Site, run: Run) -> None:
    options = ("-H", "node0:1,node1:1,node2:1", "--spares", "1", "--restarts", "2")
    code, out, err = finish(run(TELLS.replace("TROUBLE", "raise ValueError"), *options))
    assert (code, out.count("ended")) == (0, 2), err
    assert "stands by, since" not in err and "takes the place" not in err


@pytest.mark.long
def test_a_lost_node_costs_a_recipe_a_restart(site: Site, tmp_path: Path) -> None:
    where = ["-H", "node0,node1,node2", "--spares", "1", "--restarts", "1"]
    saves = ["--checkpoint", "saved", "--set", "checkpoint.every_steps=2"]
    saves += ["--set", f"checkpoint.local={site.nodes.local(0)}"]
    command = [sys.executable, "-m", "fivefold", "train", "digits", "--epochs", "2"]
    run = subprocess.Popen(
        [*site.entering(tmp_path), *command, "--batch-size", "128", *where, *saves],
        env=site.environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with run:
        awaited((tmp_path / "runs/digits-001/metrics.jsonl").exists, "an epoch", TIMEOUT_S)
        site.nodes.kill(1)
        out, err = run.communicate(timeout=TIMEOUT_S)
    assert run.returncode == 0, out + err
    assert "node node1 with rank 1 of 2 was lost" in err
    assert "note: node node2 takes the place of node1" in err
    assert "going on after step " in out
    home = tmp_path / "runs" / "digits-002"
    assert (home / "weights.pt").exists()
    assert (home / "logs" / "restart-1" / "rank-1.log").exists()
