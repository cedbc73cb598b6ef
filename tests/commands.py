"""The `fivefold` command as tests type it, in an environment that nobody else has a part in."""

from __future__ import annotations

import atexit
import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from fivefold.launch.environment import without_places
from template import OTHERS, TORCH, Template

__all__ = ["CLEAN", "fivefold", "mistake", "programs", "python", "starting"]

# The suite may itself run in an allocation, or under a launcher.
CLEAN = {
    name: value
    for name, value in without_places(os.environ).items()
    if not name.startswith(("FIVEFOLD_", "SLURM_", "PBS_"))
}


@cache
def programs() -> Path:
    """A folder with `python` and `fivefold`, which begin where torch has been imported."""
    template = Template(*TORCH, *OTHERS)
    atexit.register(template.close)
    return template.programs


def python() -> str:
    """What stands for `sys.executable` where it does not matter that torch has been imported."""
    return str(programs() / "python")


def fivefold(
    *words: object, cwd: Path, limit_s: float = 100.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`fivefold WORDS` in `cwd`, without a terminal."""
    return subprocess.run(
        [str(programs() / "fivefold"), *map(str, words)],
        cwd=cwd,
        env=CLEAN | {"COLUMNS": "100"} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def mistake(folder: Path, *words: object, **environment: str) -> str:
    """The one line that a mistake on the command line gets; nothing may have been written."""
    before = sorted(folder.rglob("*"))
    done = fivefold(*words, cwd=folder, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert sorted(folder.rglob("*")) == before
    return done.stderr


@contextlib.contextmanager
def starting() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start commands within the block, in an environment and a folder, and read what they write.

    What still runs at its end is killed.
    """
    started: list[subprocess.Popen[str]] = []

    def start(
        words: Sequence[str], env: Mapping[str, str], cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
