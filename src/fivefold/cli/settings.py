"""What `--layout` and `--set` change of a plan, the same for every command that has them."""

from __future__ import annotations

from collections.abc import Sequence

from fivefold.plan import AXES, Layout, Plan, Provenance, parse_setting

__all__ = ["changed"]


def changed(plan: Plan, layout: str | None, settings: Sequence[str]) -> Plan:
    """The plan with `layout`, such as `data=2,height=2`, and with `settings`, such as `tiles.fuse=never`.

    Raises `PlanError` for what is no layout, an unknown key or a value that cannot be.
    """
    if layout is not None:
        sizes = Layout.parse(layout)
        values: dict[str, object] = {f"layout.{axis}": getattr(sizes, axis) for axis in AXES}
        plan = plan.replace(values, Provenance("user", "--layout"))
    for setting in settings:
        plan = plan.replace(dict([parse_setting(setting)]), Provenance("user", "--set"))
    return plan
