"""C against C: the core beside the MPIs, without Python or torch. Every turn is a program of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fivefold.arena import native
from fivefold.bench.contender import mpirun_of

HERE = Path(__file__).resolve().parent / "c"
LIMIT_S = 120.0


def measured(
    folder: Path, ranks: int, sizes: Sequence[int], rounds: int
) -> dict[str, list[list[float]]]:
    """By contender: for every size the seconds per call of each round."""
    commands = {"core": _core(folder, ranks)}
    commands |= {name: _mpi(name, folder, ranks) for name in ("openmpi", "mpich")}
    found: dict[str, list[list[float]]] = {name: [[] for _ in sizes] for name in commands}
    for number in range(rounds):
        names = list(commands)
        for name in names[number % 3 :] + names[: number % 3]:
            told = _told([*commands[name], *map(str, sizes)])
            for of_size, seconds in zip(found[name], told, strict=True):
                of_size.append(seconds)
    return found


def _core(folder: Path, ranks: int) -> list[str]:
    library = native.library_path()
    assert library is not None, native.problem()
    program = folder / "core"
    _told(["cc", "-O2", "-o", program, HERE / "core.c", library, f"-Wl,-rpath,{library.parent}"])
    return [str(program), str(ranks)]


def _mpi(name: str, folder: Path, ranks: int) -> list[str]:
    mpirun, program = mpirun_of(name), folder / name
    _told([mpirun.with_name("mpicc"), "-O2", "-o", program, HERE / "mpi.c"])
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    options = ["--oversubscribe", "--bind-to", "none", *as_root] if name == "openmpi" else []
    return [str(mpirun), *options, "-n", str(ranks), str(program)]


def _told(command: Sequence[object]) -> list[float]:
    """What a program prints. Ends the benchmark if it is missing, fails or takes minutes."""
    words = [str(word) for word in command]
    if shutil.which(words[0]) is None:
        sys.exit(f"error: {words[0]} is needed to compare in C")
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        sys.exit(f"error: {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return [float(line) for line in done.stdout.split()]
