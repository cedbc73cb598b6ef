"""Recipes of containers and of conda ask for what the project says, and are built where that can be done."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = ROOT / "examples" / "containers"
RECIPES = ("Dockerfile", "fivefold.def")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def copied(recipe: str) -> set[str]:
    """What a recipe takes from the repository."""
    text = (CONTAINERS / recipe).read_text()
    if recipe == "Dockerfile":
        return {
            name
            for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)
            for name in line.split()
        }
    section = text.partition("%files\n")[2].partition("\n\n")[0]
    return {line.split()[0] for line in section.splitlines()}


def done(recipe: str) -> list[str]:
    """The commands that a recipe runs, one by one."""
    text = (CONTAINERS / recipe).read_text()
    if recipe == "Dockerfile":
        lines = re.findall(r"^RUN (.*)$", text, re.MULTILINE)
    else:
        lines = text.partition("%post\n")[2].partition("\n\n")[0].splitlines()
    commands = (part.strip() for line in lines for part in line.split("&&"))
    return [c for c in commands if not c.startswith(("#", "cd "))]


def extras(requirement: str) -> set[str]:
    """Those of `.[recipes,mpi]`."""
    return set(re.findall(r"\w+", requirement.partition("[")[2]))


def suits(version: str) -> bool:
    """Whether the project is for this version of Python."""
    about = project()["project"]
    least = about["requires-python"].removeprefix(">=")
    at_least = [*map(int, version.split("."))] >= [*map(int, least.split("."))]
    return at_least and f"Programming Language :: Python :: {version}" in about["classifiers"]


def test_both_containers_are_made_alike() -> None:
    docker, apptainer = map(done, RECIPES)
    assert docker == apptainer and len(docker) == 5
    assert copied("Dockerfile") == copied("fivefold.def")
    ignored, *sent = (CONTAINERS / "Dockerfile.dockerignore").read_text().split()
    assert ignored == "*" and {name.removeprefix("!") for name in sent} == copied("Dockerfile")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_container_installs_what_the_project_declares(recipe: str) -> None:
    declared = project()
    base = re.search(
        r"^(?:FROM|From:) python:([\d.]+)", (CONTAINERS / recipe).read_text(), re.MULTILINE
    )
    assert base and suits(base[1])
    torch, fivefold = (c for c in done(recipe) if c.startswith("pip install"))
    assert torch.endswith(" torch") and extras(fivefold) <= set(
        declared["project"]["optional-dependencies"]
    )
    for command in (torch, fivefold):
        assert "-c constraints.txt" in command
    needed = {
        "pyproject.toml", "constraints.txt", declared["project"]["readme"],
        *declared["project"]["license-files"], declared["tool"]["scikit-build"]["cmake"]["source-dir"],
        *(Path(p).parts[0] for p in declared["tool"]["scikit-build"]["wheel"]["packages"]),
    }  # fmt: skip
    assert copied(recipe) == needed
    assert all((ROOT / name).exists() for name in needed)


def test_conda_installs_what_the_project_declares() -> None:
    declared = project()["project"]
    asked = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    python, torch = (one for one in asked if str(one).startswith(("python", "pytorch")))
    assert suits(python.removeprefix("python="))
    assert torch.removeprefix("py") in declared["dependencies"]
    by_pip = next(one["pip"] for one in asked if isinstance(one, dict))
    assert all(extras(line) <= set(declared["optional-dependencies"]) for line in by_pip)


def built(command: list[str]) -> None:
    """Run a command that needs a program which sites have and test machines may lack."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not here")
    found = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1800
    )
    if "Cannot connect to the Docker daemon" in found.stderr:
        pytest.skip(found.stderr.strip())
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_dockerfile_builds() -> None:
    built(["docker", "build", "-f", str(CONTAINERS / "Dockerfile"), "-t", "fivefold-test", "."])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_recipe_of_apptainer_builds(tmp_path: Path) -> None:
    built(["apptainer", "build", str(tmp_path / "f.sif"), str(CONTAINERS / "fivefold.def")])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_conda_solves_the_environment() -> None:
    built(["conda", "env", "create", "--dry-run", "-f", "environment.yml"])
