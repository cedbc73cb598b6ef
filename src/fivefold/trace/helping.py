"""What helpers did for a trainer, added up since its run began: figures that its trace carries in `meta`.

A helper writes no trace: it belongs to no rank. Each trainer tells what it knows of every helper, and how
its loop was supplied; a report puts together what the trainers of a run say of the same helper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from fivefold.trace.trace import Trace

__all__ = ["STATES", "HelperFigures", "SupplyFigures", "read", "tell"]

STATES = ("absent", "serving", "lost", "retired", "refused", "ended")
"""of a helper: has not come yet; serves; was lost and may come back; was told to stop because it delays;
cannot serve this job; has ended with the job"""

T = TypeVar("T")


@dataclass(frozen=True)
class HelperFigures:
    """One helper, as one trainer sees it. Sums since the run began."""

    number: int
    """its position in FIVEFOLD_HELPERS"""
    name: str
    """for people: helper 1 (dpu01:21001)"""
    state: str = "absent"
    """one of `STATES`"""
    why: str = ""
    """of being lost, retired or refused"""
    connected_s: float = 0.0
    """linked with this trainer, all together"""
    busy_s: float = 0.0
    """computing for this trainer, as the helper measured it: reading, transforms, collating, evaluating"""
    waited_s: float = 0.0
    """had no lease of anybody before a lease of this trainer came: the helper waits for the trainer. Summed
    over trainers it is all its waiting, as busy_s is all its work; the rest of connected_s is sending"""
    leases: int = 0
    """answers that were used, batches and slices of a validation together"""
    evaluated: int = 0
    """of them, slices of a validation"""
    duplicates: int = 0
    """answers that came after another had answered the same: work that was for nothing"""
    lost: int = 0
    """leases that it did not answer, and that others got"""
    failed: int = 0
    """leases whose transform or data set raised"""
    bytes: int = 0
    """received from it, headers not counted"""


@dataclass(frozen=True)
class SupplyFigures:
    """How the loop of one trainer got its batches, all its loaders together. Sums since its run began."""

    batches: int = 0
    """handed to the loop"""
    own: int = 0
    """of them, those that the trainer made itself: the first, and whenever helpers were not fast enough"""
    empty: int = 0
    """of them, those for which the loop had to wait, since none was ready when it asked"""
    waited_s: float = 0.0
    """the loop stood still for helpers; time in which it made batches itself is not in it"""
    occupancy: float = 0.0
    """batches that were ready when the loop asked for the next, mean over `batches`. Near 0: the loop waits
    for helpers. Near `depth`: helpers wait for the loop, and could do more. It does not say for how long."""
    depth: float = 0.0
    """batches that helpers may be ahead of the loop, mean over `batches`"""


def tell(trace: Trace, helpers: Iterable[HelperFigures], supply: SupplyFigures) -> None:
    """Replace what the trace says about helpers. Takes some tenths of a millisecond: not in every step."""
    trace.update_meta(
        offload={"helpers": [asdict(helper) for helper in helpers], "supply": asdict(supply)}
    )


def read(meta: Mapping[str, Any]) -> tuple[list[HelperFigures], SupplyFigures | None]:
    """What a trace says; no helpers and None if the run had none. Fields of other versions are left out."""
    told = meta.get("offload")
    if not isinstance(told, dict):
        return [], None
    found = cast("dict[str, Any]", told)
    rows = found.get("helpers")
    helpers = [
        _of(HelperFigures, row)
        for row in (cast("list[Any]", rows) if isinstance(rows, list) else [])
        if isinstance(row, dict) and isinstance(row.get("number"), int) and "name" in row
    ]
    supply = found.get("supply")
    return helpers, _of(SupplyFigures, supply) if isinstance(supply, dict) else None


def _of(kind: type[T], told: dict[str, Any]) -> T:
    names = {field.name for field in fields(cast(Any, kind))}
    return kind(**{name: value for name, value in told.items() if name in names})
