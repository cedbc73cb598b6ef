"""Which processes can share memory: asked of the kernel, never of a launcher's variables."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["between", "node_name", "watch"]


def node_name() -> str:
    """Equal for processes that can pass memory to each other and see each other end, and only for them.

    The boot of the machine, the user, and the namespaces of network (abstract sockets), processes (pidfd)
    and users. Containers on one node that share these work together, others do not.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = (_namespace(name) for name in ("net", "pid", "user"))
    return ":".join([boot, str(os.geteuid()), *spaces])


def between(one: str, other: str) -> str:
    """What keeps two processes of these `node_name`s from sharing memory, in words, or nothing."""
    if one == other:
        return ""
    boots, *rest = zip(one.split(":"), other.split(":"), strict=False)
    if len(set(boots)) > 1:
        return "share no node"
    users, *spaces = rest
    if len(set(users)) > 1:
        return f"run as different users ({' and '.join(users)}): run all ranks as one"
    kinds = ("network", "process", "user")
    if len(set(spaces[0])) > 1:  # with an address of its own, launchers count it as a node too
        return "share no node: on one machine, each has a network of its own (containers as nodes)"
    apart = [kind for kind, pair in zip(kinds, spaces, strict=True) if len(set(pair)) > 1]
    return f"are in different containers ({', '.join(apart)} namespaces): start all ranks in one"


def _namespace(name: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{name}").stat().st_ino)
    except OSError:
        return f"pid{os.getpid()}"  # hidden: nobody can be known to share it


def watch(pid: int) -> int:
    """A file descriptor that becomes readable when the process ends; -1 for this very process."""
    return -1 if pid == os.getpid() else os.pidfd_open(pid)
