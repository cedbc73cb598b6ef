"""What every engine for several nodes promises, with real processes on nodes: ssh, both MPIs, Slurm."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from commands import starting
from engine_places import ENGINES, Place, place_of
from machines import pretended
from waiting import awaited, launcher

TIMEOUT_S = 60.0
PROMISED_S = 5.0
PREAMBLE = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
rank, here = int(os.environ["RANK"]), Path(sys.argv[1])

def ready():
    (here / f"{rank}.tmp").write_text(str(os.getpid()))
    (here / f"{rank}.tmp").rename(here / f"{rank}.ready")
    while len(list(here.glob("*.ready"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)
"""


@pytest.fixture(params=ENGINES, scope="module")
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    with place_of(request.param, tmp_path_factory.mktemp("site")) as made:
        yield made


@dataclass
class Started:
    process: subprocess.Popen[str]

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, out, err


Start = Callable[..., Started]


@pytest.fixture
def start(place: Place, tmp_path: Path) -> Iterator[Start]:
    """Start `fivefold run` of a script on both nodes; the script's argument is `tmp_path`."""
    with starting() as begin:

        def launch(body: str, *options: str, **variables: str) -> Started:
            script = tmp_path / "script.py"
            script.write_text(PREAMBLE + body)
            command = [sys.executable, "-m", "fivefold", "run", "--log-dir", str(tmp_path / "logs")]
            words = [*place.before(tmp_path), *command, *place.where, *options]
            environ = place.environ | variables
            return Started(begin([*words, str(script), str(tmp_path)], environ, tmp_path))

        yield launch
    awaited(lambda: not place.processes(), "the nodes to be empty", TIMEOUT_S)


def ready(folder: Path, ranks: int = 4) -> None:
    awaited(lambda: len(list(folder.glob("*.ready"))) == ranks, "all ranks to start", TIMEOUT_S)


