"""requirements.lock has all that an environment is made of, with hashes, at the versions that are tested."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
OF_TORCH = re.compile(r"torch|torchvision|triton|cuda-.*|nvidia-(?!ml).*")
"""what `make TORCH=` chooses otherwise"""
APART = {"setuptools"}
"""what pip itself brings on some versions of Python"""


def pinned(text: str) -> dict[str, set[str]]:
    """Versions by the normalised names of packages."""
    found: dict[str, set[str]] = {}
    for name, number in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE):
        found.setdefault(normal(name), set()).add(number)
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


LOCK = (ROOT / "requirements.lock").read_text()


def test_what_is_chosen_by_hand_is_in_the_lock() -> None:
    apart = {"mpich", "mpi4py"}  # mpich has an environment of its own
    for name, versions in pinned((ROOT / "constraints.txt").read_text()).items():
        assert name in apart or pinned(LOCK).get(name) == versions, f"{name}: make lock"


def test_every_package_has_hashes() -> None:
    blocks = re.split(r"\n(?=[\w])", LOCK)
    without = [
        b.partition("\n")[0] for b in blocks if "==" in b.partition("\n")[0] and "sha256:" not in b
    ]
    assert len(blocks) > 80 and not without


def needed(name: str, extras: set[str], found: set[str]) -> set[str]:
    """Names of all installed packages that one needs, with extras of it."""
    for text in requires(name) or ():
        one = Requirement(text)
        wanted = one.marker is None or any(one.marker.evaluate({"extra": e}) for e in {"", *extras})
        if wanted and normal(one.name) not in found and is_installed(one.name):
            found.add(normal(one.name))
            needed(one.name, one.extras, found)
    return found


def is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def test_what_is_installed_is_what_is_locked() -> None:
    locked = pinned(LOCK)
    extras = set(metadata("fivefold").get_all("Provides-Extra", []))
    every = needed("fivefold", extras, set())
    assert len(every) > 50
    for name in every - APART:
        if not OF_TORCH.fullmatch(name):
            now = version(name).partition("+")[0]
            assert now in locked.get(name, ()), (
                f"{name} {now}, locked: {locked.get(name)}; make lock"
            )
