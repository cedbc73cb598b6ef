"""What a report consists of: the shape of the JSON that `fivefold report --json` prints and the page shows.

All of it is plain data. Times are seconds, sizes bytes, rates per second, shares 0 to 1. What is unknown is
None, never nan. Numbers are rounded to four digits. "Per step" means the mean over the steps of a row.
docs/reference/report-json.md lists the same fields.

Ranks beyond 64 are told in sum: quantiles over ranks, a heat map whose rows are several ranks, and everything
in full for those ranks only that stand out (`Timeline.ranks`, `stacks`).
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from fivefold.introspect.tables import (
    Arrivals,
    Breakdown,
    Heat,
    Offload,
    Operation,
    RankTable,
    Series,
    Timeline,
)  # fmt: skip

__all__ = [
    "SHAPE",
    "Calibration",
    "Change",
    "Comparison",
    "Configuration",
    "Document",
    "Evidence",
    "FindingData",
    "Mark",
    "OneProcessFrom",
    "RunFacts",
    "Side",
    "Steady",
    "Throughput",
    "Verdict",
]

SHAPE = 1
"""version of the shape; a larger one has changed the meaning of a field"""
OneProcessFrom = Literal["measured", "estimated"]


class RunFacts(TypedDict):
    """What ran."""

    path: str
    title: str
    """name of the run's folder"""
    state: Literal["ended", "running", "failed", "killed"]
    """killed: the file says that it runs, and its process is gone or has been silent for long"""
    size: int
    """ranks that the job had"""
    read: int
    """ranks whose file could be read"""
    nodes: int
    hosts: list[str]
    per_node: int
    """most ranks on one node"""
    command: list[str]
    engine: str | None
    launcher: str | None
    backend: str | None
    device: str | None
    threads: int | None
    """per rank, most on any rank"""
    layout: dict[str, int]
    started: str | None
    """ISO 8601 with zone"""
    seconds: float
    """from the first step's begin to the last step's end"""
    steps: int
    groups: list[dict[str, Any]]
    """{index, name, ranks, backend}; of more than 64 ranks `ranks` holds the first 64"""
    clock_error_s: float
    """what the clocks of different nodes may be apart; differences below it mean nothing"""


class Verdict(TypedDict):
    """One or two sentences."""

    text: str
    level: Literal["good", "notice", "bad"]
    """good: computing fills the step; notice: something to gain; bad: it hangs, failed, or most is lost"""


class Evidence(TypedDict):
    """Where to look: a section of the document, and what of it."""

    section: str
    """key of `Document`: timeline, heat, ranks, operations, arrivals, series, configuration, stacks,
    calibration, marks, problems, breakdown, throughput, offload"""
    text: str
    """the figures that the finding rests on, in words"""
    rows: list[int]
    """rows of the section, where it has rows"""
    ranks: list[int]
    phase: str | None
    tag: str | None


class FindingData(TypedDict):
    """Something that could be better. Ordered: failures first, then by gain."""

    id: str
    """which rule found it; docs/reference/report-json.md lists them"""
    title: str
    share: float | None
    """of the step's time"""
    ranks: list[int]
    """those concerned; empty: all"""
    gain_s_per_step: float | None
    """upper bound of what a step could become shorter; None: cannot be told in time"""
    advice: str
    evidence: list[Evidence]
    figures: dict[str, Any]
    """the numbers of title and evidence, by name"""


class Steady(TypedDict):
    """The steps after warm-up, which all shares refer to."""

    first_step: int
    last_step: int
    steps: int
    step_s: float
    """mean over steps of the slowest rank's"""
    step_s_p10: float
    step_s_p50: float
    step_s_p90: float


class Mark(TypedDict):
    """Something that happened, on the axis of time."""

    kind: str
    """checkpoint, failure, recovery, hang, mismatch, helper, warning"""
    at_s: float | None
    step: int | None
    rank: int | None
    text: str
    details: dict[str, Any]
    """the note as it was recorded"""


class Throughput(TypedDict):
    """Expected and obtained."""

    samples_per_s: float | None
    samples_per_step: float | None
    one_process_samples_per_s: float | None
    one_process_from: OneProcessFrom | None
    """measured: in a run of one process; estimated: from the work of this run's ranks, as if one process did
    all of it without waiting, which makes `ratio` one that is reached at most"""
    one_process_run: str | None
    """that it was measured in, where this is known"""
    expected_samples_per_s: float | None
    """one process times ranks"""
    ratio: float | None
    """obtained over expected"""


class Calibration(TypedDict):
    """What was measured when the run started, and how links were used since."""

    curves: list[dict[str, Any]]
    """{operation, group, sizes_bytes: [...], seconds: [...], bytes_per_s: [...]}"""
    links: list[dict[str, Any]]
    """{ranks: [a, b], hosts: [a, b], latency_s, bytes_per_s}"""
    used: list[dict[str, Any]]
    """one way of a link, in the latter half of the run: {hosts: [from, to], ranks: [[...], [...]],
    bytes_per_step, in_use, bytes_per_s}; in_use is the share of the time in which something was on its way,
    bytes_per_s the speed in that time"""


class Configuration(TypedDict):
    """What was decided, and by whom."""

    plan: list[dict[str, Any]]
    """{key, value, origin}; origin begins with default, user or tuned"""
    environment: list[dict[str, Any]]
    """{name, value, ranks}; ranks is None where all have the same value"""
    versions: dict[str, str]
    placement: dict[str, Any] | None


class Document(TypedDict):
    """A report of one run."""

    shape: int
    kind: Literal["run"]
    fivefold: str
    """version that made the report"""
    made: str
    """when; ISO 8601 with zone"""
    run: RunFacts
    problems: list[str]
    """what is missing or doubtful, in words"""
    verdict: Verdict
    findings: list[FindingData]
    steady: Steady | None
    """None: no step has ended yet"""
    breakdown: list[Breakdown]
    timeline: Timeline
    heat: Heat
    ranks: RankTable
    operations: list[Operation]
    arrivals: Arrivals
    series: Series
    marks: list[Mark]
    throughput: Throughput
    offload: Offload
    calibration: Calibration
    configuration: Configuration
    stacks: dict[str, dict[str, list[list[Any]]]]
    """by rank (or "all"): by phase: [place, times seen]"""


class Side(TypedDict):
    """One of two runs that are compared."""

    title: str
    path: str
    ranks: int
    step_s: float | None
    samples_per_s: float | None
    verdict: str


class Change(TypedDict):
    """A figure of both runs; None where a run does not have it."""

    name: str
    a: float | None
    b: float | None
    change: float | None
    """b - a"""
    ratio: float | None
    """b / a"""
    unit: NotRequired[str]
    """s unless told"""


class Comparison(TypedDict):
    """Two runs side by side."""

    shape: int
    kind: Literal["comparison"]
    fivefold: str
    made: str
    verdict: Verdict
    a: Side
    b: Side
    figures: list[Change]
    """step, throughput, memory, ..."""
    phases: list[Change]
    """computing of phases per step"""
    tags: list[Change]
    """exposed communication per step"""
    only_a: list[FindingData]
    """findings of A that B does not have"""
    only_b: list[FindingData]
    operations: list[Change]
    """total time per step and rank, by operation and tag"""
    differences: list[dict[str, Any]]
    """{section, key, a, b, origin_a, origin_b}: plan, environment, versions, run, that are not equal"""
    documents: list[Document]
    """both reports"""
