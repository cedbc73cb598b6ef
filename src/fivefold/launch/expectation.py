"""What a job would get if it were started now, on this node; and what one of its ranks got."""

from __future__ import annotations

from collections.abc import Mapping

from fivefold.cluster.node import this_node
from fivefold.launch.binding import bound, instances
from fivefold.launch.environment import allocated_nodes, locate
from fivefold.launch.explain import told_by_plan, where_they_meet
from fivefold.launch.rank_facts import expected, look
from fivefold.launch.situation import Situation
from fivefold.launch.torch_facts import TorchFacts

__all__ = ["expectation", "own_share"]


def expectation(
    processes: int,
    engine: str,
    environ: Mapping[str, str],
    torch: TorchFacts,
    port: int | None = None,
) -> Situation:
    """The situation of `processes` ranks that an engine of `fivefold run` would start here."""
    node = this_node(environ=environ)
    backend, workers = told_by_plan(environ)
    return Situation(
        node=node,
        ranks=expected(
            processes, node, environ, bound(node.mask, processes, per_device=instances(environ))
        ),
        world_size=processes,
        nodes=1,
        engine=engine,
        observed=False,
        torch=torch,
        backend=backend,
        workers=workers,
        meeting=f"127.0.0.1, {port or 'a free one'}" if processes > 1 else "",
        environ=dict(environ),
    )


def own_share(environ: Mapping[str, str], torch: TorchFacts) -> Situation:
    """What this process got, which some launcher started as one of its ranks; of others nothing is known."""
    where = locate(environ)
    backend, workers = told_by_plan(environ)
    # MPI does not name its nodes; their number follows where every node has as many ranks.
    nodes = -(-where.world_size // where.local_size)
    return Situation(
        node=this_node(environ=environ),
        ranks=(look(where, environ),),
        world_size=where.world_size,
        nodes=max(nodes, 1 if nodes == 1 else allocated_nodes(environ)),
        engine=where.launcher,
        observed=True,
        torch=torch,
        backend=backend,
        workers=workers,
        meeting=where_they_meet(where, environ),
        environ=dict(environ),
    )
