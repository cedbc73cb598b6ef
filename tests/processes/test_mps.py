"""The life of an MPS daemon of a job's own, on a stand-in for NVIDIA's program (mps_stand_in.py).

The real one was not there: that kernels overlap by it is for tests/gpu.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from commands import python
from fivefold.cluster import mps, nvml
from fivefold.cluster.mps import Mps, foreign_servers, runs_by_default
from fivefold.errors import UsageError
from machines import write
from mps_stand_in import install
from waiting import alive, awaited

UUIDS = ["GPU-1", "GPU-0"]
LAUNCHER = """
import time
from fivefold.cluster import mps
mps._PATIENCE_S = 2.0
with mps.Mps(["GPU-0"]):
    print("up", flush=True)
    time.sleep(300)
"""
Install = Callable[..., None]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put the stand-in first on PATH, and folders of temporary files below `tmp_path`."""

    def put(trouble: str = "") -> None:
        monkeypatch.setenv("PATH", str(install(tmp_path, trouble)), prepend=os.pathsep)
        monkeypatch.setattr(mps, "_LONGEST_PATH", 1000)
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    return put


def processes(folder: Path) -> set[int]:
    """Daemons and servers of this folder."""
    found: set[int] = set()
    for one in psutil.process_iter(["cmdline"]):
        words = " ".join((one.info["cmdline"] or [])[:3])
        if "nvidia-cuda-mps" in words and str(folder) in words and alive(one.pid):
            found.add(one.pid)
    return found


def folders(place: Path) -> list[Path]:
    return list(place.glob("fivefold-mps-*"))