def test_ranks_their_output_and_their_logs(start: Start, place: Place, tmp_path: Path) -> None:
    lines = 300
    script = f"""
from fivefold.launch import locate
told = [*list(vars(locate()).values())[:4], os.environ["GIVEN"], os.getcwd(), sys.argv[2:]]
keys = [name for name in os.environ if name.startswith("FIVEFOLD_AGENT")]
print(json.dumps([told, keys, os.environ["OMP_NUM_THREADS"]]))
for n in range({lines}):
    print(f"{{n}} " + "o" * 200)
    print(f"{{n}} " + "e" * 200, file=sys.stderr)
print("no newline", end="")
"""
    code, out, err = start(script, "-x", "GIVEN=two words").finish()
    assert code == 0, err
    for rank in range(4):
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        for stream in "oe":
            whole = [f"{n} {stream * 200}" for n in range(lines)]
            assert [line for line in log.splitlines() if line.endswith(stream * 9)] == whole
            shown = (out if stream == "o" else err).splitlines()
            assert [line for line in shown if re.match(rf"\[{rank}\] \d+ {stream}", line)] == [
                f"[{rank}] {line}" for line in whole
            ]
        assert f"[{rank}] no newline\n" in out
        told = json.loads(log[: log.index("\n")])
        expected = [rank, 4, rank % 2, 2, "two words", str(tmp_path), []]
        assert told == [expected, [], "1"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a single core")
def test_ranks_have_cores_of_their_own_near_their_memory(start: Start, tmp_path: Path) -> None:
    granted = sorted(os.sched_getaffinity(0))
    half = len(granted) // 2
    near = pretended(tmp_path, [granted[:half], granted[half:]])
    code, out, err = start("print(sorted(os.sched_getaffinity(0)))", **near).finish()
    assert code == 0, err
    shares = [granted[:half], granted[half:]]
    assert sorted(out.splitlines()) == [f"[{rank}] {shares[rank % 2]}" for rank in range(4)]


@pytest.mark.parametrize(
    ("ending", "code", "told"),
    [
        ("sys.exit(3)", 3, "rank 2 of 4 exited with code 3; the other ranks were stopped"),
        ("os.kill(os.getpid(), 9)", 137, "rank 2 of 4 was killed by SIGKILL"),
        ("sys.exit('error: no such file')", 1, "rank 2 of 4 exited with code 1"),
        ("print('error: wrong', file=sys.stderr); sys.exit(2)", 2, "error: wrong\n"),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_told(
    start: Start, place: Place, ending: str, code: int, told: str
) -> None:
    script = f"""
ready()
if rank == 2:
    print("last words", file=sys.stderr, flush=True)
    {ending}
time.sleep(300)
"""
    ended, _, err = start(script).finish()
    assert ended == code, err
    assert told in err
    assert "Traceback" not in err
    awaited(lambda: not place.processes(), "the nodes to be empty", PROMISED_S)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_is_stopped_leaves_nothing(
    start: Start, place: Place, tmp_path: Path, signum: signal.Signals
) -> None:
    begun = start("""
child = subprocess.Popen(["sleep", "300"])
signal.signal(signal.SIGTERM, lambda *_: (print("asked to end", flush=True), sys.exit(0)))
ready()
time.sleep(300)
""")
    ready(tmp_path)
    launcher(begun.process).send_signal(signum)
    code, _, err = begun.finish()
    if signum == signal.SIGINT:
        assert code == 130 and "interrupted; all 4 ranks were stopped" in err
    elif signum == signal.SIGTERM:
        assert code == 143 and "stopped by SIGTERM; all 4 ranks were stopped" in err
    awaited(lambda: not place.processes(), "the nodes to be empty", 2 * PROMISED_S)


def test_a_signal_of_the_user_reaches_every_rank_once(start: Start, tmp_path: Path) -> None:
    begun = start("""
signal.signal(signal.SIGUSR1, lambda *_: print("got it", flush=True))
ready()
end = time.monotonic() + 3
while time.monotonic() < end: time.sleep(0.1)
""")
    ready(tmp_path)
    launcher(begun.process).send_signal(signal.SIGUSR1)
    code, out, err = begun.finish()
    assert code == 0, err
    assert sorted(re.findall(r"\[(\d)\] got it", out)) == ["0", "1", "2", "3"]


def test_ranks_of_all_nodes_save_when_somebody_asks(start: Start, tmp_path: Path) -> None:
    begun = start("""
asked = []
def save(*_):
    asked.append(True)
    time.sleep(0.5)
    sys.exit(75 if len(asked) == 1 else "asked twice")
ready()
while rank == 3 and not (here / "on").exists(): time.sleep(0.1)
signal.signal(signal.SIGUSR1, save)
time.sleep(300)
""")
    ready(tmp_path)
    (tmp_path / "logs" / "halt").touch()
    assert begun.process.stderr is not None
    assert "asked by" in begun.process.stderr.readline()
    launcher(begun.process).send_signal(signal.SIGUSR1)  # as a scheduler would
    (tmp_path / "on").touch()
    code, _, err = begun.finish()
    assert code == 75, err
    assert "the same command goes on" in err


def test_ranks_that_start_again_need_no_engine(start: Start, tmp_path: Path) -> None:
    code, out, err = start(
        """
again = int(os.environ.get("FIVEFOLD_RESTART", "0"))
print(f"start {again} at {os.environ['MASTER_PORT']}", flush=True)
if rank == again == 1 or (rank == 3 and again == 0):
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1.5)
print("well", again)
""",
        "--restarts",
        "2",
    ).finish()
    assert code == 0, err
    assert err.count("rank 3 of 4 was killed by SIGKILL") == 1 and "restart 1 of 2 now" in err
    assert err.count("rank 1 of 4 was killed by SIGKILL") == 1 and "restart 2 of 2" in err
    assert sorted(re.findall(r"\[(\d)\] well 2", out)) == ["0", "1", "2", "3"]
    logs = tmp_path / "logs"
    for folder in (logs, logs / "restart-1", logs / "restart-2"):
        assert sorted(p.name for p in folder.glob("rank-*.log")) == [
            f"rank-{r}.log" for r in range(4)
        ]
    assert "well 2" in (logs / "restart-2" / "rank-0.log").read_text()


def test_a_sum_over_nodes(start: Start) -> None:
    code, out, err = start("""
import torch, fivefold as ff
import torch.distributed as dist
with ff.start() as mesh:
    total = torch.tensor([float(mesh.rank)])
    dist.all_reduce(total)
    print("sum", total.item())
""").finish()
    assert code == 0, err
    assert sorted(re.findall(r"\[(\d)\] sum 6.0", out)) == ["0", "1", "2", "3"]
