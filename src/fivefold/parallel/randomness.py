"""Random masks that are a function of (seed, step, node, global sample, coordinates).

The mask of a sample is the same on whichever rank the sample lands, and with any number of ranks. It comes
from a hash of the element's index in the *global* tensor, so a rank draws only its own share: no generator
state, nothing to synchronise, nothing to restore.

    index of element e of local row i  =  (origin + i) * elements_per_row + e
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["ALPHA", "alpha_drop", "drop", "key_of", "uniform", "uniform_box"]

ALPHA = -1.7580993408473766
"""what SELU saturates to: -scale * alpha (Klambauer et al. 2017, section "alpha dropout")"""

_MASK_63 = (1 << 63) - 1


def key_of(seed: int, step: int, node: str, call: int) -> int:
    """A 63-bit key for the `call`-th use of a node in one step."""
    text = struct.pack("<qqq", seed, step, call) + node.encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & _MASK_63


def uniform(shape: torch.Size, offset: int, key: int, device: torch.device) -> Tensor:
    """Numbers in [0, 1), float32, for elements `offset` onwards of a global tensor in row-major order."""
    index = torch.arange(offset, offset + shape.numel(), dtype=torch.int64, device=device)
    return _hashed(index, key).view(shape)


def uniform_box(
    origin: Sequence[int],
    shape: Sequence[int],
    sizes: Sequence[int],
    key: int,
    device: torch.device,
) -> Tensor:
    """Numbers in [0, 1), float32, for the box of `shape` that begins at `origin` in a tensor of `sizes`.

    What `uniform` gives for the whole tensor, at these coordinates.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for dim in reversed(range(len(shape))):
        start, n = origin[dim], shape[dim]
        along = torch.arange(start, start + n, dtype=torch.int64, device=device).mul_(stride)
        index = along.view(-1, *(1,) * (len(shape) - 1 - dim)) + index
        stride *= sizes[dim]
    return _hashed(index, key)


def _hashed(z: Tensor, key: int) -> Tensor:
    """SplitMix64 (Steele, Lea, Flood 2014) of key + index `z`, in place; int64 wraps as it wants."""
    z.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z.bitwise_xor_(_logical_shift(z, shift)).mul_(_signed(factor))
    z.bitwise_xor_(_logical_shift(z, 31))
    return _logical_shift(z, 40).to(torch.float32).mul_(2.0**-24)


def drop(x: Tensor, kept: Tensor, p: float, inplace: bool) -> Tensor:
    """`x` where `kept`, scaled by 1 / (1 - p), else zero; `kept` broadcasts against `x`."""
    scale = kept.to(x.dtype).div_(1.0 - p) if p < 1.0 else kept.new_zeros(kept.shape, dtype=x.dtype)
    return x.mul_(scale) if inplace else x * scale


def alpha_drop(x: Tensor, kept: Tensor, p: float, inplace: bool) -> Tensor:
    """Dropout that keeps mean and variance of self-normalising networks: dropped values become ALPHA."""
    if p >= 1.0:
        return x.zero_() if inplace else torch.zeros_like(x)
    a = ((1.0 - p) * (1.0 + p * ALPHA**2)) ** -0.5
    keep = kept.to(x.dtype)
    shift = (1.0 - keep).mul_(a * ALPHA).sub_(a * ALPHA * p)
    return x.mul_(keep * a).add_(shift) if inplace else x * (keep * a) + shift


def _logical_shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
