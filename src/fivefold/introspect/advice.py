"""What to do about communication that is not hidden."""

from __future__ import annotations

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.facts import first_told
from fivefold.introspect.tables import Operation
from fivefold.trace.phases import Tag

__all__ = ["for_tag"]

_LITTLE = 0.3
"""share that is hidden, below which overlapping comes first"""

_OTHER: dict[str, str] = {
    Tag.LOSS: "read the loss less often",
    Tag.HALO: 'tiles.fuse = "auto" or a larger number lets several layers share an exchange; fewer, '
    "larger tiles",
    Tag.PIPELINE: "more micro-batches, another pipeline.schedule, or stages of equal length "
    '(pipeline.cut = "measured")',
    Tag.TILES_TO_BATCH: "fewer tiles and more replicas, where memory allows it",
    Tag.CHECKPOINT: "save less often, or in the background",
    Tag.DATA: "let every rank read its own samples",
    Tag.CONTROL: "meet less often: fewer barriers, agreements and gathered texts",
    Tag.OTHER: "give the operations a tag to see what they are for; overlap them with computing",
}


def for_tag(analysis: Analysis, tag: str, hidden: float) -> str:
    """Remedies for exposed communication of a tag, of which the share `hidden` is hidden already."""
    own = _for_statistics(analysis) if tag == Tag.BATCH_NORM else _OTHER.get(tag)
    if own is not None:
        return own
    found: list[str] = []
    if hidden < _LITTLE:
        found.append(
            "start reducing while the backward pass goes on (several buckets; no graph that ends in one)"
        )
    backend = str(first_told(analysis.run, "backend") or "")
    if "gloo" in backend and str(first_told(analysis.run, "device") or "cpu") == "cpu":
        hosts = {t.meta.get("host") for t in analysis.run.ranks}
        inside = " for the ranks of a node" if len(hosts) > 1 else ""
        found.append(f"the backend fivefold instead of gloo{inside}")
    found.append("gradients in bfloat16 halve the bytes")
    found.append("accumulating over several batches before an update reduces less often")
    found.append("buckets of another size")
    return "; ".join(found)


def _for_statistics(analysis: Analysis) -> str:
    """Remedies for what bears the tag of batch norm, by what it is: other norms and buffers bear it too."""
    rows = [row for row in analysis.operations if row["tag"] == Tag.BATCH_NORM]
    told = first_told(analysis.run, "plan")
    plan = told.get("parallel.batch_norm") if isinstance(told, dict) else None
    found: list[str] = []
    if isinstance(plan, dict):
        # Statistics of a batch are gathered; norms over a sample meet its tiles only, buffers are added up.
        joined = any(
            row["operation"] == "all_gather" and _joins_replicas(analysis, row) for row in rows
        )
        if joined and plan.get("value") == "global":
            found.append(
                'parallel.batch_norm = "replica" needs none of it between replicas, and is no longer exact'
            )
    elif any(row["operation"] == "broadcast" for row in rows):
        found.append(
            "DistributedDataParallel(broadcast_buffers=False), where buffers may differ on ranks"
        )
    return "; or ".join([*found, "larger shares per rank"])


def _joins_replicas(analysis: Analysis, row: Operation) -> bool:
    """Whether ranks of an operation have different samples."""
    told = {t.rank: t.meta.get("coordinates") for t in analysis.run.ranks}
    replicas = {rank: at.get("data") for rank, at in told.items() if isinstance(at, dict)}
    return any(
        len({replicas.get(rank) for rank in group.ranks}) > 1
        for group in set(analysis.groups.values()) if group.name == row["group"]
    )  # fmt: skip
