#!/usr/bin/env python3
"""An environment for the campaign beside this file, of a kit that `make gpu-kit` packed; without a network.

    python3 gpu-kit/set-up        the Python that has torch

It has the wheels of the kit, and behind them all that this Python has: torch, and numpy where there is one.
Where the C core of the wheel does not load, it is compiled of the sources. Called again, it repairs that.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ENV, WHEELS, NATIVE = HERE / "env", HERE / "wheels", HERE / "native"
PYTHON = ENV / "bin" / "python"
MACHINE = [
    path for path in sys.path
    if path.endswith(("site-packages", "dist-packages")) and Path(path).is_dir()
]  # fmt: skip
WIDER = ("AVX2", "AVX512")
"""vectors that reductions are built for once more; the processor decides"""
LOADED = "from fivefold.arena import native; native.core(); print(native.library_path())"


def wheels() -> list[str]:
    """What to install, by exact versions; no numpy where this Python has one."""
    found = {tuple(path.name.split("-")[:2]) for path in WHEELS.glob("*.whl")}
    own = importlib.util.find_spec("numpy") is not None
    return [f"{name}=={version}" for name, version in sorted(found) if name != "numpy" or not own]


def install(python: str, *where: str) -> None:
    """The wheels, by the pip among them: this Python may have none."""
    [pip] = WHEELS.glob("pip-*.whl")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    subprocess.run(
        [
            python, str(pip / "pip"), "install", "--quiet", "--no-index", "--find-links", str(WHEELS),
            "--no-deps", "--ignore-installed", "--no-compile", "--disable-pip-version-check",
            "--root-user-action", "ignore",
            *where, *wheels(),
        ],
        env={**environ, "PIP_CONFIG_FILE": os.devnull}, check=True,
    )  # fmt: skip


def make() -> None:
    """The environment; of folders and a script where this Python cannot make one."""
    try:
        import venv

        venv.create(ENV, symlinks=True, clear=True)
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        # Paths, not `site.addsitedir`: what other .pth files there do would come before the wheels.
        pth = ENV / "lib" / version / "site-packages" / "machine.pth"
        pth.write_text("\n".join(MACHINE) + "\n")
        install(str(PYTHON))
    except (ImportError, OSError, subprocess.CalledProcessError) as problem:
        print(f"note: no virtual environment ({problem}); a folder takes its place", flush=True)
        PYTHON.parent.mkdir(parents=True, exist_ok=True)
        PYTHON.unlink(missing_ok=True)
        install(sys.executable, "--target", str(ENV / "lib"))
        path = f'PYTHONPATH="{ENV / "lib"}${{PYTHONPATH:+:$PYTHONPATH}}"'
        PYTHON.write_text(f'#!/bin/sh\n{path} exec "{sys.executable}" "$@"\n')
        PYTHON.chmod(0o755)


def loaded() -> str:
    """Where the C core is; empty if it does not load."""
    done = subprocess.run([str(PYTHON), "-c", LOADED], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def compile_core() -> None:
    """As native/CMakeLists.txt says, which machines without CMake cannot follow."""
    told = (NATIVE / "CMakeLists.txt").read_text()

    def words(start: str) -> list[str]:
        found = re.search(re.escape(start) + r"\s+(.*?)\)", told, re.DOTALL)
        assert found is not None, f"{start} stands in CMakeLists.txt"
        return found[1].split()

    compiler = [os.environ.get("CC", "cc"), "-std=gnu11", "-fPIC", "-DNDEBUG", "-pthread"]
    compiler += [*words("set(FLAGS"), *(f"-DFF_HAS_{kind}" for kind in WIDER)]
    compiler += os.environ.get("CFLAGS", "").split()
    pieces: dict[str, tuple[str, list[str]]] = {
        source: (source, []) for source in words("add_library(fivefold_core SHARED")
    }
    for kind in WIDER:
        own = [*words(f"set({kind}"), f"-DFF_BUILD=ff_reduce_{kind.lower()}"]
        pieces[f"reduce_{kind}"] = ("reduce.c", own)
    objects = {name: str(ENV / f"{name}.o") for name in pieces}
    running = [
        subprocess.Popen([*compiler, *own, "-c", source, "-o", objects[name]], cwd=NATIVE)
        for name, (source, own) in pieces.items()
    ]
    if any(codes := [process.wait() for process in running]):
        raise SystemExit(f"error: the C core does not compile here: {codes}")
    find = "import fivefold, pathlib; print(pathlib.Path(fivefold.__file__).parent)"
    package = subprocess.run(
        [str(PYTHON), "-c", find], capture_output=True, text=True, check=True
    ).stdout.strip()
    core = Path(package) / "arena" / "libfivefold_core.so"
    core.unlink(missing_ok=True)
    subprocess.run([*compiler, "-shared", *objects.values(), "-o", str(core)], check=True)


def main() -> int:
    """Make it, unless it is there; 1 if it does not serve."""
    begun = time.monotonic()
    if importlib.util.find_spec("torch") is None:
        print(f"error: {sys.executable} has no torch: call set-up with the Python that has it")
        return 1
    if not (ENV / "made").exists():
        make()
        (ENV / "made").touch()
    if not loaded():
        print("the C core of the wheel does not load here: it is compiled", flush=True)
        compile_core()
    if not loaded():
        print("error: the C core does not load here", flush=True)
        return 1
    took = time.monotonic() - begun
    print(f"ready after {took:.0f} s: {PYTHON} {HERE}/benchmarks/share/campaign.py --out results")
    return 0


if __name__ == "__main__":
    sys.exit(main())
