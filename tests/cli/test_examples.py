"""The examples run as they say, with equal results alone and in ranks; their batch files end and go on."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from allocations import TASKS, queued, stand_in
from commands import CLEAN, programs

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
BATCH = sorted(
    str(p.relative_to(EXAMPLES))
    for p in EXAMPLES.glob("*/*")
    if p.suffix in {".sbatch", ".pbs", ".sh"}
)
LIMITED = "checkpoints_with_time_limit.py"
NUMBER = re.compile(r"\d+\.\d+")
TIMEOUT_S = 100


def commands(script: str) -> list[str]:
    """The lines of a script's docstring that start it."""
    told = ast.get_docstring(ast.parse((EXAMPLES / script).read_text())) or ""
    return [line.split("  #")[0].strip() for line in told.splitlines() if line.startswith("    ")]


LINES = {
    script: [line for line in commands(script) if not line.startswith("python")]
    for script in SCRIPTS
    if script != LIMITED
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the scripts, and one for temporary files."""
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, tmp_path)
    (tmp_path / "tmp").mkdir()
    return tmp_path


@contextlib.contextmanager
def begun(line: str, folder: Path, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A command line in bash, in a session of its own, which ends with the block."""
    paths = [str(folder / "bin"), str(programs()), str(Path(sys.executable).parent), CLEAN["PATH"]]
    environment = CLEAN | {
        "OMP_NUM_THREADS": "1",
        "NO_COLOR": "1",
        "FIVEFOLD_LEASE_S": "3",
        "TMPDIR": str(folder / "tmp"),
        "PATH": os.pathsep.join(paths),
    }
    with subprocess.Popen(
        ["bash", "-c", f"exec {line}" if line.startswith("bash") else line],
        cwd=folder, env=environment | more, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def run(line: str, folder: Path, code: int = 0, **more: str) -> list[str]:
    """What a command prints, without the ranks before the lines."""
    with begun(line, folder, **more) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, f"{line} ended with {process.returncode}:\n{out}{err}"
    return [re.sub(r"^\[\d+\] ", "", text) for text in out.splitlines()]


def figures(lines: list[str], word: str = "epoch") -> list[list[float]]:
    """The numbers of the lines that begin with `word`."""
    return [[*map(float, NUMBER.findall(line))] for line in lines if line.startswith(word)]


def alone(script: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """As `python SCRIPT`, in this process."""
    assert f"python {script}" in commands(script)
    with contextlib.chdir(folder):
        runpy.run_path(script, run_name="__main__")
    return capsys.readouterr().out.splitlines()


@pytest.mark.long
@pytest.mark.parametrize("script", LINES)
def test_an_example_computes_the_same_alone_and_in_ranks(
    folder: Path, capsys: pytest.CaptureFixture[str], script: str
) -> None:
    one = alone(script, folder, capsys)
    helping = script == "helpers.py"
    line = LINES[script][0]
    if helping:
        line = line.replace("fivefold run", "fivefold run --trace --log-dir logs")
    compare(script, one, run(line, folder))
    if helping:
        told = "\n".join(run("fivefold report logs --html none", folder))
        assert re.search(r"^helper 0 ", told, re.MULTILINE), told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "line"), [(script, line) for script, lines in LINES.items() for line in lines[1:]]
)
def test_an_example_computes_the_same_in_its_other_ways(
    folder: Path, capsys: pytest.CaptureFixture[str], script: str, line: str
) -> None:
    compare(script, alone(script, folder, capsys), run(line, folder))


def compare(script: str, one: list[str], ranks: list[str]) -> None:
    """Equal figures, which get better, and what else a script says of its ranks."""
    assert len(figures(one)) >= 2
    for first, second in zip(figures(one), figures(ranks), strict=True):
        assert second == pytest.approx(first, rel=1e-3, abs=1e-4)
    assert figures(one)[-1][0] < figures(one)[0][0], "it does not learn"
    if script == "volume.py":
        assert one[-1] == "rank 0 read 24 of 24 slices"
        assert {f"rank {rank} read 12 of 24 slices" for rank in range(2)} <= set(ranks)
    if script == "gpt_pipeline.py":
        whole, *_ = held(one)
        tied, width = 32 * 64, 2
        assert sum(held(ranks)) == whole + (width - 1) * tied and len(held(ranks)) == width


def held(lines: list[str]) -> list[int]:
    """How many numbers each rank trains; all of them the tied ones."""
    return [int(n) for line in lines for n in re.findall(r"trains (\d+) numbers, the tied", line)]


def test_an_example_leaves_weights_that_torch_alone_can_use(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    alone("data_parallel.py", folder, capsys)
    net = runpy.run_path(str(folder / "data_parallel.py"))["Net"]()
    net.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    assert int(net[1].num_batches_tracked) == 15  # 3 epochs of 5 batches


@pytest.mark.long
def test_a_run_that_reaches_its_limit_goes_on_where_it_stood(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first part as a job of PBS."""
    line, *_ = commands(LIMITED)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(sys, "argv", [LIMITED])
    with contextlib.chdir(folder):
        runpy.run_path(LIMITED, run_name="__main__")
    through = figures(capsys.readouterr().out.splitlines(), "step")
    shutil.rmtree(folder / "runs")
    assert "begins with step 1" in ends_in_time("pbs/one_node.pbs", folder)
    second = run(line, folder)
    assert 1 < int(second[0].removeprefix("begins with step ")) < 384
    assert figures(second, "step")[-1] == pytest.approx(through[-1], rel=1e-3)
    assert not run(line, folder), "all is trained"


@pytest.mark.slow
def test_a_loop_starts_a_limited_run_until_it_is_done(folder: Path) -> None:
    *_, loop = commands(LIMITED)
    lines = run(loop.replace("3300", "1"), folder)
    assert sum(line.startswith("begins") for line in lines) > 1
    assert any(line.startswith("step 384 ") for line in lines)


def submitted(name: str, folder: Path) -> Path:
    """A batch file where it is submitted, with its limit of 55 minutes made a second."""
    path = folder / Path(name).name
    path.write_text((EXAMPLES / name).read_text().replace(f"{LIMITED} 3300", f"{LIMITED} 1"))
    stand_in(folder / "bin", "scontrol", "qsub")
    return path


SLURM = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1", "RANKS": "2"}


@pytest.mark.long
@pytest.mark.parametrize("name", ["slurm/one_node.sbatch", "slurm/several_nodes.sbatch"])
def test_a_job_of_slurm_is_queued_again_when_its_time_is_up(folder: Path, name: str) -> None:
    """Real but for Slurm: the signal comes from here, to whom Slurm would send it."""
    path = submitted(name, folder)
    stand_in(folder / "bin", "srun")
    with begun(f"bash {path.name}", folder, **SLURM) as job:
        assert job.stdout and job.stderr
        assert any("step 64 " in line for line in job.stdout), job.stderr.read()
        for process in notified(job.pid, name):
            os.kill(process, signal.SIGUSR1)
        out, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 75, out + err
    assert queued(folder / "bin") == "scontrol requeue 7\n"
    assert list((folder / "runs" / "waves").glob("step-*")), "it has not saved"


def notified(shell: int, name: str) -> list[int]:
    """Whom `--signal` of a batch file means: its shell with `B:`, else the steps."""
    asked = re.search(r"^#SBATCH --signal=(B:)?USR1@", (EXAMPLES / name).read_text(), re.MULTILINE)
    assert asked
    children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
    return [shell] if asked[1] else [int(pid) for pid in children]


def ends_in_time(name: str, folder: Path) -> list[str]:
    """A job of PBS or flux, whose limit is near; what its script prints. Real but for PBS, PALS and flux."""
    path = submitted(name, folder)
    stand_in(folder / "bin", "mpiexec", "flux")
    nodes = folder / "nodes"
    nodes.write_text(f"{os.uname().nodename}\n" * TASKS)
    job = {"PBS_JOBID": "7.server", "PBS_O_WORKDIR": str(folder), "PBS_NODEFILE": str(nodes)}
    lines = run(f"bash {path.name}", folder, 75, **job, RANKS="2")
    assert queued(folder / "bin") == (f"qsub {path.name}\n" if path.suffix == ".pbs" else "")
    assert list((folder / "runs" / "waves").glob("step-*")), "it has not saved"
    return lines


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["pbs/several_nodes.pbs", pytest.param("flux/several_nodes.sh", marks=pytest.mark.slow)],
)
def test_a_job_on_several_nodes_ends_before_its_limit(folder: Path, name: str) -> None:
    assert "begins with step 1" in ends_in_time(name, folder)


@pytest.mark.parametrize("name", BATCH)
def test_a_batch_file_is_bash_and_starts_what_there_is(name: str) -> None:
    subprocess.run(["bash", "-n", EXAMPLES / name], check=True, timeout=20)
    text = (EXAMPLES / name).read_text()
    scripts = re.findall(r"^(?!#).*?(\w+\.py)", text, re.MULTILINE)
    assert scripts and all((EXAMPLES / script).exists() for script in scripts)
    assert Path(name).name in text, "it does not say how it is submitted"


def test_launchers_use_what_was_allocated() -> None:
    """Ranks and cores of the line are those of the request."""
    pbs = (EXAMPLES / "pbs/several_nodes.pbs").read_text()
    nodes, cores, ranks = map(int, re.findall(r"select=(\d+):ncpus=(\d+):mpiprocs=(\d+)", pbs)[0])
    asked = re.findall(r"^mpiexec -n (\d+) --ppn (\d+) --depth (\d+)", pbs, re.MULTILINE)
    assert [*map(int, asked[0])] == [nodes * ranks, ranks, cores // ranks]
    flux = (EXAMPLES / "flux/several_nodes.sh").read_text()
    allocated, used = re.findall(r"flux (?:batch|run) -N (\d+)", flux)
    assert allocated == used
    threads = re.findall(r"OMP_NUM_THREADS=(\d+)", flux)
    assert threads == re.findall(r"flux run .* -c (\d+) ", flux)


def test_every_example_is_listed() -> None:
    """In the table of the README; that its links lead somewhere is tested with those of all documents."""
    linked = set(re.findall(r"\]\(([\w/.]+)\)", (EXAMPLES / "README.md").read_text()))
    files = {str(p.relative_to(EXAMPLES)) for p in EXAMPLES.rglob("*") if p.is_file()}
    ours = {f for f in files if "__pycache__" not in f and "fivefold-logs" not in f}
    assert ours - {"README.md"} <= linked


@pytest.mark.parametrize("script", SCRIPTS)
def test_examples_are_short(script: str) -> None:
    assert (EXAMPLES / script).read_text().count("\n") <= 90
