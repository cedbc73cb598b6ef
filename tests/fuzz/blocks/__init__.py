"""The blocks of nets, by what they are about; importing this package makes all of them known."""

from fuzz.blocks import (
    buffers,
    control,
    experts,
    hooks,
    images,
    in_place,
    joins,
    known,
    memories,
    norms,
    options,
    pictures,
    regions,
    rows,
    structure,
    tokens,
    weights,
)

__all__ = [
    "buffers", "control", "experts", "hooks", "images", "in_place", "joins", "known", "memories", "norms",
    "options", "pictures", "regions", "rows", "structure", "tokens", "weights",
]  # fmt: skip
