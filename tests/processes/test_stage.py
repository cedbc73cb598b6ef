"""`fivefold run --stage`: ranks import from copies that lie on their node and were sent once."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import cast

import psutil
import pytest

import full_disk
from staged import Shared
from waiting import awaited

TELLS = """
import json, os, sys
import beside, pkg, inner.deep
import fivefold
told = [sys.prefix, __file__, beside.__file__, inner.deep.__file__, pkg.__file__, fivefold.__file__]
told += [os.environ["PATH"].split(":")[0], os.environ["VIRTUAL_ENV"], sys.path[0]]
data = open(os.path.join(os.path.dirname(__file__), "data.txt")).read()
print(json.dumps([os.environ["TMPDIR"], told, data, os.getcwd(), sys.argv[1:]]))
"""
COPIER = "fivefold.launch.stage"
NOTE = r"note: (\d+|a) nodes? got copies in [\d.]+ s: "
STAYS = """
import os, sys, time
from pathlib import Path
import beside
Path(sys.argv[1] + os.environ["RANK"]).touch()
while not Path(sys.argv[2]).exists():
    time.sleep(0.01)
import later
print("imported", later.__file__)
"""


@pytest.fixture
def shared(tmp_path: Path) -> Shared:
    made = Shared(tmp_path)
    files = {
        "train.py": TELLS,
        "stays.py": STAYS,
        "beside.py": "",
        "later.py": "",
        "data.txt": "by a link",
        "inner/__init__.py": "",
        "inner/deep.py": "",
        "module/__init__.py": "",
        "module/__main__.py": TELLS.replace('"data.txt"', '"..", "data.txt"'),
    }
    for name, text in files.items():
        path = made.job / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return made


def told(out: str) -> list[list[object]]:
    return sorted(json.loads(line[4:]) for line in out.splitlines() if line[4:5] == "[")


@pytest.mark.parametrize(
    ("words", "options"),
    [
        pytest.param(["train.py"], ()),
        pytest.param(["-m", "module"], (), marks=pytest.mark.long),
        pytest.param(["train.py"], ("--fork",), marks=pytest.mark.long),
        pytest.param(["-m", "module"], ("--fork",), marks=pytest.mark.long),
    ],
)
def test_ranks_import_from_copies(
    shared: Shared, words: list[str], options: tuple[str, ...]
) -> None:
    done = shared.run("--stage", *options, "-H", "n0:2,n1:1", *words, "a b")
    assert done.returncode == 0, done.stderr
    assert re.match(NOTE + f"{shared.env} .*, {shared.lib} .*, {shared.job} ", done.stderr)
    assert "Error" not in done.stderr
    lines = told(done.stdout)
    assert len(lines) == 3
    for node, files, data, directory, arguments in lines:
        assert all(str(name).startswith(f"{node}/fivefold-") for name in cast("list[str]", files))
        assert (data, directory, arguments) == ("by a link", str(shared.job), ["a b"])
    assert {Path(str(line[0])).name for line in lines} == {"n0", "n1"}


@pytest.mark.long
def test_on_one_node_too_and_console_scripts(shared: Shared) -> None:
    (shared.site / "__editable__.far-1.pth").write_text("import os\n")
    done = shared.run("--stage", "-n", "2", "tool")
    assert done.returncode == 0, done.stderr
    assert re.match("note: read where they are, .*: __editable__.far-1\n", done.stderr)
    place = shared.node("launcher") / f"fivefold-{os.geteuid()}-stage"
    assert (
        len(re.findall(rf"^\[[01]\] tool {place}/\S+ {place}/\S+$", done.stdout, re.MULTILINE)) == 2
    )
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.long
def test_what_is_there_is_not_sent_again(shared: Shared) -> None:
    assert shared.run("--stage", "-H", "n0:1,n1:1", "train.py").returncode == 0
    before = [shared.copies(name) for name in ("n0", "n1")]
    done = shared.run("--stage", "-H", "n0:1,n1:1", "train.py")
    assert done.returncode == 0
    assert not re.search(NOTE, done.stderr)
    assert [shared.copies(name) for name in ("n0", "n1")] == before
    # A node more, and another script: each gets what it lacks, and the script of before is gone.
    (shared.job / "beside.py").write_text("changed = True\n")
    done = shared.run("--stage", "-H", "n0:1,n1:1,n2:1", "train.py")
    assert re.match(NOTE.replace(r"(\d+|a)", "3"), done.stderr), done.stderr
    for name, old in zip(("n0", "n1"), before, strict=True):
        assert len(shared.copies(name).items() & old.items()) == len(old) - 1
        assert len(shared.copies(name)) == len(old)
    assert len(shared.copies("n2")) == len(before[0])


@pytest.mark.long
def test_a_restart_sends_nothing(shared: Shared) -> None:
    (shared.job / "fragile.py").write_text(
        "import os, sys; sys.exit(0 if 'FIVEFOLD_RESTART' in os.environ else 3)"
    )
    done = shared.run("--stage", "--restarts", "1", "-H", "n0:1,n1:1", "fragile.py")
    assert done.returncode == 0, done.stderr
    assert "restart 1 of 1" in done.stderr
    assert len(re.findall(NOTE, done.stderr)) == 1


@pytest.mark.long
def test_two_jobs_side_by_side_and_a_copy_in_use_stays(shared: Shared, tmp_path: Path) -> None:
    go = tmp_path / "go"
    where = ["--stage", "-H", "n0:1,n1:1"]
    jobs = [
        shared.start("--log-dir", tmp_path / name, *where, "stays.py", tmp_path / f"{name}-", go)
        for name in ("a", "b")
    ]
    names = [f"{name}-{rank}" for name in ("a", "b") for rank in range(2)]
    awaited(lambda: all((tmp_path / name).exists() for name in names), "all to start", 60)
    (shared.job / "beside.py").write_text("changed = True\n")
    assert shared.run("--log-dir", tmp_path / "c", *where, "train.py").returncode == 0
    shutil.move(shared.job / "later.py", tmp_path)  # the copies have it
    go.touch()
    for job in jobs:
        out, err = job.communicate(timeout=60)
        assert job.returncode == 0, err
        assert out.count("imported") == 2
    assert not [name for name in shared.copies("n0") if name.startswith("tmp-")]


@pytest.mark.long
def test_copies_that_were_cut_off_or_outlived_a_boot_are_not_used(shared: Shared) -> None:
    assert shared.run("--stage", "-H", "n0:1", "train.py").returncode == 0
    place = next(shared.node("n0").glob("fivefold-*-stage"))
    for copy in [*place.iterdir()]:
        copy.rename(copy.with_name(f"{copy.name[:-8]}00000000"))
    (place / "tmp-cut-off").mkdir()
    done = shared.run("--stage", "-H", "n0:1", "train.py")
    assert done.returncode == 0, done.stderr
    assert re.match(NOTE, done.stderr)
    assert not [name for name in shared.copies("n0") if name.endswith("-00000000") or "tmp" in name]


@pytest.mark.long
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_a_launcher_that_ends_while_copies_are_sent(shared: Shared, signum: signal.Signals) -> None:
    large = shared.site / "large.bin"
    with large.open("wb") as file:
        file.truncate(1 << 30)
    job = shared.start("--stage", "-H", "n0:1,n1:1", "train.py")
    awaited(lambda: _begun(shared, "n1"), "copying to begin", 60)
    job.send_signal(signum)
    job.communicate(timeout=60)
    assert job.returncode in (-signum, 128 + signum)
    for name in ("launcher", "n0", "n1"):
        awaited(lambda name=name: not _processes(shared, name, COPIER), "who copies to end", 20)
    assert not [name for name in shared.copies("n1") if not name.startswith("tmp-")]
    large.unlink()
    done = shared.run("--stage", "-H", "n0:1,n1:1", "train.py")
    assert done.returncode == 0, done.stderr
    assert not [name for name in shared.copies("n1") if name.startswith("tmp-")]


@pytest.mark.long
def test_a_node_that_is_lost_while_copies_are_sent(shared: Shared) -> None:
    with (shared.site / "large.bin").open("wb") as file:
        file.truncate(1 << 29)
    job = shared.start(
        "--stage", "--restarts", "1", "--spares", "1", "-H", "n0:1,n1:1,n2:1", "train.py"
    )
    awaited(lambda: _begun(shared, "n2"), "copying to begin", 60)
    victims = _processes(shared, "n1", "fivefold.launch.agent", COPIER)
    assert len(victims) == 2
    for process in victims:
        process.kill()
    out, err = job.communicate(timeout=100)
    assert job.returncode == 0, err
    assert "note: node n2 takes the place of n1" in err
    assert {Path(str(line[0])).name for line in told(out)} == {"n0", "n2"}


FULL = (
    r"\S+ has no room for a copy of \S+/env in \S+/full/fivefold-\d+-stage: it takes \d+ MB, and \d+ MB are "
    "free; name another folder in FIVEFOLD_STAGE"
)
SHORT = (
    r"\S+ cannot write copies to \S+/short: File too large; free space there, or name another folder in "
    "FIVEFOLD_STAGE"
)


@pytest.mark.skipif(bool(full_disk.refusal()), reason=full_disk.refusal())
@pytest.mark.parametrize(
    ("node", "says"), [("full", FULL), pytest.param("short", SHORT, marks=pytest.mark.long)]
)
def test_a_node_without_space_is_told_in_a_line(shared: Shared, node: str, says: str) -> None:
    (shared.site / "large.bin").write_bytes(bytes(1 << 20))
    done = shared.run("--stage", "-H", f"n0:1,{node}:1,n2:1", "train.py")
    assert done.returncode == 2
    assert re.fullmatch(f"error: {says}\n", done.stderr)
    assert not list(Path(shared.node(node)).glob("fivefold-*-stage/*"))


@pytest.mark.long
def test_what_changes_while_it_is_sent_is_told(shared: Shared) -> None:
    large = shared.site / "large.bin"
    with large.open("wb") as file:
        file.truncate(1 << 29)
    job = shared.start("--stage", "-H", "n0:1", "train.py")
    awaited(lambda: _begun(shared, "n0"), "copying to begin", 60)
    os.truncate(large, 1 << 20)
    _, err = job.communicate(timeout=60)
    assert job.returncode == 2
    assert err == f"error: {large} changed while it was copied; start again when it is finished\n"
    assert not [name for name in shared.copies("n0") if name.startswith("tmp-")]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["-n", "2", "--engine", "torchrun"],
            "--stage and --engine torchrun: on one node Fivefold",
        ),
        (
            ["-n", "2", "--explain"],
            "--explain tells of ranks that import from where it is; leave --stage",
        ),
        (["--hostfile", "hosts"], "--stage sends this environment to all nodes, and the host file"),
    ],
)
def test_what_does_not_go_together_is_refused(shared: Shared, words: list[str], says: str) -> None:
    (shared.job / "hosts").write_text("n0 slots=1\nn1 slots=1 python=/usr/bin/python3\n")
    done = shared.run("--stage", *words, "train.py")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {says}")


def _begun(shared: Shared, name: str) -> list[Path]:
    return [*shared.node(name).glob("fivefold-*/tmp-*/lib/python*/site-packages/large.bin")]


def _processes(shared: Shared, name: str, *modules: str) -> list[psutil.Process]:
    """Those of a node."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        with contextlib.suppress(psutil.Error):
            if set(modules) & set(process.info["cmdline"] or ()):
                found += [process] * (process.environ().get("TMPDIR") == str(shared.node(name)))
    return found
