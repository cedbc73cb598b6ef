"""How a helper serves a validator: it evaluates slices of test batches with weights that trainers send."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fivefold.errors import UsageError
from fivefold.helpers.service import check_identity
from fivefold.offload.evaluation import Evaluator
from fivefold.offload.snapshot import Packing, load
from fivefold.parallel.arithmetic import Arithmetic

if TYPE_CHECKING:
    from fivefold.helpers.link import Link
    from fivefold.wire.frames import Buffer, Message

__all__ = ["ValidatorServing"]

_KEPT = 2
"""versions of the weights that a helper keeps of each trainer"""


@dataclass
class _Weights:
    flat: Tensor
    arrived: int = 0
    """bytes"""


class ValidatorServing:
    """Serves a validator: its net computes with the weights of whoever has asked."""

    def __init__(
        self, evaluator: Evaluator, packing: Packing, identity: Mapping[str, Any], numerics: Any
    ) -> None:
        self._evaluator, self._packing, self._identity = evaluator, packing, identity
        self._numerics = numerics
        self._weights: dict[int, dict[int, _Weights]] = {}
        """by link, then by version"""
        self._loaded: tuple[int, int] | None = None
        """link and version of the weights that the net has now"""

    def identity(self) -> Mapping[str, Any]:
        """See `Serving`."""
        return self._identity

    def open(self, fields: Mapping[str, Any], link: Link) -> Mapping[str, Any]:
        """See `Serving`; refuses another net and other test data."""
        check_identity("validator", fields.get("identity") or {}, self._identity)
        self._weights[id(link)] = {}
        return {}

    def other(self, message: Message, link: Link) -> None:
        """See `Serving`: a piece of the weights of a version."""
        fields, mine = message.fields, self._weights[id(link)]
        version, offset = int(fields.get("version", -1)), int(fields.get("offset", -1))
        size = self._packing.size_bytes
        if fields.get("bytes") != size or not 0 <= offset <= size - len(message.payload):
            return  # the lease will say that its weights have not come
        if offset == 0:
            mine[version] = _Weights(self._packing.empty())
            for old in sorted(mine)[:-_KEPT]:
                del mine[old]
        if version in mine and len(message.payload):
            piece = torch.frombuffer(message.payload, dtype=torch.uint8)
            mine[version].flat[offset : offset + len(piece)].copy_(piece)
            mine[version].arrived += len(piece)

    def waits(self, fields: Mapping[str, Any], link: Link) -> bool:  # noqa: ARG002
        """See `Serving`: never, weights come before the first lease that needs them."""
        return False

    def lease(
        self, fields: Mapping[str, Any], link: Link
    ) -> tuple[Mapping[str, Any], Sequence[Buffer]]:
        """See `Serving`: the sums of a slice, float64 (batches, sums), little-endian."""
        epoch, batches = _slice(fields, len(self._evaluator.tests))
        self._load(fields.get("version"), link)
        numerics = replace(
            self._numerics, precision=fields["precision"], memory_format=fields["memory_format"]
        )
        arithmetic = Arithmetic(numerics, self._evaluator.model.mesh.device)
        with _threads(int(fields["threads"])):
            read = self._evaluator.read(epoch, batches, whole=True)
            sums = self._evaluator.alone(read, arithmetic)
        return {"sums": sums.shape[1]}, [sums.astype("<f8").tobytes()]

    def left(self, link: Link) -> None:
        """See `Serving`."""
        self._weights.pop(id(link), None)
        if self._loaded is not None and self._loaded[0] == id(link):
            self._loaded = None  # another link may get this one's id

    def _load(self, version: Any, link: Link) -> None:
        if self._loaded == (id(link), version):
            return
        weights = self._weights.get(id(link), {}).get(version)
        if weights is None or weights.arrived != self._packing.size_bytes:
            raise UsageError(f"the weights of version {version} have not come, or were damaged")
        self._loaded = None
        load(self._evaluator.model.module, self._packing.views(weights.flat))
        self._loaded = id(link), version


def _slice(fields: Mapping[str, Any], batches: int) -> tuple[int, range]:
    try:
        epoch, start, stop = (int(fields[name]) for name in ("epoch", "start", "stop"))
    except (KeyError, TypeError, ValueError):
        raise UsageError("a lease that does not say which batches of which epoch") from None
    if not (epoch >= 0 and 0 <= start < stop <= batches):
        raise UsageError(f"there are no test batches {start} to {stop}: there are {batches}")
    return epoch, range(start, stop)


@contextmanager
def _threads(wanted: int) -> Generator[None]:
    """Compute with the trainer's number of threads: how sums are split depends on it, to the last bit.

    On fewer cores they take turns, which costs little for the few hundred regions of a batch.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(wanted, 1024)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
