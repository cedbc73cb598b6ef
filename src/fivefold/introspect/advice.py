"""What to do about communication that is not hidden."""

from __future__ import annotations

from fivefold.introspect.analysis import Analysis
from fivefold.introspect.facts import first_told
from fivefold.trace.phases import Tag

__all__ = ["for_tag"]

_LITTLE = 0.3
"""share that is hidden, below which overlapping comes first"""

_OTHER: dict[str, str] = {
    Tag.BATCH_NORM: 'parallel.batch_norm = "replica" needs none of it, and is no longer exact; or '
    "larger shares per rank",
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
    own = _OTHER.get(tag)
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
