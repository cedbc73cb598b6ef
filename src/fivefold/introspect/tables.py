"""The tables of a report: steps, ranks, operations, arrivals, figures over time (see `shape`)."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

__all__ = [
    "Arrivals",
    "Breakdown",
    "Heat",
    "Helper",
    "Kind",
    "LateOperation",
    "Numbers",
    "Offload",
    "Operation",
    "Quantiles",
    "RankSeries",
    "RankTable",
    "Series",
    "Supply",
    "Timeline",
]

Numbers = list[float | None]
"""a column; None is unknown"""
Kind = Literal["phase", "exposed", "other"]


class Breakdown(TypedDict):
    """Where a steady step goes, mean over ranks; parts add up to it. `Steady.step_s` is of the slowest."""

    part: str
    """phase (its computing), or tag (exposed communication), or "other" (in no phase)"""
    kind: Kind
    seconds: float
    """per step, mean over ranks"""
    share: float
    least_s: float
    """of the rank that has least; of exposed communication that is the part nobody waits for others in"""
    most_s: float
    most_rank: int
    hidden_s: float | None
    """of tags: communication beside computing, per step, mean over ranks"""
    bytes: float | None
    """of tags: per step, mean over ranks"""
    calls: float | None
    """of tags: operations per step, mean over ranks"""


class Quantiles(TypedDict):
    """Over ranks, one list per row of the timeline."""

    least: Numbers
    p25: Numbers
    median: Numbers
    p75: Numbers
    most: Numbers


class RankSeries(TypedDict):
    """One rank, a value for each row of the timeline; phases and tags that never occur are missing."""

    step_s: Numbers
    phase_s: dict[str, Numbers]
    """own time of phases, exposed communication within them included; the rest of the step is in none"""
    exposed_s: dict[str, Numbers]
    """by tag: how long the rank could do nothing else"""
    work_s: Numbers
    """the step without exposed communication"""
    rss_bytes: Numbers
    ready: Numbers
    """batches that the loader had ready, mean"""
    cpu_share: Numbers
    """processor time of the process over the step's time; 2.0 is two cores"""
    gpu_busy: Numbers


class Timeline(TypedDict):
    """Steps in order; a row is one step, or several where there are many."""

    first_step: list[int]
    steps: list[int]
    """steps in the row"""
    at_s: Numbers
    """begin, from the begin of the first row"""
    phases: list[str]
    """that occur, in the order of a step"""
    tags: list[str]
    """that occur, most exposed first"""
    ranks: dict[str, RankSeries]
    """by rank, as text: all of up to 64 ranks, beyond that those that stand out"""
    step_s: Quantiles
    work_s: Quantiles
    phase_s: dict[str, Quantiles]
    exposed_s: dict[str, Quantiles]


class Heat(TypedDict):
    """Ranks by steps. A cell of several ranks is that of the one that works longest."""

    ranks: list[list[int]]
    """first and last rank of every row of cells"""
    first_step: list[int]
    steps: list[int]
    late_s: list[Numbers]
    """by row, then by step: work longer (or shorter, negative) than the median of ranks, seconds per step"""
    work_s: list[Numbers]
    exposed_s: list[Numbers]
    """exposed communication, waiting included; of several ranks that of the one with least"""


class RankTable(TypedDict):
    """A column each, all of the same length: one entry per rank that was read. Times are per steady step."""

    rank: list[int]
    host: list[str]
    node: list[int]
    local_rank: list[int | None]
    pid: list[int | None]
    coordinates: list[str]
    """data 0, height 1"""
    state: list[str]
    step: list[int]
    phase: list[str | None]
    """the main thread is, or was last, in"""
    cores: list[str]
    """granted, such as 0-3"""
    step_s: Numbers
    work_s: Numbers
    exposed_s: Numbers
    phase_s: dict[str, Numbers]
    late_s: Numbers
    """arrival behind the median of the other ranks, at the operation of a step whose arrivals are farthest
    apart; mean over the steps that are in the rings"""
    last_share: Numbers
    """of these steps, those in which it came last"""
    cpu_share: Numbers
    run_delay_share: Numbers
    throttled_share: Numbers
    samples: Numbers
    """per step"""
    ready: Numbers
    rss_bytes: Numbers
    rss_growth_bytes: Numbers
    """per step"""
    gpu_busy: Numbers
    gpu_bytes: Numbers
    outstanding: list[bool]
    """shown in full although there are many ranks"""


