"""Tensors whose numbers are read when something is computed with them.

    image = Unread(read, [range(1), range(3), range(90_000), range(70_000)], torch.uint8)
    tile = image[..., :512, :512]       # reads nothing
    tile.float()                        # reads its 512 x 512 pixels

Cuts, stacks and moves to another device are put off; anything else that is computed reads first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor

from fivefold.errors import UsageError
from fivefold.torch_private import NO_FUNCTION, TO_COPY, pytree, schema_of, without_memory

__all__ = ["Ranges", "Unread", "pieces"]

_PIECE = 1 << 24
"""numbers that are read at once"""

Ranges = Sequence[range]
"""along each dim of a tensor, without steps"""

aten = torch.ops.aten


class Unread(Tensor):
    """Made of what reads a box of it.

    It has no memory: `data_ptr`, and what looks past torch's operators, find none; `numpy` reads.
    """

    box: tuple[range, ...]
    source: Callable[[Ranges], Tensor]
    kept: Tensor | None
    """what has been read, if something was computed with it"""

    def __new__(
        cls,
        read: Callable[[Ranges], Tensor],
        box: Ranges,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Self:
        """`read` is given ranges within `box`, and returns that part, of `dtype`, on the CPU."""
        made: Self = without_memory(cls, [len(one) for one in box], dtype, device)
        made.box, made.source, made.kept = tuple(box), read, None
        return made

    def fresh(self) -> Tensor:
        """All of it, (*shape,), read again unless something was computed with it."""
        if self.kept is not None:
            return self.kept
        if not self.numel():
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        found = self.source(self.box)
        assert found.shape == self.shape and found.dtype == self.dtype, (found.shape, self.shape)
        return found.to(self.device)

    def _held(self) -> Tensor:
        if self.kept is None:
            self.kept = self.fresh()
        return self.kept

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """As of the tensor that is read."""
        return self._held().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """As of the tensor that is read."""
        return self._held().tolist()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """As of the tensor that is read."""
        return self._held().__array__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As of the tensor that is read."""
        return self._held().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """As of the tensor that is read."""
        return self._held().clone()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Without reading."""
        return f"Unread(shape={tuple(self.shape)}, dtype={self.dtype})"

    __torch_function__ = NO_FUNCTION  # pyright: ignore[reportAssignmentType]

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Put off what only chooses numbers; read for anything else."""
        put_off = _PUT_OFF.get(func)
        if put_off is not None and not _is_kept(args):
            made = put_off(*args, **(kwargs or {}))
            if made is not None:
                return made
        for number, operand in enumerate(schema_of(func).arguments):
            if operand.alias_info is not None and operand.alias_info.is_write:
                _refuse_change(
                    args[number] if number < len(args) else (kwargs or {}).get(operand.name)
                )
        read = pytree.tree_map_only(Unread, Unread._held, (args, kwargs or {}))
        return func(*read[0], **read[1])


def _refuse_change(written: object) -> None:
    """Others that were cut out of it before, or of which it was, would not see the change."""
    if isinstance(written, Unread):
        raise UsageError(
            f"a tensor {tuple(written.shape)} that is read tile by tile, as turns come to it, cannot be "
            "changed in place: change it in the data set's transform, or change its clone()"
        )


def pieces(tensor: Tensor) -> Iterator[Tensor]:
    """All of a tensor, piece by piece along its last dim but one where it has to be read."""
    if not isinstance(tensor, Unread) or tensor.kept is not None or tensor.dim() < 2:
        yield tensor
        return
    rows = tensor.shape[-2]
    step = max(_PIECE * rows // max(tensor.numel(), 1), 1)
    for start in range(0, rows, step):
        yield cast(Unread, tensor[..., start : start + step, :]).fresh()


def _is_kept(args: Any) -> bool:
    """Whether something has been read already, of which a view will do."""
    return any(one.kept is not None for one in pytree.tree_leaves(args) if isinstance(one, Unread))


def _same(tensor: Unread, *_: object) -> Unread:
    return Unread(tensor.source, tensor.box, tensor.dtype, tensor.device)


def _viewed(tensor: Unread, size: Sequence[int]) -> Unread | None:
    return _same(tensor) if tuple(size) == tuple(tensor.shape) else None


def _sliced(
    tensor: Unread, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Unread | None:
    if step != 1:
        return None
    box, at = list(tensor.box), dim % tensor.dim()
    box[at] = box[at][slice(start, end)]
    return Unread(tensor.source, box, tensor.dtype, tensor.device)


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Unread | None:
    ones = [one for one in tensors if isinstance(one, Unread)]
    first = ones[0]
    alike = all((one.box, one.dtype) == (first.box, first.dtype) for one in ones)
    if dim or len(ones) < len(tensors) or not alike:
        return None

    def read(box: Ranges) -> Tensor:
        return torch.stack([one.source(box[1:]) for one in ones[box[0].start : box[0].stop]])

    return Unread(read, [range(len(ones)), *first.box], first.dtype, first.device)


def _moved(tensor: Unread, **how: Any) -> Unread | None:
    device = how.pop("device", None)
    if device is None or any(
        how.get(key) is not None for key in ("dtype", "layout", "memory_format")
    ):
        return None
    return Unread(tensor.source, tensor.box, tensor.dtype, device)


def _new(func: Any) -> Callable[..., Tensor]:
    """Of the kind of a tensor, whatever is in it."""

    def made(tensor: Unread, *args: Any, **how: Any) -> Tensor:
        return func(torch.empty((), dtype=tensor.dtype, device=tensor.device), *args, **how)

    return made


_NEW = (aten.new_empty, aten.new_zeros, aten.new_ones, aten.new_full)
_PUT_OFF: dict[Any, Callable[..., Tensor | None]] = {
    **{func.default: _new(func.default) for func in _NEW},
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.view.default: _viewed,
    aten.slice.Tensor: _sliced,
    aten.stack.default: _stacked,
    TO_COPY: _moved,
}
