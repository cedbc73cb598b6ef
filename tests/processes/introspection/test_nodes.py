"""Recording on several nodes: clocks, links, and groups that reach from node to node."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import TAGS
from nodes import Nodes, refusal

SCRIPT = """
import torch
import fivefold as ff
from torch import nn

torch.manual_seed(0)
x, y = torch.randn(8, 6), torch.tensor([0, 1] * 4)
with ff.start() as mesh:
    model = ff.parallelize(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)), mesh, loss=nn.CrossEntropyLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model.step(*model.shard(x, y))
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.long
@pytest.mark.skipif(bool(refusal()), reason=refusal())
def test_nodes_know_their_clocks_and_links() -> None:
    with Nodes(2) as nodes:
        script, folder = nodes.shared / "script.py", nodes.shared / "traces"
        script.write_text(SCRIPT)
        job = nodes.job(
            [sys.executable, str(script)],
            ranks_per_node=2,
            env=lambda _: {"FIVEFOLD_TRACE": str(folder)},
        )
        job.succeed(100)
        found = [RankTrace.load(path) for path in sorted(Path(folder).glob("*.trace"))]
    assert [trace.meta["node"] for trace in found] == [0, 0, 1, 1]
    assert len({trace.meta["host"] for trace in found}) == 2
    for trace in found:
        meta = trace.meta
        # Both nodes of the test have the clock of this machine.
        assert abs(meta["clock_offset_ns"]) <= meta["clock_error_ns"]
        assert (meta["clock_error_ns"] > 0) == (meta["node"] == 1)
        (link,) = meta["links"]
        assert link["ranks"] == [0, 2]
        assert 0 < link["latency_s"] < 1 and link["bytes_per_s"] > 0
        assert meta["calibration"] and meta["layout"]["data"] == 4
        backends = {note["backend"] for note in trace.notes if note["kind"] == "group"}
        assert backends == {"fivefold"}
        assert trace.windows["steps"].sum() == 3
        tags = {TAGS[row["tag"]] for row in trace.sums if row["kind"]}
        assert {"parameters and gradients", "loss"} <= tags
        assert not (trace.events["end_ns"] == 0).any()
