"""How many processes train a net fastest on one node, with how many threads, bound to cores or not.

Every choice is started with `fivefold run`, as it will be used, and stays: ranks that are not asked wait in
the kernel. So all of them are compared in turn on one machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fivefold.bench.contender import BenchError, Contender, begun
from fivefold.plan import Plan, Provenance
from fivefold.tune.halving import ROUNDS, Trial, compared, halved, reason

__all__ = ["CHANGES", "Choice", "Found", "Row", "Running", "choices", "told", "tried"]

CHANGES: dict[str, str] = {
    "channels_last": "channels last",
    "bfloat16": "in bfloat16",
    "compile": "compiled",
    "replica": "batch statistics of each process",
    "batch": "twice the batch",
}
"""what changes results, if only how sums are rounded: shown, and chosen where that is allowed"""
_BLOCK_S, _CHECKS = 0.4, 7


@dataclass(frozen=True)
class Choice:
    """What can be chosen."""

    processes: int = 1
    threads: int = 1
    bound: bool = False
    workers: int = 0
    """per process, that prepare batches"""
    changes: tuple[str, ...] = ()
    """of `CHANGES`"""

    def __str__(self) -> str:
        bound = ", bound" if self.bound else ""
        workers = f", {self.workers} workers each" if self.workers else ""
        changes = "".join(f", {CHANGES[change]}" for change in self.changes)
        return f"{self.processes} x {self.threads}{bound}{workers}{changes}"

    def plan(self, plan: Plan, why: Provenance) -> Plan:
        """A plan in which it is chosen."""
        values: dict[str, object] = {
            "layout.data": self.processes,
            "instances.per_device": self.processes,
            "instances.threads": self.threads,
            "instances.bound": self.bound,
            "loader.workers": self.workers,
        }
        changed: dict[str, tuple[str, object]] = {
            "channels_last": ("numerics.memory_format", "channels_last"),
            "bfloat16": ("numerics.precision", "bfloat16"),
            "compile": ("parallel.compile", True),
            "replica": ("parallel.batch_norm", "replica"),
            "batch": ("train.batch_size", 2 * plan.train.batch_size),
        }
        return plan.replace(values | dict(changed[change] for change in self.changes), why)


def choices(cores: int, batch: int, *, bind: bool = True) -> Iterator[Choice]:
    """One process of all cores first; then more of fewer threads, up to one for each core.

    `bind`: whether processes can be bound to cores, which a quota in place of cores does not allow.

    >>> [str(choice) for choice in choices(2, 8)]
    ['1 x 2', '1 x 1', '2 x 1, bound', '2 x 1']
    """
    count = 1
    while count <= min(cores, batch):
        most = cores // count
        for threads in sorted({most, max(1, most // 2)}, reverse=True):
            for bound in (True, False) if count > 1 and bind else (False,):
                yield Choice(count, threads, bound)
        count = count * 2 if count * 2 <= cores or count == cores else cores


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    choice: Choice
    rate: float
    """samples per second; 0 without"""
    trials: int
    problem: str = ""


@dataclass(frozen=True)
class Found:
    """What was found; the rows are the fastest first, those that change results behind."""

    best: Choice
    rows: list[Row]
    predicted: float
    """what the best one gains over one process of all cores, by what chose it"""
    checked: list[float]
    """the same, measured afterwards"""

    @property
    def one(self) -> Row:
        """One process of all cores, as it is."""
        alone = [r for r in self.rows if r.choice == Choice(1, r.choice.threads)]
        return max(alone, key=lambda row: row.choice.threads)

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def of(cls, record: dict[str, Any]) -> Found:
        """From plain data."""
        rows = [
            Row(_choice(row["choice"]), row["rate"], row["trials"], row["problem"])
            for row in record["rows"]
        ]
        return cls(_choice(record["best"]), rows, record["predicted"], record["checked"])


def _choice(record: dict[str, Any]) -> Choice:
    return replace(Choice(**record), changes=tuple(record["changes"]))


def tried(
    plan: Plan,
    spec: dict[str, Any],
    every: Sequence[Choice],
    *,
    workers: Sequence[int],
    allowed: Sequence[str],
    seconds: float,
    folder: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> Found:
    """The fastest of some choices, the first of which is what the others are compared with.

    `plan` is that of the run, with its batch; `spec` tells the ranks what they train, see `cli.trial`.
    `workers` are tried for the best one, and so is what changes results, of which the `allowed` may be
    chosen. Raises `BenchError` if the first choice cannot be measured.
    """
    with ExitStack() as stack:
        running = Running(plan, spec, folder, stack, progress)
        ends = time.monotonic() + seconds
        first, *others = running.begun(every)
        if first.problem:
            raise BenchError(f"{first.name}: {first.problem}")
        running.keep.add(every[0])
        best = running.fastest([first, *others], ends - 0.5 * seconds)
        more = [replace(best, workers=count) for count in workers if count != best.workers]
        if more:
            best = running.fastest(
                [running.trials[best], *running.begun(more)], ends - 0.3 * seconds
            )
        changed = [
            replace(best, changes=(change,)) for change in _changes(best, plan, spec, allowed)
        ]
        running.beside([every[0], best], changed)
        rate = running.rate
        better = [choice for choice in changed if rate(choice) > rate(best)]
        useful = [name for choice in better for name in choice.changes if name in allowed]
        able = [best, *(replace(best, changes=(name,)) for name in useful)]
        if len(useful) > 1:
            able.append(replace(best, changes=tuple(useful)))
            running.beside([every[0], max(able[:-1], key=rate)], able[-1:])
        best = max(able, key=rate)
        trial = running.trials[best]
        predicted = trial.rate / first.rate
        progress(f"checking {best}")
        checked = [1.0] if trial is first else compared(trial, first, _CHECKS)
        rows = [
            Row(choice, trial.rate, len(trial.rates), trial.problem)
            for choice, trial in running.trials.items()
        ]
    rows.sort(key=lambda row: (bool(row.choice.changes), -row.rate))
    return Found(best, rows, predicted, checked)


def _changes(
    best: Choice, plan: Plan, spec: dict[str, Any], allowed: Sequence[str]
) -> Iterator[str]:
    images = "recipe" in spec or (len(spec["shape"]) in (3, 4) and not spec["integers"])
    if images and plan.numerics.memory_format != "channels_last":
        yield "channels_last"
    if plan.numerics.precision != "bfloat16":
        yield "bfloat16"
    if best.processes > 1 and plan.parallel.batch_norm != "replica":
        yield "replica"
    if "compile" in allowed and not plan.parallel.compile:  # takes a minute
        yield "compile"
    yield "batch"


class Running:
    """Ranks of choices, started once each; `stack` ends them."""

    def __init__(
        self,
        plan: Plan,
        spec: dict[str, Any],
        folder: Path,
        stack: ExitStack,
        progress: Callable[[str], None],
    ) -> None:
        self._plan, self._spec, self._folder, self._stack = plan, spec, folder, stack
        self._progress = progress
        self.trials: dict[Choice, Trial] = {}
        self.keep: set[Choice] = set()
        """whose ranks stay though others are faster"""
        self._contenders: dict[Choice, Contender] = {}
        self._step_s: dict[Choice, float] = {}

    def begun(self, choices: Sequence[Choice]) -> list[Trial]:
        """Start ranks, all at once; a trial has a problem if its ranks do not start."""
        for choice in choices:
            self._begin(choice)
        for number, choice in enumerate(choices):
            self._progress(f"starting {choice} ({number + 1} of {len(choices)})")
            self._meet(choice)
        return [self.trials[choice] for choice in choices]

    def beside(self, known: Sequence[Choice], new: Sequence[Choice]) -> None:
        """Start what is new, and measure it in turn with what is known."""
        trials = [*(self.trials[choice] for choice in known), *self.begun(new)]
        for number in range(ROUNDS):
            for trial in trials[:: -1 if number % 2 else 1]:
                self._progress(f"beside the best: {trial.name}")
                trial.measure()

    def rate(self, choice: Choice) -> float:
        """Of what was measured, in samples per second."""
        return self.trials[choice].rate

    def fastest(self, trials: Sequence[Trial], ends: float) -> Choice:
        """Which of some is the fastest; its ranks stay."""
        best = halved(
            trials,
            ends - time.monotonic(),
            self._let_go,
            lambda left, trial: self._progress(f"{left} left: {trial.name}"),
        )
        choice = self._choice_of(best)
        self.keep.add(choice)
        return choice

    def _choice_of(self, trial: Trial) -> Choice:
        return next(choice for choice, one in self.trials.items() if one is trial)

    def _begin(self, choice: Choice) -> None:
        number = len(self.trials)
        plan = choice.plan(self._plan, Provenance("tuned", "tried"))
        path = self._folder / f"plan-{number}.toml"
        plan.save(path)
        run = [sys.executable, "-m", "fivefold", "run", "-n", str(choice.processes)]
        options = ["--plan", str(path), "--log-dir", str(self._folder / f"logs-{number}")]
        threads = ["-x", f"OMP_NUM_THREADS={choice.threads}"]
        script = ["-m", "fivefold.cli.trial", json.dumps(self._spec)]
        name = f"{choice}".replace(" ", "")
        self.trials[choice] = Trial(str(choice), lambda: self._rate(choice))
        contender = begun(
            name, choice.processes, self._folder, script, launcher=[*run, *options, *threads]
        )
        self._contenders[choice] = self._stack.enter_context(contender)

    def _meet(self, choice: Choice) -> None:
        try:
            contender = self._contenders[choice].meet()
            contender.ask({"steps": 1})  # the first one is slower
            self._step_s[choice] = max(a["seconds"] for a in contender.ask({"steps": 1}))
        except BenchError as problem:
            self.trials[choice].problem = reason(problem)

    def _rate(self, choice: Choice) -> float:
        """Samples per second of a short while."""
        steps = max(1, round(_BLOCK_S / self._step_s[choice]))
        answers = self._contenders[choice].ask({"steps": steps})
        taken = max(answer["seconds"] for answer in answers)
        self._step_s[choice] = taken / steps
        return answers[0]["samples"] / taken

    def _let_go(self, trial: Trial) -> None:
        """End the ranks of a trial that is out."""
        choice = self._choice_of(trial)
        if choice not in self.keep and choice in self._contenders:
            self._contenders.pop(choice).close()


def told(found: Found, unit: str = "samples/s") -> list[str]:
    """Lines on what was chosen, and what it gains."""
    best = next(row for row in found.rows if row.choice == found.best)
    lines = [f"chosen: {found.best}: {best.rate:,.1f} {unit}"]
    if best is not found.one:
        low, high = min(found.checked), max(found.checked)
        lines.append(
            f"gain over one process: predicted {found.predicted:.2f}, measured again "
            f"{statistics.median(found.checked):.2f} ({low:.2f} to {high:.2f})"
        )
    return lines
