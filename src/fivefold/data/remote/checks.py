"""Whether a helper makes the same bytes: every helper makes the trainer's own first batch again.

And whether any batch of a helper is built like those that are made here: the loop takes it apart unseen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from fivefold.data.workers import Key
from fivefold.helpers.encode import Encoder, encode, types_in

__all__ = ["First", "structure_of"]


def structure_of(batch: Any, key: Key) -> str:
    """How a batch is built: containers and their keys, kinds of leaves, dtypes, numbers of dims, and which
    first dims are its number of samples. Neither values nor sizes, which may differ from batch to batch.

    Raises `UsageError` for what cannot travel.
    """
    return json.dumps(_built(Encoder().node(batch), key.stop - key.start))


def _built(tree: Any, samples: int) -> Any:
    """The same of a tree as `Encoder` makes it."""
    if not isinstance(tree, list):
        return type(tree).__name__
    name, *rest = cast("list[Any]", tree)
    if name in ("tensor", "array", "scalar"):
        dtype, shape = cast("tuple[str, Sequence[int]]", rest[1:3])
        return [name, dtype, len(shape), bool(shape) and shape[0] == samples]
    if name in ("dict", "OrderedDict", "named", "data"):
        return [name, rest[0], [_built(node, samples) for node in rest[1:]]]
    if name == "tuple":
        return [name, [_built(node, samples) for node in rest]]
    if name == "list":  # of any length: the kinds that it holds
        return [name, sorted({json.dumps(_built(node, samples)) for node in rest})]
    return "float" if name == "nan" else name


@dataclass(frozen=True)
class First:
    """The first batch that the trainer made, as far as it is needed later."""

    key: Key
    text: str
    """structure, dtypes and shapes"""
    digest: str
    """of all bytes"""
    size_bytes: int
    """that it takes as a payload, and so the size of a buffer; at least 1"""
    boxes: Any
    """where images were cut: the boxes of its leaves"""
    types: Any
    """kinds of containers that a batch may be made of"""

    @classmethod
    def of(cls, key: Key, made: Any, *, tiled: bool) -> First:
        """What is to be remembered of a batch. Raises `UsageError` for one that cannot be sent."""
        batch, boxes = made if tiled else (made, None)
        encoded = encode(batch)
        return cls(
            key=key,
            text=json.dumps(encoded.fields, sort_keys=True),
            digest=encoded.digest(),
            size_bytes=max(1, encoded.size_bytes),
            boxes=boxes,
            types=types_in(batch),
        )

    def same(self, other: First) -> bool:
        """Whether two are equal, byte for byte."""
        return (self.text, self.digest) == (other.text, other.digest)

    def verdict(self, again: First, helper: str, differences: list[str]) -> str:
        """What to say of a helper that makes another batch of the same key.

        `again` is the same batch made once more here; `differences` are those of versions and machines.
        """
        which = f"batch {self.key.batch} of epoch {self.key.epoch}"
        if not self.same(again):
            return (
                f"{which} differs each time it is made, in this process as well: the data set or its "
                "transform is not a function of (seed, epoch, sample), so the stream of batches cannot be "
                "repeated; draw only from torch's, numpy's and Python's global generators, and keep no state"
            )
        why = (
            f"what differs there: {'; '.join(differences)}"
            if differences
            else "no version differs, so look for files or settings that do"
        )
        return f"{helper} makes other bytes of {which} than this process: {why}. Training goes on with both"
