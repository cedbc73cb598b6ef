"""Nodes that a launcher reaches by a remote shell: the launcher runs beside them, as on a login node.

with Site(3, folder) as site:
    words = ["fivefold", "run", "-H", "node0:2,node1:2", "script.py"]
    subprocess.run([*site.entering(folder), *words], env=site.environ)
    site.nodes.kill(1)
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Self

from commands import CLEAN
from nodes import Nodes

__all__ = ["Site"]

_SHELL = """\
#!/bin/sh
# HOST COMMAND...
while [ "${{1#-}}" != "$1" ]; do shift; done
host=${{1#*@}}; shift
case $host in
{cases}
esac
echo "ssh: Could not resolve hostname $host: Name or service not known" >&2
exit 255
"""


class Site:
    """Some nodes, and how to reach them. A context manager that leaves nothing behind."""

    def __init__(self, count: int, folder: Path) -> None:
        self.nodes = Nodes(count)
        self._shell = folder / "remote-shell"
        self._login = self.nodes.login()
        self._names = [self.nodes.host(node) for node in range(count)]
        self.renew()

    def entering(self, folder: Path) -> list[str]:
        """Words before a command that shall run beside the nodes, in `folder`."""
        return [*self._login, "sh", "-c", 'cd "$0" && exec "$@"', str(folder)]

    @property
    def environ(self) -> dict[str, str]:
        """With the variables that a site sets."""
        own = {"FIVEFOLD_RSH": str(self._shell), "PRTE_MCA_plm_ssh_agent": str(self._shell)}
        return (
            CLEAN
            | own
            | {
                "HYDRA_LAUNCHER_EXEC": str(self._shell),
                "HYDRA_IFACE": "hub",
                # What a node that is gone leaves in /tmp, another one would take for its own.
                "PRTE_MCA_prte_remote_tmpdir_base": str(self.nodes.tmp),
                "OMP_NUM_THREADS": "1",
            }
        )

    def name(self, node: int) -> str:
        """What the shell takes for a node, also for one that replaces it."""
        return self._names[node]

    def renew(self) -> None:
        """Take up the nodes as they are now; one that replaces another has the other's name too."""
        lines: list[str] = []
        for node in range(len(self.nodes)):
            # As sshd does: a shell with hardly any variables, in the home folder.
            enter = shlex.join(self.nodes.entry(node))
            clean = f'env -i PATH="$PATH" HOME=/ {enter} sh -c "cd /; $*"'
            names = f"{self._names[node]}|{self.nodes.host(node)}|{self.nodes.address(node)}"
            lines.append(f"{names}) exec {clean} ;;")
        text = _SHELL.format(cases="\n".join(lines))
        self._shell.write_text(text)
        self._shell.chmod(0o755)

    def processes(self) -> list[int]:
        """What runs on the nodes that are up."""
        return [pid for node in range(len(self.nodes)) for pid in self.nodes.processes(node)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.nodes.close()
