"""A disk without space, for commands that would write to it."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

__all__ = ["on_full_disk", "refusal"]

_FULL = """
mount -t tmpfs -o size=64k full "$1"
cd "$1"
shift
for file in "$@"; do [ "$file" = -- ] && break; cp "$file" .; done
while [ "$1" != -- ]; do shift; done
shift
head -c 1m /dev/zero > filling 2> /dev/null
"$@"
code=$?
ls -A | sed "s/^/left: /"
exit $code
"""


def on_full_disk(
    folder: Path, command: list[str], environ: dict[str, str], *files: Path
) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, covered by a full disk that holds `files`; lines `left: NAME` follow."""
    space = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", _FULL, "full"]
    return subprocess.run(
        [*space, str(folder), *map(str, files), "--", *command],
        env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


@functools.cache
def refusal() -> str:
    """Why this machine makes none, or nothing."""
    done = on_full_disk(Path("/mnt"), ["true"], {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"})
    return "" if "left: filling" in done.stdout else done.stderr.strip() or "no full disk here"