class Operation(TypedDict):
    """Operations of a kind, tag, group and size (a power of two), over all ranks and the whole run."""

    operation: str
    tag: str
    group: str
    """name, or number where it has none"""
    group_size: int | None
    size_from_bytes: int
    size_to_bytes: int
    """sizes from 2**(b-1) to 2**b - 1 bytes are added up together"""
    count: int
    """calls, all ranks together"""
    bytes: int
    total_s: float
    mean_s: float
    min_s: float
    max_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    """from the histogram: right to within a factor of the square root of two"""
    exposed_s: float
    waiting_s: float | None
    """of `exposed_s`, before all ranks had come; the rest is the transfer. From single events"""
    hidden_s: float
    transfer_s: float | None
    """median time from the last rank's arrival to the end, or what comes nearest"""
    algorithm_bytes_per_s: float | None
    """None as well where the last rank to come found all parts there: no transfer was seen"""
    bus_bytes_per_s: float | None
    expected_s: float | None
    """by the calibration at start"""
    expected_ratio: float | None
    """expected over transfer: 1 is as calibrated, below 0.5 is slow; None where no transfer was seen"""


class LateOperation(TypedDict):
    """One operation with a large skew."""

    group: str
    number: int
    operation: str
    tag: str
    step: int
    size_bytes: int
    skew_s: float
    first: int
    last: int
    last_phase: str | None
    """that the last one was in when it came"""
    at_s: float


class Arrivals(TypedDict):
    """When ranks came to the operations that are still in the rings."""

    compared: int
    """operations that were found on all ranks of their group"""
    first_step: int | None
    last_step: int | None
    skew_p50_s: float | None
    skew_p90_s: float | None
    blocks: list[list[int]]
    """first and last rank of each row and column of the matrix"""
    waited_s: list[Numbers]
    """row waits for column: seconds per step"""
    late: list[LateOperation]
    """largest skews first, at most 50; of each step and group the one whose arrivals are farthest apart"""


class Series(TypedDict):
    """Over time, one value for each row of the timeline. Sums or largest values over ranks as told."""

    at_s: Numbers
    first_step: list[int]
    samples_per_s: Numbers
    """all ranks together"""
    rss_bytes: Numbers
    """largest of ranks"""
    rss_total_bytes: Numbers
    gpu_bytes: Numbers
    gpu_busy: Numbers
    """mean of ranks"""
    cpu_share: Numbers
    """mean of ranks"""
    energy_w: Numbers
    """processors of all nodes"""
    sent_bytes_per_s: Numbers
    """by all nodes together"""
    received_bytes_per_s: Numbers
    ready: Numbers
    """least of ranks"""
    loss_step: list[int]
    loss: Numbers
    metrics: dict[str, list[list[float | None]]]
    """by name: [step, value] pairs, from notes of kind metric"""
    epochs: list[dict[str, Any]]
    """lines of metrics.jsonl"""
    energy_note: str | None
    """why there is no energy"""


class Helper(TypedDict):
    """One helper: what all trainers say about it, put together, over the whole run."""

    number: int
    """its position in FIVEFOLD_HELPERS"""
    name: str
    state: str
    """absent, serving, lost, retired, refused or ended; of several trainers' words the worst"""
    why: str
    """of being lost, retired or refused"""
    trainers: list[int]
    """ranks that it was linked with"""
    connected_s: float
    """longest link with a trainer"""
    busy_share: float | None
    """of that time, it computed"""
    waited_share: float | None
    """of that time, it had no lease: the helper waits for trainers"""
    leases: int
    """answers that were used"""
    evaluated: int
    """of them, slices of a validation"""
    duplicates: int
    """answers to what another had answered already"""
    lost: int
    """leases that it did not answer, and others got"""
    failed: int
    """leases whose transform or data set raised"""
    bytes: int
    """received from it"""


class Supply(TypedDict):
    """How the loop of one trainer got its batches where there are helpers, over the whole run."""

    rank: int
    batches: int
    own: int
    """of them, made by the trainer itself"""
    empty_share: float | None
    """of them, none was ready when the loop asked"""
    waited_s: float | None
    """per batch that the loop stood still: the trainer waits for helpers"""
    occupancy: float | None
    """batches ready when the loop asked, mean; near 0 the loop waits for helpers, near depth helpers wait for
    the loop"""
    depth: float | None
    """batches that helpers may be ahead, mean"""


class Offload(TypedDict):
    """Helpers and those whom they serve; empty without helpers."""

    helpers: list[Helper]
    supply: list[Supply]
