"""Writes docs/reference/operations.md from the rules of tiles: `python docs/operations.py`."""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.parallel.program.rule import registered

PAGE = Path(__file__).parent / "reference" / "operations.md"
HEAD = """\
# Operations in tiles

<!-- Written by `python docs/operations.py`, from the rules in src/fivefold/parallel/tiles. -->

What Fivefold can compute in [tiles](../explanation/tiles.md), by families. Names are those of `torch`,
`torch.Tensor` and `torch.nn.functional`. A variant that works in place (`add_`, `+=`, `inplace=True`), an
operator and a property are the function that they stand for; modules of `torch.nn` are what they call.

*Gathered* means: where tiles are in the way, they are turned into samples if the batch has enough of them,
and each rank computes some samples; else every rank computes all of it. That changes no result.

What is not listed is divided by samples if it computes every sample by itself, and gathered otherwise, with a
warning that names it and its size. `tiles.strict = true` in the [plan](plan.md) makes that an error.
"""
OURS = {
    "__getitem__": "`x[...]`",
    "alias": "`ops.aten.alias`",
    "assigned": "`x[...] = y`",
    "ff.pointwise": "autograd functions after `ff.pointwise(Function)`",
    "by_row": "`x[rows, index]` with a row for every sample",
    "hooked": "`tensor.register_hook(...)`",
    "recurrence": "`nn.RNN`, `nn.LSTM`, `nn.GRU`",
    "native_pixel_shuffle": "",  # within torch only
    "renumbered": "`x.data.copy_(y)`, or in place under `torch.no_grad()`",
    "rpow": "`2 ** x`",
    "rtruediv": "`1 / x`",
}
"""What a recording writes in its own words, and how a net says it."""


def written(name: str) -> str:
    """An operation as a net calls it. Raises `LookupError` if torch has none of this name."""
    if name in OURS:
        return OURS[name]
    for home in ("special", "linalg"):
        short = name.removeprefix(f"{home}_")
        if short != name and hasattr(getattr(torch, home), short):
            return f"`{home}.{short}`"
    for place, kind in ((torch, ""), (Tensor, ""), (F, ""), (nn, "nn.")):
        if hasattr(place, name):
            return f"`{kind}{name}`"
    if hasattr(Tensor, f"{name}_"):
        return f"`{name}_`"
    raise LookupError(f"torch has no {name}: say in OURS how a net writes it")


def told(text: str | None) -> str:
    """A docstring in one line."""
    return " ".join((text or "").split()).replace("|", "\\|")


def page() -> str:
    """The whole of it."""
    parts = [HEAD]
    kinds = sorted(registered().items(), key=lambda item: item[0].__module__)
    for module, grouped in groupby(kinds, key=lambda item: item[0].__module__):
        members = list(grouped)
        first = told(sys.modules[module].__doc__).partition(". ")[0].rstrip(".")
        title, _, about = first.partition(": ")
        parts.append(f"\n## {title}\n")
        if not set(re.findall(r"\w+", about)) <= {name for _, names in members for name in names}:
            parts.append(f"\n{about[0].upper()}{about[1:]}.\n")
        parts.append("\n| operations | in tiles |\n|---|---|\n")
        for kind, names in members:
            parts.append(
                f"| {', '.join(filter(None, map(written, names)))} | {told(kind.__doc__)} |\n"
            )
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
