"""Which engine is taken where none is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.launch.engine import choose


@pytest.mark.parametrize(
    ("variables", "programs", "name"),
    [
        ({}, (), "ssh"),
        ({"SLURM_JOB_ID": "7"}, ("srun",), "srun"),
        ({"SLURM_JOB_ID": "7"}, (), "ssh"),
        ({"FLUX_URI": "local:///x"}, ("flux",), "flux"),
        ({"FLUX_URI": "local:///x", "SLURM_JOB_ID": "7"}, ("flux", "srun"), "flux"),
        ({"PBS_NODEFILE": "/nodes"}, ("mpiexec",), "ssh"),
        ({"PBS_NODEFILE": "/nodes"}, ("pals/1.4/bin/mpiexec",), "pals"),
        ({}, ("pals/1.4/bin/mpiexec",), "ssh"),
    ],
)
def test_several_nodes(
    variables: dict[str, str],
    programs: tuple[str, ...],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for scheduler in ("SLURM_JOB_ID", "FLUX_URI", "PBS_NODEFILE"):
        monkeypatch.delenv(scheduler, raising=False)
    for variable, value in {**variables, "PATH": str(tmp_path)}.items():
        monkeypatch.setenv(variable, value)
    for program in programs:
        path = tmp_path / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        if path.parent != tmp_path:
            (tmp_path / path.name).symlink_to(path)
    assert choose("auto", several_nodes=True).name == name
    assert choose("auto").name == "local"
