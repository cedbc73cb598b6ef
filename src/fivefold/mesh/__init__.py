"""The mesh: a started layout. The only place that touches torch's default process group."""

from __future__ import annotations

from fivefold.mesh.mesh import Mesh
from fivefold.mesh.ownership import Part, attach, owned, part_of
from fivefold.mesh.start import start

__all__ = ["Mesh", "Part", "attach", "owned", "part_of", "start"]
