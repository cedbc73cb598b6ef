"""Search for a plan: candidates, what each would take and need, and the best of them."""

from __future__ import annotations

from fivefold.tune.candidates import Candidate, candidates
from fivefold.tune.machine import this_machine
from fivefold.tune.measure import Measured, measuring
from fivefold.tune.need import OPTIMIZERS
from fivefold.tune.predict import Case, Prediction, StepTime
from fivefold.tune.report import Question, nothing_fits, plan_of, reasons, rows
from fivefold.tune.search import SearchResult, search
from fivefold.tune.subject import Subject

__all__ = [
    "OPTIMIZERS",
    "Candidate",
    "Case",
    "Measured",
    "Prediction",
    "Question",
    "SearchResult",
    "StepTime",
    "Subject",
    "candidates",
    "measuring",
    "nothing_fits",
    "plan_of",
    "reasons",
    "rows",
    "search",
    "this_machine",
]
