"""Arithmetic in GF(2**8) as of RAID-6: bytes are polynomials over GF(2) modulo x^8 + x^4 + x^3 + x^2 + 1.

Adding is exclusive or, and 2, the polynomial x, generates all elements but zero (H. P. Anvin, "The
mathematics of RAID-6"). Products by table are slow in numpy, but doubling is four passes over bytes in the
cache. So products are summed bit by bit of their coefficients c, with at most seven doublings for any number
of data D:

    sum of c_i D_i  =  S_0 + 2 (S_1 + 2 (S_2 + ...)),    S_b = sum of the D_i whose c_i has bit b
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Source", "combine", "inverse", "power", "product"]

STRIDE_BYTES = 256 * 1024
"""How much is combined at once: the sum, a spare and one source fit into the second cache of a core."""
_LOW = np.int8(0x1D)
"""x^8 modulo the polynomial"""

Source = tuple[int, NDArray[np.uint8]]
"""A coefficient of 1..255, and the bytes that it is multiplied with; they go on in zeros."""


def _powers() -> list[int]:
    powers = [1]
    while len(powers) < 255:
        double = powers[-1] << 1
        powers.append(double ^ 0x11D if double > 0xFF else double)
    return powers


_POWERS = _powers()
_LOGARITHMS = {element: exponent for exponent, element in enumerate(_POWERS)}


def power(exponent: int) -> int:
    """2 to the power of `exponent`, which may be negative."""
    return _POWERS[exponent % 255]


def product(a: int, b: int) -> int:
    """`a` times `b`."""
    return power(_LOGARITHMS[a] + _LOGARITHMS[b]) if a and b else 0


def inverse(a: int) -> int:
    """What gives 1 when multiplied with `a`, which is not zero."""
    return power(-_LOGARITHMS[a])


def combine(sources: Sequence[Source], total: NDArray[np.uint8]) -> None:
    """Write the sum of all sources, each times its coefficient, to `total`; none is longer than it."""
    bits = max((coefficient.bit_length() for coefficient, _ in sources), default=1)
    spare = np.empty(min(len(total), STRIDE_BYTES) if bits > 1 else 0, np.int8)
    for start in range(0, len(total), STRIDE_BYTES):
        stop = start + STRIDE_BYTES
        part = [(coefficient, source[start:stop]) for coefficient, source in sources]
        goal = total[start:stop]
        _sum(_having(bits - 1, part), goal)
        for bit in reversed(range(bits - 1)):
            _double(goal, spare[: len(goal)])
            _add(_having(bit, part), goal)


def _having(bit: int, sources: Sequence[Source]) -> list[NDArray[np.uint8]]:
    return [source for coefficient, source in sources if coefficient >> bit & 1]


def _sum(sources: Sequence[NDArray[np.uint8]], total: NDArray[np.uint8]) -> None:
    whole = [source for source in sources if len(source) == len(total)]
    if len(whole) >= 2:
        np.bitwise_xor(whole[0], whole[1], out=total)
    elif whole:
        total[:] = whole[0]
    else:
        total[:] = 0
    _add(whole[2:], total)
    _add([source for source in sources if len(source) < len(total)], total)


def _add(sources: Sequence[NDArray[np.uint8]], total: NDArray[np.uint8]) -> None:
    for source in sources:
        head = total[: len(source)]
        np.bitwise_xor(head, source, out=head)


def _double(total: NDArray[np.uint8], spare: NDArray[np.int8]) -> None:
    signed = total.view(np.int8)
    np.right_shift(signed, 7, out=spare)  # all ones where a bit will be shifted out
    np.bitwise_and(spare, _LOW, out=spare)
    np.add(signed, signed, out=signed)
    np.bitwise_xor(signed, spare, out=signed)
