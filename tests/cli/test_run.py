"""`fivefold` and `fivefold run` as they are typed: what they print, and their exit codes."""

from __future__ import annotations

import os
import pty
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from commands import CLEAN, fivefold, mistake
from fivefold.cluster.cores import quota
from full_disk import on_full_disk, refusal

HELLO = """
import os, sys
print("hello from", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "hello.py").write_text(HELLO)
    return tmp_path


def test_help_lists_the_commands_without_loading_them(folder: Path) -> None:
    code = (
        "import sys, fivefold.cli as c; c.main(['--help']); print([*sys.modules], file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    for name in ("run", "train", "verify", "example:"):
        assert name in done.stdout
    for module in ("torch", "tyro", "numpy", "fivefold.launch"):
        assert f"'{module}'" not in done.stderr


def test_the_launcher_loads_no_torch(folder: Path) -> None:
    code = (
        "import sys, fivefold.cli as c; code = c.main(['run', '-n', '1', 'hello.py']); "
        "sys.exit(code or 'torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def test_no_command_shows_the_help_and_fails(folder: Path) -> None:
    done = fivefold(cwd=folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: fivefold COMMAND" in done.stderr


def test_version(folder: Path) -> None:
    done = fivefold("--version", cwd=folder)
    assert re.fullmatch(r"fivefold \d+\.\d+\.\S+\n", done.stdout)


def test_help_of_run_shows_an_example(folder: Path) -> None:
    done = fivefold("run", "--help", cwd=folder)
    assert done.returncode == 0
    assert "fivefold run -n 2 train.py --epochs 3" in done.stdout
    assert "(default: None)" not in done.stdout


def test_options_end_at_the_script(folder: Path) -> None:
    done = fivefold("run", "-np", 2, "hello.py", "-n", "5", "--help", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] hello from {rank} of 2 -n 5 --help" for rank in (0, 1)
    ]
    (logs,) = (folder / "fivefold-logs").iterdir()
    assert sorted(path.name for path in logs.iterdir()) == ["rank-0.log", "rank-1.log"]
    assert (logs / "rank-1.log").read_text() == "hello from 1 of 2 -n 5 --help\n"


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [["hello.py"], ["--", "hello.py"], ["-m", "hello"], ["--", "-m", "hello"], ["./hello.sh"]],
    ids=" ".join,
)
def test_scripts_modules_and_executables(folder: Path, command: list[str]) -> None:
    (folder / "hello.sh").write_text('#!/bin/sh\necho "hello from $RANK of $WORLD_SIZE"\n')
    (folder / "hello.sh").chmod(0o755)
    done = fivefold("run", *command, cwd=folder)
    assert (done.returncode, done.stdout) == (0, "[0] hello from 0 of 1\n"), done.stderr


def test_the_python_of_a_virtual_environment_stays_that(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    done = fivefold("run", "-n", 1, python, "-c", "import sys; print(sys.prefix)", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"[0] {tmp_path / 'venv'}\n"), done.stderr


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trin", "digits"], "unknown command 'trin'; did you mean 'train'? Valid: run, train"),
        (["run"], "no script given; for example: fivefold run -n 2 train.py"),
        (["run", "-n", 0, "hello.py"], "-n 0: at least 1 process is needed"),
        (["run", "-n", -3, "hello.py"], "-n -3: at least 1 process is needed"),
        (["run", "helo.py"], "there is no script helo.py; did you mean 'hello.py'?"),
        (["run", "no/hello.py"], "there is no script no/hello.py; there is no folder no either"),
        (["run", "."], ". is a folder, not a script"),
        (["run", "notes.txt"], "notes.txt is neither a .py file nor executable; chmod +x"),
        (["run", "-m"], "-m needs a module"),
        (["run", "-m", "no_such_module.main"], "there is no module no_such_module;"),
        (["run", "--engine", "locl", "hello.py"], "unknown engine 'locl'; did you mean 'local'?"),
        (["run", "--port", 99999, "hello.py"], "port 99999 does not exist"),
        (["run", "-x", "A-B=1", "hello.py"], "-x A-B=1: expected NAME=VALUE"),
        (["run", "-x", "NOT_SET", "hello.py"], "NOT_SET is not set; give it a value with -x"),
        (["run", "--plan", "plan.toml", "hello.py"], "cannot read the plan plan.toml"),
        (["run", "--log-dir", "notes.txt", "hello.py"], "cannot write logs to notes.txt"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_mistakes_get_one_line(folder: Path, words: list[object], message: str) -> None:
    (folder / "notes.txt").write_text("no script")
    assert message in mistake(folder, *words)


def test_an_unknown_option_is_refused(folder: Path) -> None:
    done = fivefold("run", "--engin", "local", "hello.py", cwd=folder)
    assert done.returncode == 2
    assert "--engine" in done.stderr and "Traceback" not in done.stderr


def test_a_port_in_use(folder: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        told = mistake(folder, "run", "-n", 2, "--port", port, "hello.py")
    assert f"port {port} is in use; choose another one, or leave --port out" in told


def test_a_plan_is_checked_before_anything_starts(folder: Path) -> None:
    (folder / "plan.toml").write_text("[layout]\ndata = 2\n")
    (folder / "wrong.toml").write_text("[layout]\ndta = 2\n")
    told = mistake(folder, "run", "--plan", "wrong.toml", "hello.py")
    assert "'dta'" in told and "did you mean 'data'" in told
    told = mistake(folder, "run", "-n", 3, "--plan", "plan.toml", "hello.py")
    assert "the layout data=2 in plan.toml needs 2 processes, not 3" in told


def test_a_plan_decides_how_many_processes_and_reaches_them(folder: Path) -> None:
    (folder / "plan.toml").write_text("[layout]\ndata = 2\n")
    (folder / "show.py").write_text("import os; print(os.environ['FIVEFOLD_PLAN'])")
    done = fivefold("run", "--plan", "plan.toml", "show.py", cwd=folder)
    path = folder.resolve() / "plan.toml"
    assert sorted(done.stdout.splitlines()) == [f"[0] {path}", f"[1] {path}"]


def test_layout_and_settings_reach_the_ranks_over_those_of_the_plan(folder: Path) -> None:
    (folder / "plan.toml").write_text("[layout]\ndata = 3\n[tiles]\nstrict = true\n")
    (folder / "show.py").write_text(
        "import os\nfrom fivefold.plan import Plan\nplan = Plan.load(os.environ['FIVEFOLD_PLAN'])\n"
        "print(plan.layout, plan.tiles.fuse, plan.tiles.strict, plan.origin('tiles.fuse'))"
    )
    words = ("--layout", "height=2", "--set", "tiles.fuse=never", "--log-dir", "logs", "show.py")
    said = "height=2 never True user: --set"
    done = fivefold("run", "--plan", "plan.toml", *words, cwd=folder)
    assert sorted(done.stdout.splitlines()) == [f"[0] {said}", f"[1] {said}"], done.stderr
    assert (folder / "logs" / "plan.toml").exists()
    script = fivefold(
        "run", "--plan", "plan.toml", "--dry-run", *words[:-2], "dry", "show.py", cwd=folder
    )
    assert not (folder / "dry").exists()
    ran = subprocess.run(
        ["sh"], input=script.stdout, cwd=folder, capture_output=True, text=True, check=True
    )
    assert ran.stdout.count("never") == 2  # both write at once, and may tear lines
    done = fivefold("run", *words[:4], "show.py", cwd=folder, FIVEFOLD_PLAN="plan.toml")
    assert sorted(done.stdout.splitlines()) == [f"[0] {said}", f"[1] {said}"]


def test_what_was_tuned_on_other_nodes_is_told(folder: Path) -> None:
    (folder / "plan.toml").write_text(
        '[comm]\ndirect_bytes = 100\n[provenance]\n"comm.direct_bytes" = "tuned: all-reduce of 100 bytes, '
        '8 ranks on 8 nodes: 5 us straight, 4 us by doubling"\n'
    )
    (folder / "start.py").write_text("import fivefold as ff\nwith ff.start():\n    pass\n")
    done = fivefold("run", "-n", 2, "--plan", "plan.toml", "start.py", cwd=folder)
    told = "comm.direct_bytes = 100 was measured on 8 nodes, and this job has 1: measure again with"
    assert (done.stdout + done.stderr).count(told) == 1


def test_instances_share_a_device_with_cores_of_their_own(folder: Path) -> None:
    cores = os.sched_getaffinity(0)
    (folder / "show.py").write_text(
        "import os, torch, fivefold as ff\nwith ff.start() as mesh:\n"
        "    print(mesh.layout, mesh.plan.instances.per_device, *sorted(os.sched_getaffinity(0)))"
    )
    for words, said in (("", "data=2"), ("--layout data=1", "data=2"), ("-n 2", "data=2")):
        done = fivefold("run", "--instances", 2, *words.split(), "show.py", cwd=folder)
        lines = sorted(done.stdout.splitlines())
        assert [line[4:].rsplit()[:2] for line in lines] == [[said, "2"]] * 2, done.stderr
        masks = [{*map(int, line.split()[3:])} for line in lines]
        if quota() is None:
            assert masks[0] and masks[1] and not masks[0] & masks[1]
        else:  # there are no cores to be bound to
            assert masks[0] == masks[1] == cores


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--instances 0", "--instances 0: at least 1 process per device is needed"),
        ("--instances 4096", "physical cores, one for each process, so "),
        ("--instances 2 -n 3", "does not divide 3 processes: take a multiple, such as 4"),
        ("-n 3 --layout height=2", "the layout height=2 of --layout needs 2 processes, not 3"),
        ("-n 2 --layout data=1", "the layout data=1 of --layout needs 1 processes, not 2"),
        ("-n 3 --set layout.data=2", "the layout data=2 of --set needs 2 processes, not 3"),
        ("--layout widht=2", "unknown axis 'widht' in layout 'widht=2'; did you mean 'width'?"),
        ("--set tiles.fuze=never", "unknown key 'fuze' in [tiles]; did you mean 'fuse'?"),
        ("--set never", "'never' is not KEY=VALUE"),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_be_starts_nothing(folder: Path, words: str, said: str) -> None:
    assert said in mistake(folder, "run", *words.split(), "hello.py")


def test_bad_variables_are_told_before_anything_starts(folder: Path) -> None:
    told = mistake(folder, "run", "-n", 2, "hello.py", FIVEFOLD_TIMEOUT_S="soon")
    assert "FIVEFOLD_TIMEOUT_S=soon: expected a positive number of seconds, such as 600" in told
    told = mistake(folder, "run", "-x", "FIVEFOLD_HANGS=3", "hello.py")
    assert "unknown environment variable FIVEFOLD_HANGS; did you mean 'FIVEFOLD_HANG_S'?" in told


def test_equal_tracebacks_and_warnings_of_ranks_are_shown_once(folder: Path) -> None:
    (folder / "told.py").write_text(
        "import traceback, warnings\nwarnings.warn('look out')\n"
        "try: {}['x']\nexcept KeyError: traceback.print_exc()\n"
    )
    done = fivefold("run", "-n", 3, "--log-dir", "logs", "told.py", cwd=folder)
    assert done.returncode == 0
    assert done.stderr.count("Traceback") == done.stderr.count("UserWarning: look out") == 1
    assert done.stderr.count("KeyError: 'x' (with the traceback of rank ") == 2
    for rank in range(3):
        log = (folder / "logs" / f"rank-{rank}.log").read_text()
        assert "Traceback" in log and "look out" in log and "with the" not in log


def test_a_failed_run_names_the_log_and_has_the_exit_code_of_the_rank(folder: Path) -> None:
    (folder / "fail.py").write_text("raise SystemExit(7)")
    done = fivefold("run", "fail.py", cwd=folder)
    assert done.returncode == 7
    assert re.search(r"error: rank 0 of 1 exited with code 7\n", done.stderr)
    assert re.search(r"logs of all ranks: fivefold-logs/.*/rank-\*\.log", done.stderr)


def test_the_rank_that_failed_is_named_though_others_end_before_it(folder: Path) -> None:
    (folder / "leaves.py").write_text("""
