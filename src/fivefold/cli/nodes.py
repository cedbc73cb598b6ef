"""On which nodes a command runs its ranks: what its options say, else what the allocation says."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from fivefold.errors import UsageError
from fivefold.launch.allocation import allocated
from fivefold.launch.hosts import LOCAL, Host, Hosts, parse_hosts, reachable, spread
from fivefold.launch.job import NodeRanks

__all__ = ["chosen_hosts", "nodes_of"]


def chosen_hosts(
    options: Sequence[str], hostfile: Hosts | None, environ: Mapping[str, str] = os.environ
) -> tuple[Host, ...]:
    """The hosts of `-H`, else of the host file, else of the allocation; empty if nothing tells any.

    Raises `UsageError` for what cannot be read.
    """
    if options:
        if hostfile is not None and hostfile.trainers:
            raise UsageError(
                "-H and the host file both name hosts for ranks; leave one of them out"
            )
        return parse_hosts(",".join(options))
    if hostfile is not None and hostfile.trainers:
        return hostfile.trainers
    return allocated(environ)


def nodes_of(
    hosts: Sequence[Host], processes: int | None, per_node: int | None, spares: int
) -> tuple[NodeRanks, ...]:
    """How many ranks run on each host; the last `spares` stand by. Empty if all run on this node alone.

    Raises `UsageError` if there are too few hosts or slots.
    """
    if not 0 <= spares < max(1, len(hosts)):
        raise UsageError(
            f"--spares {spares}: {len(hosts)} hosts are known, and at least one of them has to work"
        )
    working, standing_by = hosts[: len(hosts) - spares], hosts[len(hosts) - spares :]
    counts = spread(working, processes, per_node)
    nodes = [_node(host, ranks) for host, ranks in zip(working, counts, strict=True) if ranks]
    if all(node.local and not node.cores for node in nodes) and not spares:
        return ()
    return (*nodes, *(_node(host, 0) for host in standing_by))


def _node(host: Host, ranks: int) -> NodeRanks:
    return NodeRanks(reachable(host), ranks, host.cores, host.python, host.host == LOCAL)
