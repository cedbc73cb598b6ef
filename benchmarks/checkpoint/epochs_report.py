"""The table of epochs that end with a checkpoint, and what 100 of them would take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from costs import EVERY
from figures import Median, ratio, table
from publishing import conditions

__all__ = ["PARTS", "section", "shares"]

PARTS = {
    "resnet50": ("ResNet-50, SGD with momentum", "64x64 pixels"),
    "edsr": ("EDSR baseline, Adam", "48x48 to 96x96 pixels"),
}
ROWS = {
    "none": "no checkpoints",
    "rank0": "torch.save on rank 0, barrier",
    "tenth": "fivefold, xor, every tenth flushed",
    "xor": "of it: an epoch without flush",
    "xor-flushed": "of it: an epoch with flush",
}
PROJECTED = 100
PUBLISHED = "10 to 15 %"

Epochs = Mapping[str, Sequence[Mapping[str, Any]]]


def series(epochs: Epochs, key: str) -> dict[str, list[float]]:
    """Seconds by row and round; of ten epochs of Fivefold one is flushed."""
    found = {name: [float(epoch[key]) for epoch in rounds] for name, rounds in epochs.items()}
    pairs = zip(found["xor"], found["xor-flushed"], strict=True)
    found["tenth"] = [(kept * (EVERY - 1) + flushed) / EVERY for kept, flushed in pairs]
    return {name: found[name] for name in ROWS}


def shares(seconds: Mapping[str, Sequence[float]], name: str) -> Median:
    """How much longer epochs are than those of the same round without checkpoints, as a fraction."""
    longer = ratio(seconds[name], seconds["none"])
    return Median(longer.value - 1, longer.low - 1, longer.high - 1, longer.coverage)


def section(result: dict[str, Any]) -> str:
    """A model as it stands in the README."""
    wall, cpu = (series(result["epochs"], key) for key in ("wall_s", "cpu_s"))
    rows = [_row(wall, cpu, name) for name in ROWS]
    title, images = PARTS[result["part"]]
    header = [
        "", "epoch, s [95 %]", "a checkpoint adds, s", f"{PROJECTED} epochs, h",
        "overhead by the clock [95 %]", "CPU added, s",
    ]  # fmt: skip
    told = (
        f"An epoch is {result['steps']} steps of {result['batch']} samples per rank, {images}. Published for "
        f"a checkpoint at the end of every epoch written the first way: {PUBLISHED}. The shared file system "
        f"passes {result['throttle_bytes_per_s'] / 1e6:.0f} MB/s. {conditions(result)}"
    )
    headline = (
        f"### {title}: {result['nodes']} nodes, {result['state_bytes'] / 1e6:.0f} MB of state"
    )
    return "\n\n".join([headline, table(header, rows), told])


def _row(
    wall: Mapping[str, Sequence[float]], cpu: Mapping[str, Sequence[float]], name: str
) -> list[str]:
    own = Median.of(wall[name])
    hours = f"{own.value * PROJECTED / 3600:.2f}"
    if name == "none":
        return [ROWS[name], str(own), "", hours, "", ""]
    added, more = (
        Median.of([a - b for a, b in zip(used[name], used["none"], strict=True)])
        for used in (wall, cpu)
    )
    return [
        ROWS[name], str(own), str(added), hours if name in ("rank0", "tenth") else "",
        _percent(shares(wall, name)), f"{more.value:.2f}",
    ]  # fmt: skip


def _percent(share: Median) -> str:
    if share.coverage < 0.95:
        return f"{share.value:.1%} [too few]"
    return f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"
