"""Arrays as JSON columns, and figures as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fivefold.introspect.tables import Numbers

__all__ = ["bytes_text", "column", "plain", "rounded", "seconds_text", "share_text"]

_DIGITS = 4


def column(values: NDArray[Any]) -> Numbers:
    """Rounded to four digits; None where a number is unknown.

    >>> column(np.array([0.123456, 12345.6, np.nan, 0.0]))
    [0.1235, 12350, None, 0]
    """
    values = np.asarray(values, float)
    known = np.isfinite(values)
    with np.errstate(divide="ignore", invalid="ignore"):
        exponent = np.where(known & (values != 0), np.floor(np.log10(np.abs(values))), 0)
    places = (_DIGITS - 1 - exponent).astype(int)
    small, large = 10.0 ** np.clip(places, 0, 300), 10.0 ** np.clip(-places, 0, 300)
    # Dividing a whole number by a power of ten gives the double that is printed with fewest digits.
    kept = np.round(np.where(known, values, 0.0) * small / large) * large / small
    found: list[Any] = kept.tolist()
    for place in np.flatnonzero(~known):
        found[place] = None
    return [int(x) if x is not None and x == int(x) else x for x in found]


def rounded(value: float | None) -> float | None:
    """To four digits; None for what is not finite."""
    return None if value is None else column(np.array([value]))[0]


def plain(value: Any) -> Any:
    """The same as JSON can hold: numpy numbers and enumerations become plain, nan becomes None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in cast("Mapping[Any, Any]", value).items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return rounded(float(value)) if math.isfinite(float(value)) else None
    return value if value is None else str(value)


def seconds_text(seconds: float) -> str:
    """A time for people.

    >>> seconds_text(0.0123), seconds_text(3.2e-05), seconds_text(75.0), seconds_text(7300)
    ('12 ms', '32 us', '75 s', '2.0 h')
    """
    if not seconds:
        return "0 s"
    for least, scale, unit in ((3600, 3600, "h"), (1, 1, "s"), (1e-3, 1e-3, "ms")):
        if abs(seconds) >= least:
            return f"{_figure(seconds / scale)} {unit}"
    return f"{_figure(seconds / 1e-6)} us"


def bytes_text(size: float) -> str:
    """A size for people.

    >>> bytes_text(512), bytes_text(4 << 20), bytes_text(1.5 * 2**30)
    ('512 B', '4.0 MiB', '1.5 GiB')
    """
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if abs(size) >= 1 << power:
            return f"{_figure(size / (1 << power))} {unit}"
    return f"{size:.0f} B"


def share_text(share: float) -> str:
    """A share for people.

    >>> share_text(0.312), share_text(0.004), share_text(0.00004)
    ('31 %', '0.4 %', '0.0 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1f} %"


def _figure(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 9.95 else f"{value:.0f}"