def test_a_daemon_lives_as_long_as_it_is_held(installed: Install, tmp_path: Path) -> None:
    installed()
    with Mps(UUIDS, 40) as daemon:
        told = daemon.variables
        assert told["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-0"
        assert told["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "40"
        (folder,) = folders(tmp_path)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        pipes, logs = (Path(told[f"CUDA_MPS_{name}_DIRECTORY"]) for name in ("PIPE", "LOG"))
        assert {pipes.parent, logs.parent} == {folder}
        assert [stat.S_IMODE(path.stat().st_mode) for path in (pipes, logs)] == [0o700, 0o700]
        assert (logs / "control.log").read_text() == "CUDA_VISIBLE_DEVICES=GPU-1,GPU-0"
        assert len(processes(tmp_path)) == 2
    daemon.close()  # does nothing
    assert not processes(tmp_path) and not folders(tmp_path)


def test_without_a_limit_none_is_told(installed: Install) -> None:
    installed()
    with Mps(UUIDS) as daemon:
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in daemon.variables


def test_long_paths_are_none_for_sockets(
    installed: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed()
    monkeypatch.setattr(mps, "_LONGEST_PATH", 3)
    with Mps(UUIDS) as daemon:
        assert daemon.variables["CUDA_MPS_PIPE_DIRECTORY"].startswith("/tmp/fivefold-mps-")


def test_what_does_not_quit_is_killed(
    installed: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("stays")
    monkeypatch.setattr(mps, "_PATIENCE_S", 1.0)
    Mps(UUIDS).close()
    assert not processes(tmp_path) and not folders(tmp_path)


@pytest.mark.parametrize("trouble", ["", "stays"])
def test_nothing_is_left_when_the_launcher_is_killed(
    trouble: str, installed: Install, tmp_path: Path
) -> None:
    installed(trouble)
    launcher = subprocess.Popen(
        [python(), "-c", LAUNCHER],
        stdout=subprocess.PIPE,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert launcher.stdout is not None
    with launcher.stdout:
        assert launcher.stdout.readline() == b"up\n"
    own = processes(tmp_path)
    assert len(own) == 2
    launcher.kill()
    launcher.wait()
    awaited(lambda: not any(map(alive, own)), "the end of the daemon")
    awaited(lambda: not watchers(tmp_path), "the end of the watcher")
    assert not folders(tmp_path)


def watchers(folder: Path) -> list[psutil.Process]:
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if "fivefold.cluster.mps" in (words := one.info["cmdline"] or [])
        and any(word.startswith(str(folder)) for word in words)
        and alive(one.pid)
    ]


def test_signals_of_a_scheduler_do_not_end_it(installed: Install, tmp_path: Path) -> None:
    installed()
    with Mps(UUIDS):
        (watcher,) = watchers(tmp_path)
        for one in (watcher, *watcher.children()):
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                one.send_signal(signum)
        time.sleep(0.1)
        assert len(processes(tmp_path)) == 2


def test_a_watcher_that_was_killed_leaves_nothing_to_the_next(
    installed: Install, tmp_path: Path
) -> None:
    installed()
    with Mps(UUIDS):
        watchers(tmp_path)[0].kill()
    awaited(lambda: not processes(tmp_path), "the end of the daemon")
    assert not folders(tmp_path)


@pytest.mark.parametrize("percent", [-1, 101])
def test_percentages_that_there_are_not(percent: int) -> None:
    with pytest.raises(UsageError, match=rf"^{percent} % of the threads of a GPU: 1 to 100 are"):
        Mps(UUIDS, percent)


def test_mps_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        UsageError, match=r"^MPS is not installed: .*on PATH;[^\n]*leave out [^\n]*$"
    ):
        Mps(UUIDS)


def test_a_daemon_that_ends_at_once(installed: Install, tmp_path: Path) -> None:
    installed("fails")
    with pytest.raises(
        UsageError,
        match=r"^MPS does not start: \S+-control ended with code 1: An instance of .* is already running$",
    ):
        Mps(UUIDS)
    assert not folders(tmp_path)


def test_a_daemon_that_does_not_answer(
    installed: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("silent")
    monkeypatch.setattr(mps, "_PATIENCE_S", 0.5)
    with pytest.raises(UsageError, match=r"^MPS does not start: \S+ does not answer within 0.5 s$"):
        Mps(UUIDS)
    assert not processes(tmp_path) and not folders(tmp_path)


def strangers(root: Path) -> Path:
    """A machine with a server of another user, and one of this."""
    files = {
        f"proc/{pid}/{name}": text
        for pid, user in ((71, os.getuid() + 1), (72, os.getuid()))
        for name, text in (
            ("comm", "nvidia-cuda-mps\n"),
            ("cmdline", "/usr/bin/nvidia-cuda-mps-server\0-force-tegra\0"),
            ("status", f"Name:\tnvidia-cuda-mps\nUid:\t{user}\t{user}\t{user}\t{user}\n"),
        )
    }
    return write(
        root,
        {
            **files,
            "proc/73/comm": "grep\n",
            "proc/73/cmdline": "grep\0-r\0nvidia-cuda-mps-server\0",
        },
    )


def test_servers_of_others_are_seen(tmp_path: Path) -> None:
    assert foreign_servers(strangers(tmp_path)) == {71: os.getuid() + 1}
    assert not foreign_servers(tmp_path / "nothing")


def test_a_daemon_of_the_site_is_seen(tmp_path: Path) -> None:
    assert not runs_by_default(tmp_path)
    write(tmp_path, {"tmp/nvidia-mps/nvidia-cuda-mps-control.pid": "71\n"})
    assert not runs_by_default(tmp_path)  # it has ended
    words = {"comm": "nvidia-cuda-mps\n", "cmdline": "nvidia-cuda-mps-control\0-d\0"}
    write(tmp_path, {f"proc/71/{name}": text for name, text in words.items()})
    assert runs_by_default(tmp_path)


@pytest.mark.parametrize(
    ("running", "refused"),
    [
        ({}, True),
        ({"GPU-0": {71}, "GPU-1": set[int]()}, True),
        ({"GPU-0": set[int](), "GPU-1": set[int](), "GPU-2": {71}}, False),
    ],
    ids=["who knows", "ours", "another"],
)
def test_a_gpu_that_serves_another_user(
    running: dict[str, set[int]],
    refused: bool,
    installed: Install,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    installed()
    monkeypatch.setattr(mps, "foreign_servers", lambda: {71: 1234})
    monkeypatch.setattr(nvml, "computing", lambda: running)
    if not refused:
        Mps(UUIDS).close()
        return
    with pytest.raises(
        UsageError, match=r"^an MPS server of user 1234 \(process 71\) is on[^\n]*$"
    ):
        Mps(UUIDS)
    assert not folders(tmp_path)
