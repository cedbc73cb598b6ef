"""Real servers of OpenSSH on nodes, and the words that call them.

with Site(2, folder) as site, ssh_servers(site, folder) as words:
    environ = site.environ | {"FIVEFOLD_RSH": words}
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path

import psutil

from login_site import Site
from waiting import awaited

__all__ = ["SERVER", "is_listener", "refusal", "ssh_servers"]

SERVER = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
_SERVES = """
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PasswordAuthentication {asks}
PidFile none
"""
_CALLS = """
Host *
  User root
  IdentityFile {identity}
  IdentitiesOnly yes
  BatchMode {batch}
  StrictHostKeyChecking no
  UserKnownHostsFile {folder}/known
  LogLevel ERROR
"""
_START = 'mount -t tmpfs run /run && mkdir -m 755 /run/sshd && exec "$0" -D -e -f "$1"'


def refusal() -> str:
    """Why there are none here, or nothing."""
    if SERVER is None or not shutil.which("ssh") or not shutil.which("ssh-keygen"):
        return "no sshd, ssh or ssh-keygen here: install openssh-server"
    return "" if os.geteuid() == 0 else "sshd serves any user only as root"


@contextlib.contextmanager
def ssh_servers(site: Site, folder: Path, *, ask: bool = False) -> Generator[str]:
    """One on each node of `site`, while this lasts; the words of a remote shell that reaches them.

    Servers that `ask` let nobody in without a password.
    """
    assert SERVER is not None
    for name in ("host", "user"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    (folder / "sshd").write_text(_SERVES.format(folder=folder, asks="yes" if ask else "no"))
    hosts = (f"Host node{n}\n  HostName {site.nodes.address(n)}\n" for n in range(len(site.nodes)))
    identity, batch = ("none", "no") if ask else (folder / "user", "yes")
    calls = _CALLS.format(folder=folder, identity=identity, batch=batch)
    (folder / "ssh").write_text("".join(hosts) + calls)
    log = folder / "sshd.log"
    with log.open("wb") as out, contextlib.ExitStack() as started:
        for node in range(len(site.nodes)):
            words = [*site.nodes.entry(node), "sh", "-c", _START, SERVER, str(folder / "sshd")]
            server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
            started.callback(server.wait)
            started.callback(server.kill)
        nodes = len(site.nodes)
        awaited(lambda: log.read_text().count("listening on 0.0.0.0") == nodes, "sshd", 10.0)
        yield shlex.join(["ssh", "-F", str(folder / "ssh")])


def is_listener(pid: int) -> bool:
    """Whether a process is such a server itself, not one of its calls."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("[listener]" in word for word in psutil.Process(pid).cmdline())
    return False
