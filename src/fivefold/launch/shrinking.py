"""A job that goes on with fewer nodes: the same layout with fewer replicas of the net, or a plan for so many.

    data=2,height=2 on 4 ranks ── 3 are left ──> data=1,height=2 on 2 of them, or a plan for 3 of `smaller`

The batch of a step stays what it was, so each rank gets more of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.errors import PlanError, UsageError

if TYPE_CHECKING:
    from fivefold.plan import Plan

__all__ = ["Shrinking", "fitted"]


@dataclass(frozen=True)
class Shrinking:
    """What becomes of a job whose spares are used up."""

    nodes: int
    """the fewest that it may have"""
    plan: Plan | None = None
    """of the whole job; None: every rank is a replica"""
    smaller: tuple[Plan, ...] = ()
    """for fewer ranks; each is used as it is"""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UsageError(f"--min-nodes {self.nodes}: at least one node has to work")

    @property
    def replica(self) -> int:
        """How many ranks one has in the layout of the whole job."""
        layout = None if self.plan is None else self.plan.layout
        return 1 if layout is None else layout.size // layout.data

    def world(self, room: int) -> int:
        """The most ranks that can work where there is room for so many; 0 if none can."""
        fit = (plan.layout.size for plan in self.smaller if plan.layout.size <= room)
        return max(room - room % self.replica, *fit, 0)

    def environment(self, processes: int, log_dir: Path) -> dict[str, str]:
        """What so many ranks find set; their plan is written to `log_dir`."""
        from fivefold.plan import Provenance

        if self.plan is None or not _has_layout(self.plan):
            return {}
        fewer = {"layout.data": processes // self.replica}
        made = [plan for plan in self.smaller if plan.layout.size == processes]
        plan = made[0] if made else self.plan.replace(fewer, Provenance("user", "--min-nodes"))
        path = log_dir.resolve() / "plan.toml"
        plan.save(path)
        return {"FIVEFOLD_PLAN": str(path)}


def fitted(plan: Plan, files: Sequence[Path]) -> tuple[Plan, ...]:
    """The plan with what each of the files decides for fewer ranks: layout, pipeline and memory.

    All else stays, so that the run computes the same. Raises `PlanError` for a file that does not go with it.
    """
    from fivefold.plan import Provenance

    if not _has_layout(plan):
        raise UsageError(
            "--smaller-plan is for jobs with a layout: add --plan FILE or --layout; without one, every rank "
            "is a replica, and fewer will do"
        )
    found: dict[int, Plan] = {}
    for path in files:
        one = type(plan).load(path)
        size, batch = one.layout.size, one.train.batch_size
        if not size < plan.layout.size or size in found:
            other = "an earlier one does" if size in found else f"the job has {plan.layout.size}"
            raise PlanError(
                f"--smaller-plan {path} is for {size} processes, and {other}; name a plan for each number "
                "of processes below that of the job"
            )
        told = one.origin("train.batch_size").kind, plan.origin("train.batch_size").kind
        if "default" not in told and batch != plan.train.batch_size:
            raise PlanError(
                f"--smaller-plan {path} is for batches of {batch} samples, the job's are of "
                f"{plan.train.batch_size}, and stay so; make a plan for them"
            )
        sections = {"layout": one.layout, "pipeline": one.pipeline, "memory": one.memory}
        values: dict[str, object] = {
            f"{name}.{key.name}": getattr(section, key.name)
            for name, section in sections.items()
            for key in fields(section)
        }
        found[size] = plan.replace(values, Provenance("user", f"--smaller-plan {path}"))
    return tuple(found.values())


def _has_layout(plan: Plan) -> bool:
    """Whether somebody has decided on one."""
    from fivefold.plan import AXES

    return any(plan.origin(f"layout.{axis}").kind != "default" for axis in AXES)
