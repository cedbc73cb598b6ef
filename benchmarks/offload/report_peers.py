"""The table of loaders whose workers may be elsewhere."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from figures import ratio, table
from peers import PEERS
from publishing import conditions

__all__ = ["section"]

_EXTRA = (
    "The workers' core is extra hardware, for all of them alike. Nothing is trained, so the consumer has "
    "nothing to do: Fivefold's makes batches itself while it would wait, the others leave core 0 idle. "
    "Processor time per sample compares what each batch costs."
)

Told = Mapping[str, Sequence[Mapping[str, Any]]]


def section(result: dict[str, Any]) -> str:
    """The part as it stands in the README."""
    blocks: Told = result["blocks"]
    lines = [
        "### Peers: JPEG 500x375 to 32x32, made on core 1, read on core 0",
        _EXTRA,
        table(_HEADER, [_row(name, blocks) for name in blocks]),
        *_goals(blocks),
    ]
    lines += [f"Without {PEERS[name].title}: {why}." for name, why in result["absent"].items()]
    told = ", ".join(dict.fromkeys(v for v in result["versions"].values() if v))
    lines.append(f"{told}. Blocks of {result['block_s']:g} s. {conditions(result)}")
    return "\n\n".join(lines)


_HEADER = ("", "samples/s", "CPU ms per sample", "fivefold makes times as many [95 %]")


def _row(name: str, blocks: Told) -> list[str]:
    beside = ""
    if name not in ("local", "remote") and "remote" in blocks:
        beside = str(ratio(_speeds(blocks["remote"]), _speeds(blocks[name])))
    cpu = [1e3 * used for used in _used(blocks[name])]
    return [
        PEERS[name].title, f"{statistics.median(_speeds(blocks[name])):.0f}",
        f"{statistics.median(cpu):.2f}", beside,
    ]  # fmt: skip


def _goals(blocks: Told) -> Iterator[str]:
    for name in (n for n in ("tf", "ray") if n in blocks and "remote" in blocks):
        title, other = PEERS["remote"].title, PEERS[name].title
        faster = ratio(_speeds(blocks["remote"]), _speeds(blocks[name])).at_least(1.0)
        cheaper = ratio(_used(blocks["remote"]), _used(blocks[name]))
        yield (
            f"Goal, *{title}* at least as fast as {other}: {faster}; and at most as much processor time per "
            f"sample: {cheaper} times: {cheaper.at_most(1.0)}."
        )


def _used(told: Sequence[Mapping[str, Any]]) -> list[float]:
    """Processor seconds per sample."""
    return [block["cpu_s"] / block["all_samples"] for block in told]


def _speeds(told: Sequence[Mapping[str, Any]]) -> list[float]:
    return [block["samples"] / block["wall_s"] for block in told]
