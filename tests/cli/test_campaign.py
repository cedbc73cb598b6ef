"""The campaign of benchmarks/share, tried on cores; and the kit that takes it to where no network is."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from commands import CLEAN

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "benchmarks" / "share"
TINY = ("--out=out", "--device=cpu", "--tiny")
# Its commands are scripts that take names; some of these are trouble.
STAND_IN = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import campaign
from cases import Case, Launch
campaign.START_S, campaign.LEAST_S = 8.0, 1.0
names = sys.argv.pop().split(",")
campaign.launches = lambda device, tiny: [
    Launch([sys.executable, "script.py"], [Case(name, 0.01) for name in names], named=True),
    Launch([sys.executable, "-c", "print('alone')"], [Case("alone", 0.01)]),
]
sys.exit(campaign.main())
"""
SCRIPT = """
import os, subprocess, sys, time
from pathlib import Path
here = Path(os.environ["CAMPAIGN_OUT"])
for name in sys.argv[1:]:
    with (here / "starts").open("a") as starts:
        starts.write(name + " ")
    if name == "crashes":
        sys.exit("out of luck")
    if name == "hangs":
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        (here / "child").write_text(str(child.pid))
        time.sleep(300)
    (here / f"{name}.json").write_text(
        '{"case": "%s", "ended": "%s", "seconds": 0, "said": ""}'
        % (name, "refused" if name == "refused" else "passed")
    )
"""


def command(folder: Path, names: str, *words: str) -> list[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    (folder / "stand_in.py").write_text(STAND_IN.replace("script.py", str(script)))
    return [sys.executable, "stand_in.py", "--out=out", *words, names]


def tried(folder: Path, *command: str, limit_s: float = 110) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=limit_s, cwd=folder, env=CLEAN
    )


def gone(pid: int) -> bool:
    """Whether a process has ended, or does so in some seconds."""
    ends = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < ends:
        time.sleep(0.05)
    return not Path(f"/proc/{pid}").exists()


def test_a_case_that_ends_its_command_leaves_the_others(tmp_path: Path) -> None:
    done = tried(tmp_path, *command(tmp_path, "one,crashes,refused,hangs,two"))
    assert done.returncode == 1, done.stderr
    told = "proved: 3 of 6\nrefused: refused\nfailed: crashes, hangs\nnot run: nothing\n"
    assert done.stdout.endswith(told), done.stdout
    assert "out of luck" in json.loads((tmp_path / "out" / "crashes.json").read_text())["said"]
    assert "it took too long" in json.loads((tmp_path / "out" / "hangs.json").read_text())["said"]
    assert (tmp_path / "out" / "starts").read_text() == "one crashes refused hangs two "
    assert gone(int((tmp_path / "out" / "child").read_text()))
    # Another call takes none of them, or what failed.
    again = tried(tmp_path, *command(tmp_path, "one,crashes,refused,hangs,two", "--list"))
    assert again.stdout.endswith(told)
    tried(tmp_path, *command(tmp_path, "one,crashes", "--again=failed"))
    assert (tmp_path / "out" / "starts").read_text() == "one crashes refused hangs two crashes "


def test_what_does_not_fit_is_not_begun(tmp_path: Path) -> None:
    done = tried(tmp_path, *command(tmp_path, "one,two", "--minutes=0"))
    assert done.returncode == 0
    assert done.stdout.endswith("not run: one, two, alone (about 0.0 minutes)\n"), done.stdout


def test_nothing_runs_after_it_was_stopped(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path, "hangs"), cwd=tmp_path, env=CLEAN) as running:
        ends = time.monotonic() + 60
        while not (tmp_path / "out" / "child").exists() and time.monotonic() < ends:
            time.sleep(0.05)
        time.sleep(0.2)
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 128 + signal.SIGTERM
    assert gone(int((tmp_path / "out" / "child").read_text()))


@pytest.mark.long
@pytest.mark.timeout(200)
def test_cases_are_tried_on_cores(tmp_path: Path) -> None:
    some = ["--only", "probe", "exact-edsr-data1"]
    done = tried(tmp_path, sys.executable, str(HERE / "campaign.py"), *TINY, *some, limit_s=190)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact: Edsr under data=1, by turns of height=3,width=2 equals" in done.stdout
    assert done.stdout.endswith("refused: nothing\nfailed: nothing\nnot run: nothing\n")


@pytest.mark.long
@pytest.mark.timeout(1600)
def test_every_kind_of_case_is_tried_on_cores(tmp_path: Path) -> None:
    script = str(HERE / "campaign.py")
    done = tried(tmp_path, sys.executable, script, *TINY, "--minutes=25", limit_s=1590)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("failed: nothing\nnot run: nothing\n"), done.stdout
    kinds = {path.stem.partition("-")[0] for path in (tmp_path / "out").glob("*.json")}
    assert kinds == {"probe", "exact", "tests", "collectives", "steps", "kills", "memory"}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the kit is packed of a checkout")
def test_the_kit_serves_a_machine_without_a_network(tmp_path: Path) -> None:
    packed = tmp_path / "gpu-kit.tar.gz"
    kit = tried(tmp_path, sys.executable, str(HERE / "kit.py"), str(packed), limit_s=300)
    assert kit.returncode == 0, kit.stderr
    assert packed.stat().st_size < 60_000_000
    with tarfile.open(packed) as held:
        held.extractall(tmp_path, filter="data")
    there = tmp_path / "gpu-kit"
    names = {path.name for path in there.iterdir()}
    assert {"src", "tests", "benchmarks", "wheels"} <= names
    assert not names & {".venv", ".git", "build"} and not (there / "docs" / "_build").exists()

    def set_up() -> str:
        alone = {**CLEAN, "PIP_NO_INDEX": "1", "CFLAGS": "-O0"}
        done = subprocess.run(
            [sys.executable, str(there / "set-up")],
            check=False, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=alone,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert set_up().startswith("ready after ")
    core = next((there / "env").rglob("libfivefold_core.so"))
    core.write_bytes(b"of another system")
    assert "it is compiled\nready after " in set_up()
    python, script = (
        there / "env" / "bin" / "python",
        there / "benchmarks" / "share" / "campaign.py",
    )
    where = "import fivefold; print(fivefold.__file__)"
    assert str(there) in tried(tmp_path, str(python), "-c", where).stdout
    done = tried(
        tmp_path, str(python), str(script), *TINY, "--only", "exact-resnet20-data2", limit_s=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "exact: CifarResNet under data=2 equals one process" in done.stdout
