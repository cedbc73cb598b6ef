"""An environment and a script in a shared folder, and nodes that are folders: for `fivefold run --stage`.

shared = Shared(folder)
done = shared.run("-H", "n0:2,n1:1", "--stage", "train.py")
shared.copies("n0")
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fivefold
from commands import CLEAN

__all__ = ["Shared"]

_SHELL = """\
#!/bin/sh
# HOST WORDS: each host has a folder for temporary files of its own. That of `full` is too small; on `short`
# files cannot grow.
while [ "${1#-}" != "$1" ]; do shift; done
export TMPDIR="$(dirname "$0")/nodes/$1"
mkdir -p "$TMPDIR"
[ "$1" = full ] && within="unshare --user --map-root-user --mount"
[ "$1" = full ] && mount="mount -t tmpfs -o size=256k small $TMPDIR;"
[ "$1" = short ] && limit="ulimit -f 1000;"
shift
exec $within sh -c "$mount $limit $*"
"""
_TOOL = """\
#!{python}
import sys, pkg
print("tool", sys.prefix, pkg.__file__)
"""


class Shared:
    """A virtual environment with a package `pkg`, links to all that the tests have, and a job's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env, self.job, self.lib = folder / "env", folder / "job", folder / "lib"
        base = os.path.realpath(sys.executable)
        words = [base, "-m", "venv", "--without-pip", str(self.env)]
        subprocess.run(words, check=True)
        self.site = next(self.env.glob("lib/python*/site-packages"))
        (self.site / "pkg").mkdir()
        (self.site / "pkg" / "__init__.py").write_text("")
        self.lib.mkdir()
        found = [
            path
            for place in sys.path
            if place.endswith("site-packages")
            for path in Path(place).iterdir()
        ]
        for path in found:
            ours = path.name.startswith(("_editable", "fivefold")) or path.suffix == ".pth"
            if not ours and not (self.lib / path.name).exists():
                (self.lib / path.name).symlink_to(path)
        (self.lib / "fivefold").symlink_to(Path(fivefold.__file__).parent)
        (self.site / "lib.pth").write_text(f"{self.lib}\n")
        self.tool = self.env / "bin" / "tool"
        self.tool.write_text(_TOOL.format(python=self.env / "bin" / "python"))
        self.tool.chmod(0o755)
        self.job.mkdir()
        self._shell = folder / "shell"
        self._shell.write_text(_SHELL)
        self._shell.chmod(0o755)

    def words(self, *words: object) -> list[str]:
        """A command: `fivefold run` in the shared environment."""
        return [str(self.env / "bin" / "python"), "-m", "fivefold", "run", *map(str, words)]

    @property
    def environ(self) -> dict[str, str]:
        """For it."""
        path = f"{self.env}/bin:{CLEAN['PATH']}"
        own = {"FIVEFOLD_RSH": str(self._shell), "PATH": path, "VIRTUAL_ENV": str(self.env)}
        return CLEAN | own | {"TMPDIR": str(self.node("launcher"))}

    def start(self, *words: object) -> subprocess.Popen[str]:
        """Begin, in the job's folder."""
        self.node("launcher").mkdir(parents=True, exist_ok=True)
        return subprocess.Popen(
            self.words(*words), cwd=self.job, env=self.environ, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *words: object) -> subprocess.CompletedProcess[str]:
        """Begin, and wait for the end."""
        with self.start(*words) as process:
            out, err = process.communicate(timeout=100)
            return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def node(self, name: str) -> Path:
        """The folder of a node for temporary files."""
        return self.folder / "nodes" / name

    def copies(self, name: str) -> dict[str, int]:
        """What is in the folder for copies of a node, with its number in the file system."""
        return {
            path.name: path.stat().st_ino for path in self.node(name).glob("fivefold-*-stage/*")
        }