import atexit, time, torch
import fivefold as ff

with ff.start() as mesh:
    model = ff.parallelize(torch.nn.Linear(2, 1), mesh, loss=torch.nn.MSELoss())
    x, y = model.shard(torch.ones(3, 2), torch.ones(3, 1))
    if mesh.rank == 1:
        atexit.register(time.sleep, 1)
        raise RuntimeError("the sensor is gone")
    model.step(x, y)
""")
    done = fivefold("run", "-n", 3, "leaves.py", cwd=folder)
    assert done.returncode == 1
    assert "error: rank 1 of 3 exited with code 1; the other ranks were stopped" in done.stderr
    assert "RuntimeError: the sensor is gone" in done.stderr.partition("error: rank 1")[2]


@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_output_that_a_full_disk_does_not_keep_is_not_called_nothing(folder: Path) -> None:
    (folder / "fail.py").write_text("import sys; sys.exit('the reason')")
    (full := folder / "full").mkdir()
    command = [sys.executable, "-m", "fivefold", "run", "fail.py"]
    done = on_full_disk(full, command, CLEAN, folder / "fail.py")
    assert done.returncode == 1, done.stderr
    assert (
        "    (what it wrote is not kept: No space left on device; free space there" in done.stderr
    )
    assert "it wrote nothing" not in done.stderr


@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_a_placement_that_a_full_disk_does_not_take_is_named(folder: Path) -> None:
    (folder / "fine.py").write_text("print('fine')")
    (full := folder / "full").mkdir()
    command = [sys.executable, "-m", "fivefold", "run", "--explain", "fine.py"]
    done = on_full_disk(full, command, CLEAN, folder / "fine.py")
    assert done.returncode == 0 and "fine" in done.stdout, done.stderr
    assert "rank 0 cannot tell where it runs: cannot write where this rank runs to " in done.stderr
    assert "placement/rank-0.json: No space left on device; free space there" in done.stderr


def test_a_run_that_saved_because_a_signal_asked_has_not_failed(folder: Path) -> None:
    (folder / "saved.py").write_text("raise SystemExit(75)")
    done = fivefold("run", "-n", 2, "saved.py", cwd=folder)
    assert done.returncode == 75
    assert done.stderr.startswith("note: the run ended with code 75 (try again)"), done.stderr
    assert "the same command goes on from there" in done.stderr and "error" not in done.stderr


def test_a_traceback_is_shown_on_demand(folder: Path) -> None:
    done = fivefold("run", cwd=folder, FIVEFOLD_DEBUG="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr and done.stderr.endswith("fivefold run -n 2 train.py\n")


def test_inside_an_allocation_the_local_engine_works_as_anywhere(folder: Path) -> None:
    allocation = {"SLURM_JOB_ID": "12", "SLURM_NTASKS": "8", "SLURM_TASKS_PER_NODE": "4(x2)"}
    done = fivefold(
        "run", "-n", 2, "--engine", "local", "hello.py",
        cwd=folder, SLURM_JOB_NODELIST="n[1-2]", **allocation,
    )  # fmt: skip
    told = [line for line in done.stderr.splitlines() if "Slurm does not tell when" not in line]
    assert (done.returncode, told) == (0, [])
    assert sorted(done.stdout.splitlines()) == ["[0] hello from 0 of 2", "[1] hello from 1 of 2"]


def test_several_copies_of_the_launcher_are_refused(folder: Path) -> None:
    step = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    step |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "4"}
    told = mistake(folder, "run", "-n", 2, "hello.py", **step)
    assert "srun started 4 copies of this command" in told
    done = fivefold("run", "-n", 2, "--engine", "local", "hello.py", cwd=folder, **step)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_early_ends_the_job(folder: Path) -> None:
    (folder / "endless.py").write_text("while True: print('x' * 100, flush=True)")
    command = f"{sys.executable} -m fivefold run -n 2 endless.py | head -n 1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 141
    assert len(done.stdout.splitlines()) == 1


def test_first_gives_the_terminal_to_rank_0_alone(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from fivefold.launch import Job, choose; "
        "script = 'import os, sys; print(sys.stdout.isatty(), flush=True); print(1, file=sys.stderr)'; "
        "choose().run(Job([sys.executable, '-c', script], 2, Path('logs'), output='first'))"
    )
    controller, terminal = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, stdout=terminal, stderr=subprocess.PIPE, timeout=60, check=False,
    )  # fmt: skip
    os.close(terminal)
    assert os.read(controller, 1000) == b"True\r\n"
    os.close(controller)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "logs/rank-0.log").read_text() == "1\n"
    assert (tmp_path / "logs/rank-1.log").read_text() == "False\n1\n"


def test_a_mistake_of_all_ranks_is_told_once(folder: Path) -> None:
    """Here each rank is `fivefold run helo.py`, which is a mistake in all of them."""
    command = [sys.executable, "-m", "fivefold", "run"]
    done = subprocess.run(
        [*command, "-n", "2", "-m", "fivefold", "run", "--engine", "local", "helo.py"],
        cwd=folder,
        env=CLEAN,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == ""
    assert done.stderr.startswith("error: there is no script helo.py; did you mean 'hello.py'?")
    assert done.stderr.count("\n") == 1
