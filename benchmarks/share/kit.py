"""All that a machine with torch and without a network lacks for the campaign, in one file.

    python benchmarks/share/kit.py build/gpu-kit.tar.gz [arguments for pip]

It holds the sources of HEAD, a wheel of Fivefold that is built of them, and wheels of what it and the tests
in tests/gpu import, torch excepted, for Python 3.12 and for the Python that packs. `set_up.py` unpacks them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "gpu-kit"
LIMIT_BYTES = 60_000_000
PYTHONS = ("3.12", f"{sys.version_info[0]}.{sys.version_info[1]}")
PLATFORMS = (
    "manylinux_2_12_x86_64", "manylinux_2_17_x86_64", "manylinux_2_24_x86_64", "manylinux_2_27_x86_64",
    "manylinux_2_28_x86_64", "manylinux2014_x86_64",
)  # fmt: skip
"""pip takes each by its name only, not those that came before it"""
TOOLS = (
    "pip", "psutil", "pytest", "pytest-timeout", "hypothesis", "sybil", "nvidia-ml-py",
)  # fmt: skip
"""the last of them is in no list of tools; conftest.py imports those before"""
ONCE = ("numpy",)
"""large, and of the first Python only: who packs has it"""


def pip(*words: str | Path) -> None:
    """Run it; what it says of trouble is shown."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *map(str, words)], check=True, stdin=subprocess.DEVNULL)


def needed() -> list[str]:
    """Requirements of Fivefold, but torch, and of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    own = [text for text in project["dependencies"] if not text.startswith("torch")]
    return [*own, *TOOLS]


def gather(sources: Path, flags: list[str]) -> None:
    """Put sources and wheels into a folder."""
    wheels = sources / "wheels"
    archive = sources.parent / "head.tar"
    subprocess.run(["git", "archive", "-o", str(archive), "HEAD"], cwd=ROOT, check=True)
    with tarfile.open(archive) as packed:
        packed.extractall(sources, filter="data")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    (sources / "COMMIT").write_text(commit.stdout)
    shutil.copy(sources / "benchmarks" / "share" / "set_up.py", sources / "set-up")
    pip("wheel", "--no-deps", "--wheel-dir", wheels, *flags, sources)
    shutil.rmtree(sources / "build", ignore_errors=True)
    pinned = ["--constraint", ROOT / "constraints.txt", *flags, "--dest", wheels]
    binary = ["--only-binary", ":all:", "--implementation", "cp"]
    binary += [word for name in PLATFORMS for word in ("--platform", name)]
    for number, version in enumerate(dict.fromkeys(PYTHONS)):
        wanted = [text for text in needed() if number == 0 or not text.startswith(ONCE)]
        pip("download", *pinned, *binary, "--python-version", version, *wanted)


def main() -> int:
    """Write the kit; 1 if it is too large."""
    target, flags = Path(sys.argv[1]).resolve(), sys.argv[2:]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fivefold-kit-") as folder:
        sources = Path(folder) / NAME
        sources.mkdir()
        gather(sources, flags)
        made = Path(folder) / "made.tar.gz"
        with tarfile.open(made, "w:gz") as packed:
            packed.add(sources, NAME)
        size = made.stat().st_size
        if size >= LIMIT_BYTES:
            largest = max((sources / "wheels").iterdir(), key=lambda path: path.stat().st_size)
            print(
                f"error: the kit has {size / 1e6:.1f} MB, and may have {LIMIT_BYTES / 1e6:.0f}; "
                f"its largest wheel is {largest.name}",
                file=sys.stderr,
            )
            return 1
        shutil.move(made, target)
    print(f"{target}: {size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
