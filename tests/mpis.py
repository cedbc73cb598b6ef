"""Finding Open MPI and MPICH for the tests that start them.

Both wheels install an `mpirun`, so `make test` puts MPICH into an environment of its own, .venv/mpich.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.bench.contender import mpi_of, mpi_options, mpirun_of
from fivefold.errors import UsageError

__all__ = ["find", "library", "options"]

options = mpi_options


def find(name: str) -> Path:
    """An mpirun of `name`, "openmpi" or "mpich". Skips the test where there is none."""
    try:
        return mpirun_of(name)
    except UsageError as problem:
        pytest.skip(str(problem))


def library(name: str) -> dict[str, str]:
    """What has mpi4py load this MPI."""
    return mpi_of(name)[1]
