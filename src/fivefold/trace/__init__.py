"""Where time goes: phases of a step, usage tags of communication, and a recorder that adds them up."""

from __future__ import annotations

from fivefold.trace.phases import Phase, Tag
from fivefold.trace.recorder import Recorder, Stats, recording, span

__all__ = ["Phase", "Recorder", "Stats", "Tag", "recording", "span"]
