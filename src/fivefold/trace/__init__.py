"""Where time goes: phases of a step, usage tags of communication, a recorder that adds them up, and the
trace of a process, a file that keeps them.
"""

from __future__ import annotations

from fivefold.trace.current import active
from fivefold.trace.figures import StepFigures
from fivefold.trace.phases import Phase, Tag
from fivefold.trace.recorder import Recorder, Stats, recording, span

__all__ = ["Phase", "Recorder", "Stats", "StepFigures", "Tag", "active", "recording", "span"]
