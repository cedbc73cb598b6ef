"""Ranks that are forked from one process do what ranks with an interpreter each do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from commands import CLEAN
from fivefold.trace.reader import RankTrace

SCRIPT = """
import atexit, os, random, signal, sys, tempfile, threading
import numpy, torch
OWN = "MASTER_PORT", "FIVEFOLD_LAUNCH", "FIVEFOLD_SUPERVISOR"
print(sys.argv[1:], __name__, __file__, __spec__, sys.path[0], sys.orig_argv[1:], os.getcwd())
print({k: v for k, v in sorted(os.environ.items()) if k not in OWN})
print(torch.get_num_threads(), os.getpgrp() == os.getpid(), sorted(os.sched_getaffinity(0)))
print([signal.getsignal(n) for n in (2, 10, 13, 15)], sys.stdin.read(), sys.stdout.line_buffering)
print(len(threading.enumerate()), torch.initial_seed() != torch.seed())
threading.Thread(target=print, args=("from a thread",)).start()
atexit.register(print, "at its end", file=sys.stderr)
with open(f"kept-{os.environ['RANK']}", "w") as kept:
    kept.write("written, if late")
"""
WORKERS = """
import os, sys, torch
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, n):
        return n * int(os.environ["RANK"])
if __name__ == "__main__":
    for context in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=context)
        print(context, [batch.tolist() for batch in loader])
    print(torch.nn.functional.relu(torch.ones(3, 3) @ torch.ones(3, 3)).sum().item())
"""
CASES = {
    "script": ["script.py", "a", "b c"],
    "workers": ["workers.py"],
    "module": ["-m", "json.tool", "numbers.json"],
    "package": ["-m", "package.inner", "x"],
    "words": ["words.py"],
    "error": ["error.py"],
    "hook": ["hook.py"],
    "signal": ["signalled.py"],
    "interrupt": ["interrupt.py"],
    "mistake": ["mistake.py"],
    "syntax": ["syntax.py"],
    "leaves at once": ["leaves.py"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    files = {
        "script.py": SCRIPT,
        "workers.py": WORKERS,
        "numbers.json": "[1, 2]",
        "package/__init__.py": "",
        "package/inner.py": "import sys; print(__name__, __package__, __spec__.name, sys.argv[1:])",
        "words.py": "raise SystemExit('these words')",
        "error.py": "def f():\n    1 / 0\nprint('out')\nf()",
        "hook.py": "import sys; sys.excepthook = lambda *_: sys.exit(5); 1 / 0",
        "signalled.py": "import os; os.kill(os.getpid(), 9)",
        "interrupt.py": "raise KeyboardInterrupt",
        "mistake.py": "from fivefold.errors import UsageError\nimport fivefold\nraise UsageError('not so')",
        "syntax.py": "this is no Python",
        "leaves.py": "import os; print('out', flush=True); os._exit(7)",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def ran(
    folder: Path, words: list[str], *options: str, ranks: int = 2
) -> tuple[int, list[str], str]:
    """Exit code, the sorted lines of all ranks, and what the launcher says at the end."""
    log = folder / f"logs{len(list(folder.glob('logs*')))}"
    command = [sys.executable, "-m", "fivefold", "run", "-n", str(ranks), "--log-dir"]
    command += [str(log), *options]
    done = subprocess.run(
        [*command, *words],
        cwd=folder, env=CLEAN | {"OMP_NUM_THREADS": "2", "PWD": str(folder)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    logs = [
        line
        for rank in range(ranks)
        for line in (log / f"rank-{rank}.log").read_text().splitlines()
    ]
    told = re.search(r"^(error|note): .*", done.stderr, re.MULTILINE)
    return done.returncode, sorted(map(_alike, logs)), _alike(told[0]) if told else ""


def _alike(line: str) -> str:
    """Without what differs between two runs anyway: names of logs, and who failed first."""
    return re.sub(r"rank \d|'FIVEFOLD_ENGINE': '\w+'|'LOCAL_WORLD_SIZE': '2', ", "", line)


@pytest.mark.long
@pytest.mark.timeout(
    240
)  # two jobs, either of which may take the 100 s of `ran` where cores are shared
@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_they_do_what_others_do(words: list[str], folder: Path) -> None:
    # One that fails would end the other at any moment.
    ranks = 2 if words[0] in ("script.py", "workers.py") else 1
    expected = ran(folder, words, ranks=ranks)
    for path in folder.glob("kept-*"):
        path.unlink()
    assert ran(folder, words, "--fork", ranks=ranks) == expected
    assert words[0] != "script.py" or len([*folder.glob("kept-*")]) == 2


def test_each_has_random_numbers_of_its_own(folder: Path) -> None:
    (folder / "dice.py").write_text(
        "import random, numpy, torch\nprint(random.random(), numpy.random.rand(), torch.rand(1).item())\n"
        "torch.manual_seed(1); numpy.random.seed(1); random.seed(1)\n"
        "print('seeded', random.random(), numpy.random.rand(), torch.rand(1).item())\n"
    )
    _, lines, _ = ran(folder, ["dice.py"], "--fork")
    first, second, *seeded = lines
    assert not set(first.split()) & set(second.split())
    assert seeded[0] == seeded[1] and seeded[0].startswith("seeded")


def test_their_traces_tell_of_steps(folder: Path) -> None:
    (folder / "steps.py").write_text(
        "import torch, fivefold as ff\n"
        "with ff.start() as mesh:\n"
        "    optim = torch.optim.SGD((net := torch.nn.Linear(2, 1)).parameters())\n"
        "    for _ in range(3):\n"
        "        net(torch.ones(1, 2)).sum().backward()\n"
        "        optim.step()\n"
    )
    code, _, err = ran(folder, ["steps.py"], "--fork", "--trace")
    assert code == 0, err
    traces = [RankTrace.load(path) for path in folder.rglob("*.trace")]
    assert [int(trace.windows["steps"].sum()) for trace in traces] == [3, 3]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", "printenv", "RANK"], "--fork is for Python scripts and modules, and .*printenv is"),
        (["--explain", "script.py"], "--explain tells of ranks that start one by one; leave"),
        (
            ["--engine", "torchrun", "script.py"],
            "--fork and --engine torchrun: on one node Fivefold",
        ),
    ],
)
def test_what_cannot_be_forked_is_refused(words: list[str], says: str, folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fivefold", "run", "-n", "2", "--fork", *words],
        cwd=folder, env=CLEAN, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert re.match(f"error: {says}", done.stderr)


def test_helpers_of_this_node_help_forked_ranks_too(folder: Path) -> None:
    (folder / "helped.py").write_text(
        "import os, sys\n"
        "role = os.environ.get('FIVEFOLD_ROLE')\n"
        "print(role, len(os.environ['FIVEFOLD_HELPERS']) > 0, len(os.sched_getaffinity(0)))\n"
        "import time; time.sleep(1)\n"
    )
    log = folder / "helped"
    done = subprocess.run(
        [sys.executable, "-m", "fivefold", "run", "-n", "1", "--fork", "--helpers", "local:1",
         "--log-dir", str(log), "helped.py"],
        cwd=folder, env=CLEAN, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cores = len(os.sched_getaffinity(0))
    assert (log / "rank-0.log").read_text() == f"None True {cores - 1}\n"
    assert (log / "helper-0.log").read_text() == "helper True 1\n"
