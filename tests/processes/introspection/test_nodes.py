"""Recording on several nodes: clocks, links, and groups that reach from node to node."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from faults import notes, slow_link
from fivefold.arena.native import problem
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import TAGS
from nodes import Nodes, refusal
from waiting import awaited

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


SUMS = """
import sys
import torch
import fivefold as ff
from pathlib import Path

with ff.start() as mesh:
    group = mesh.group("data")
    small, large = torch.ones(1), torch.ones(1 << 20)
    while not Path(sys.argv[1]).exists():
        torch.distributed.all_reduce(small, group=group)
    torch.distributed.barrier(group)
    print("begins", flush=True)
    torch.distributed.all_reduce(large, group=group)
    assert (large == 2).all()
"""


@pytest.mark.long
@pytest.mark.skipif(bool(refusal()), reason=refusal())
@pytest.mark.skipif(bool(problem()), reason="installed without the C core")
def test_a_link_on_which_little_arrives_is_told_with_how_far_it_came() -> None:
    with Nodes(2) as nodes:
        script, folder = nodes.shared / "script.py", nodes.shared / "traces"
        go = nodes.shared / "go"
        script.write_text(SUMS)
        job = nodes.job(
            [sys.executable, str(script), str(go)],
            env=lambda _: {"FIVEFOLD_TRACE": str(folder), "FIVEFOLD_HANG_S": "3"},
        )
        awaited(lambda: len([*folder.glob("*.trace")]) == 2, "traces", 60)
        slow_link(nodes, 1, 0.2)
        go.touch()
        awaited(lambda: "fivefold: hang" in job.ranks[0].text, "what hangs", 60)
        slow_link(nodes, 1, 1000, burst="4mbit")
        job.succeed(60)
        assert "goes on after" in job.ranks[0].text
        (first, *_) = notes(folder, "hang")
        hosts = [RankTrace.load(path).meta["host"] for path in sorted(folder.glob("*.trace"))]
    told = re.search(
        rf"what goes from rank 1 on {hosts[1]} to rank 0 on {hosts[0]} \(([\d,]+) of 4,194,304 bytes\)",
        first["text"],
    )
    assert told, first["text"]
    assert 0 < int(told[1].replace(",", "")) < 4_194_304
