"""An MPS daemon of a job's own: kernels of processes that share a GPU then run at the same time.

    launcher ── pipe ──> watcher ── starts, ends ──> nvidia-cuda-mps-control -f ──> nvidia-cuda-mps-server
          └──> ranks ─────── CUDA_MPS_PIPE_DIRECTORY ───────^

    python -P -m fivefold.cluster.mps FOLDER PROGRAM SECONDS     the watcher, until its standard input ends

The watcher sees the end of the launcher at the pipe, however that ended. Nothing here needs root, or touches
a daemon of others: folders, daemon and server are the job's own (MPS documentation, "Using MPS on a shared
system", and nvidia-cuda-mps-control(1)).
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fivefold.closing import Closing
from fivefold.cluster import nvml, reading
from fivefold.errors import UsageError

__all__ = ["CONTROL", "PERCENTAGE", "PIPES", "Mps", "foreign_servers", "main", "runs_by_default"]

CONTROL = "nvidia-cuda-mps-control"
PIPES = "CUDA_MPS_PIPE_DIRECTORY"
PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_LOGS = "CUDA_MPS_LOG_DIRECTORY"
_SERVER = "nvidia-cuda-mps-server"
_COMM = _SERVER[:15]
"""what the kernel keeps of a name"""
_PATIENCE_S = 10.0
"""that a daemon may take to answer, and to end with its server"""
_LONGEST_PATH = 60
"""of a folder for folders of sockets, whose own paths end at 107"""


class Mps(Closing):
    """A daemon that serves GPUs to processes of this user, until it is closed.

    Args:
        uuids: of the GPUs, in the order in which its clients count them.
        percent: how many percent of a GPU's threads a client may use, from 1 to 100; 0: not limited.

    Raises:
        UsageError: there is no such percentage, MPS is not installed, another user's server holds a GPU, or
            the daemon does not start.
    """

    variables: dict[str, str]
    """of its clients. Daemon and clients number devices by UUID, so that these are not numbered twice"""

    def __init__(self, uuids: Sequence[str], percent: int = 0) -> None:
        if not 0 <= percent <= 100:
            raise UsageError(
                f"{percent} % of the threads of a GPU: 1 to 100 are possible, or 0 for no limit"
            )
        program = shutil.which(CONTROL)
        if program is None:
            raise UsageError(
                f"MPS is not installed: there is no {CONTROL} on PATH; it comes with NVIDIA's driver, so ask "
                'who runs the node, or leave out instances.mps = "on"'
            )
        _refuse_strangers(uuids)
        here = tempfile.gettempdir()
        place = here if len(here) <= _LONGEST_PATH else "/tmp"  # noqa: S108 - the folder is private
        self._folder = Path(tempfile.mkdtemp(prefix="fivefold-mps-", dir=place))
        told = {"CUDA_VISIBLE_DEVICES": ",".join(uuids)}
        for name, folder in ((PIPES, _pipes(self._folder)), (_LOGS, self._folder / "log")):
            folder.mkdir(mode=0o700)
            told[name] = str(folder)
        self.variables = told | ({PERCENTAGE: str(percent)} if percent else {})
        self._watcher = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "fivefold.cluster.mps",
                self._folder,
                program,
                f"{_PATIENCE_S}",
            ],
            env=os.environ | told,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if problem := self._answer():
            self.close()
            raise UsageError(f"MPS does not start: {problem}")

    def _answer(self) -> str:
        """What the watcher says of the start: a problem, or nothing."""
        out = self._watcher.stdout
        assert out is not None
        if not select.select([out], [], [], 3 * _PATIENCE_S)[0]:
            return "the process that starts it does not answer"
        said = out.readline().decode(errors="replace")
        return said.strip() if said else "the process that starts it ended"

    def close(self) -> None:
        """End daemon and server, whose clients have ended, and remove the folders."""
        watcher = self._watcher
        assert watcher.stdin is not None and watcher.stdout is not None
        watcher.stdin.close()
        try:
            watcher.wait(3 * _PATIENCE_S)
        except subprocess.TimeoutExpired:
            watcher.kill()
            watcher.wait()
        watcher.stdout.close()
        if self._folder.exists():  # somebody has killed the watcher
            _clear(self._folder)


def runs_by_default(root: Path = Path("/")) -> bool:
    """Whether a daemon runs where CUDA looks unless it is told another place, as a site may start it."""
    pid = reading.number(root / "tmp/nvidia-mps" / f"{CONTROL}.pid")
    return pid is not None and _program(root / f"proc/{pid}") == CONTROL


def foreign_servers(root: Path = Path("/")) -> dict[int, int]:
    """MPS servers of other users, as far as the kernel shows them: user by process."""
    found: dict[int, int] = {}
    for path in reading.entries(root / "proc"):
        if _program(path) == _SERVER:
            status = reading.text(path / "status") or ""
            users = [line.split() for line in status.splitlines() if line.startswith("Uid:")]
            if users and int(users[0][1]) != os.getuid():
                found[int(path.name)] = int(users[0][1])
    return found


def _refuse_strangers(uuids: Sequence[str]) -> None:
    servers = foreign_servers()
    if not servers:
        return
    # Without NVML, nobody tells whose GPU it is.
    running = nvml.computing()
    told = all(uuid in running for uuid in uuids)
    here = {pid for uuid in uuids for pid in running.get(uuid, ())}
    for pid, user in servers.items():
        if pid in here or not told:
            raise UsageError(
                f"an MPS server of user {user} (process {pid}) is on this GPU: it serves one user at a time, "
                'and others wait until it ends; take another GPU, or leave MPS out with instances.mps = "off"'
            )


def _pipes(folder: Path) -> Path:
    return folder / "pipe"


def _program(process: Path) -> str:
    """Which of the two programs a process of /proc runs; empty if neither."""
    if reading.text(process / "comm") != _COMM:
        return ""
    words = (reading.text(process / "cmdline") or "").split("\0")
    names = [word.rpartition("/")[2] for word in words]
    return next((name for name in names if name in (CONTROL, _SERVER)), "")


def _clear(folder: Path) -> None:
    """Kill what is left of daemon and server, wherever it has gone, and remove the folders."""
    own = f"{PIPES}={_pipes(folder)}".encode()
    for path in reading.entries(Path("/proc")):
        if path.name.isdecimal() and _program(path):
            with contextlib.suppress(OSError):
                if own in (path / "environ").read_bytes().split(b"\0"):
                    os.kill(int(path.name), signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


# ---- The watcher


def main() -> int:
    """Start the daemon, tell how that went, and end it when nobody is left to be told."""
    folder, program, patience_s = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    # Ctrl-C and a scheduler's signals are for ranks, which may still save; the daemon inherits this.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    with (folder / "said").open("wb") as said:
        daemon = subprocess.Popen(
            [program, "-f"],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    problem = _why_not_up(daemon, folder, program, patience_s)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{problem}\n")
        sys.stdout.flush()
    sys.stdin.buffer.read()
    _ask(program, "quit", patience_s)
    with contextlib.suppress(subprocess.TimeoutExpired):
        daemon.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(daemon.pid, signal.SIGKILL)
    _clear(folder)
    return 0


def _why_not_up(
    daemon: subprocess.Popen[bytes], folder: Path, program: str, patience_s: float
) -> str:
    """Wait until it answers; else its last words."""
    end = time.monotonic() + patience_s
    while daemon.poll() is None:
        if _ask(program, "get_server_list", patience_s):
            return ""
        if time.monotonic() > end:
            return f"{program} does not answer within {patience_s:g} s" + _last_words(folder)
        time.sleep(0.05)
    return f"{program} ended with code {daemon.returncode}" + _last_words(folder)


def _last_words(folder: Path) -> str:
    for path in (folder / "said", folder / "log" / "control.log"):
        if lines := (reading.text(path) or "").splitlines():
            return f": {lines[-1].strip()}"
    return ""


def _ask(program: str, command: str, patience_s: float) -> bool:
    """Whether the daemon has taken a command: `program` without options passes it on."""
    try:
        done = subprocess.run(
            [program],
            input=f"{command}\n".encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=patience_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
