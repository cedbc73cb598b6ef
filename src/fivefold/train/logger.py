"""`Logger`: figures of training steps, over all ranks, given to writers by the first while the run goes on.

    step(n, loss) ──► own sums ──every n-th step──► summed over ranks ──when it has come──► rank 0 writes
                      phases, waiting, means        beside the next steps

Ranks send one message of a few hundred bytes, for which nobody waits; no loss is read before that.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from fivefold import comm
from fivefold.closing import Closing
from fivefold.errors import FivefoldError, UsageError, warn
from fivefold.mesh.groups import cpu_groups
from fivefold.parallel import ParallelModel
from fivefold.trace import Phase, Recorder, StepFigures, Tag, active, recording
from fivefold.trace.counters import Resident

__all__ = ["LogWriter", "Logger"]

_Number = float | Tensor
_PHASES, _TAGS = tuple(Phase), tuple(Tag)
_SECONDS, _EXPOSED, _RSS, _GPU, _COLUMNS = range(5)
"""of the table that has a row for each rank"""


class LogWriter(ABC):
    """Takes figures to where people look at them. Only the first rank uses it."""

    def open(self) -> None:  # noqa: B027 - not every writer has to
        """Before the first step: find out whether figures can be written. What it raises ends the run."""

    @abstractmethod
    def __call__(self, figures: StepFigures) -> object:
        """Write them. Where that fails, a warning says so, this writer gets no more, and training goes on."""

    def close(self, *, failed: bool = False) -> None:  # noqa: B027
        """The run is over; `failed`: by an error."""


@dataclass(frozen=True)
class _Record:
    """Of some steps: this rank's share, and the sums of all ranks when they have come."""

    step: int
    steps: int
    timed: int
    """steps that the seconds are of: not the first of the run, which plans and records"""
    samples: int
    """of the timed steps"""
    traced: bool
    losses: list[tuple[_Number, int]]
    values: Mapping[str, _Number]
    means: tuple[str, ...]
    sums: comm.Pending

    def has_come(self) -> bool:
        """Whether nobody has to wait for the sums."""
        return self.sums.work is None or self.sums.work.is_completed()


class Logger(Closing):
    """Figures of training steps, of all ranks together: for TensorBoard, W&B, MLflow, a bar, any function.

    Making one, and every method, is collective over all ranks of the mesh; the first alone writes. A `with`
    block, or `close`, writes the last figures.

    Args:
        model: what `parallelize` returned.
        writers: called with a `fivefold.trace.StepFigures` when it is due: writers of
            `fivefold.integrations`, what `fivefold.progress` returned, or a function.
        every: figures are written after steps whose number it divides, as means since those before.

    Raises:
        UsageError: `every` is below 1, or a writer cannot write; on all ranks.
    """

    def __init__(
        self, model: ParallelModel, *writers: Callable[[StepFigures], object], every: int = 10
    ) -> None:
        if every < 1:
            raise UsageError(f"every is {every}; it must be 1 or more")
        self._model, self._mesh, self._every = model, model.mesh, every
        self._writers = [*writers] if self._mesh.rank == 0 and self._mesh.role == "trainer" else []
        self._mesh.agreement.check_problem(self._open())
        timeout_s = self._mesh.plan.comm.timeout_s
        # Of its own, and on processors: messages are under way while those of steps come and go.
        self._group = cpu_groups(None, 1, timeout_s)[0] if self._mesh.size > 1 else None
        self._spent = _Spent()
        self._resident = Resident(Path("/"))
        self._record: _Record | None = None
        self._names: tuple[str, ...] | None = None
        self._means: dict[str, tuple[float, float]] = {}
        self._losses: list[tuple[_Number, int]] = []
        self._values: Mapping[str, _Number] = {}
        self._step = self._steps = self._timed = 0
        self._seen = model.samples
        self._begun: tuple[float, int] | None = None
        """when timing began, and how many samples there had been"""
        self._closed = False

    def _open(self) -> FivefoldError | None:
        for writer in self._writers:
            if isinstance(writer, LogWriter):
                try:
                    writer.open()
                except Exception as problem:  # noqa: BLE001 - told on all ranks
                    return UsageError(f"{_name(writer)} cannot write figures: {_told(problem)}")
        return None

    def step(
        self,
        step: int,
        loss: _Number | None = None,
        *,
        means: Mapping[str, tuple[_Number, _Number]] | None = None,
        **values: _Number,
    ) -> None:
        """After every step of the optimiser.

        Args:
            step: its number, from 1.
            loss: what `model.step` returned: the loss of the whole batch, the same on all ranks.
            means: by name, a sum over this rank's part and how many it has summed up, such as samples that it
                got right, and samples. Sums and counts are summed over steps and ranks, and divided then: the
                mean of all, however uneven the parts are. All ranks give the same names; one without a part
                gives (0, 0).
            values: other numbers by name. The first rank's are written as they are.

        Raises:
            UsageError: a name of `means` is new, or ranks have different ones.
        """
        samples, self._seen = self._model.samples - self._seen, self._model.samples
        self._step, self._steps = step, self._steps + 1
        if self._begun is None:
            self._spent.take()
            self._begin()
        else:
            self._timed += 1
        if self._writers and loss is not None:
            self._losses.append((loss.detach() if isinstance(loss, Tensor) else loss, samples or 1))
        for name, (total, count) in (means or {}).items():
            before = self._means.get(name, (0.0, 0.0))
            self._means[name] = before[0] + float(total), before[1] + float(count)
        self._values = values
        if step % self._every == 0:
            self._start()
        elif self._record is not None and self._record.has_come():
            self._finish()

    def _begin(self) -> None:
        self._begun, self._timed = (time.perf_counter(), self._model.samples), 0

    def _start(self) -> None:
        """Begin a record: what this rank has goes to the others."""
        assert self._begun is not None
        seconds = time.perf_counter() - self._begun[0]
        samples = self._model.samples - self._begun[1]
        traced, phases, exposed = self._spent.take()
        timed = self._timed
        self._begin()  # on all ranks alike: writing belongs to the next steps
        self._finish()
        means = self._own_means()
        size, at = self._mesh.size * _COLUMNS, self._mesh.rank * _COLUMNS
        gpu = (
            torch.cuda.max_memory_allocated(device)
            if (device := self._mesh.device).type == "cuda"
            else 0
        )
        own = torch.zeros(size + len(phases) + len(exposed) + len(means), dtype=torch.float64)
        numbers = own.numpy()
        numbers[at : at + _COLUMNS] = seconds, sum(exposed), self._resident.read() or 0, gpu
        numbers[size:] = *phases, *exposed, *means
        self._record = _Record(
            self._step, self._steps, timed, samples, traced, self._losses,
            {n: v.detach().clone() if isinstance(v, Tensor) else v for n, v in self._values.items()},
            self._names or (), self._summed(own),
        )  # fmt: skip
        self._steps, self._losses = 0, []

    def _summed(self, own: Tensor) -> comm.Pending:
        if self._group is None:
            return comm.Pending(own, None, self._mesh.group("data"), Tag.CONTROL)
        return comm.start_all_reduce(own, self._group, Tag.CONTROL)

    def _own_means(self) -> list[float]:
        """Sums and counts in an order that all ranks have: that of the names in the first record."""
        found, self._means = self._means, {}
        if self._names is None:
            self._names = tuple(sorted(found))
            names = ", ".join(self._names) or "none"
            self._mesh.agreement.check([(names, "the names of means")], "the means of Logger.step")
        if new := sorted(found.keys() - set(self._names)):
            raise UsageError(
                f"the first record of the logger had no mean {new[0]!r}: give all means from the first step "
                "on, as (0, 0) where there is nothing yet"
            )
        return [number for name in self._names for number in found.get(name, (0.0, 0.0))]

    def _finish(self) -> None:
        """Write the record under way."""
        record, self._record = self._record, None
        if record is None:
            return
        sums = record.sums.wait()
        if not self._writers:
            return
        figures = _figures(record, sums.tolist(), self._mesh.size)
        for writer in [*self._writers]:
            try:
                writer(figures)
            except Exception as problem:  # noqa: BLE001 - training goes on
                self._writers.remove(writer)
                warn(
                    f"from step {figures.step} on, {_name(writer)} gets no figures, for it failed: "
                    f"{_told(problem)}. Training goes on"
                )

    def close(self) -> None:
        """Write what is left. Calling it again does nothing."""
        if not self._closed:
            if self._steps:
                self._start()
            self._end()

    def _end(self, *, failed: bool = False) -> None:
        self._closed = True
        try:
            if not failed:
                self._finish()
        finally:
            self._spent.close()
            self._resident.close()
            for writer in self._writers:
                if isinstance(writer, LogWriter):
                    try:
                        writer.close(failed=failed)
                    except Exception as problem:  # noqa: BLE001 - the run itself went well
                        warn(f"{_name(writer)} did not end well: {_told(problem)}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """`close`; after an error, which other ranks may not have, wait for nobody."""
        if kind is None:
            self.close()
        elif not self._closed:
            self._end(failed=not issubclass(kind, SystemExit))


class _Spent:
    """Seconds of this rank by phase; of a rank that writes a trace also those that it waited, by tag."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._recorder = self._held.enter_context(recording(Recorder()))
        self._before = self._now()

    def _now(self) -> tuple[bool, list[float]]:
        if (trace := active()) is None:
            return False, [*map(self._recorder.total_s, _PHASES), *(0.0 for _ in _TAGS)]
        row = trace.totals()
        phases, tags = row["phase_ns"][: len(_PHASES)], row["tag_blocked_ns"][: len(_TAGS)]
        return True, [ns / 1e9 for ns in (*phases, *tags)]

    def take(self) -> tuple[bool, list[float], list[float]]:
        """Whether a trace says it; by phase; by tag: since the last time."""
        (before, then), (traced, now) = self._before, self._now()
        self._before = traced, now
        if before != traced:  # a trace begins, or has ended
            then = now
        spent = [b - a for a, b in zip(then, now, strict=True)]
        return traced, spent[: len(_PHASES)], spent[len(_PHASES) :]

    def close(self) -> None:
        """Let the recorder go on that was there before."""
        self._held.close()


def _figures(record: _Record, sums: list[float], size: int) -> StepFigures:
    """What the sums of all ranks come to."""
    rows = [sums[at : at + _COLUMNS] for at in range(0, size * _COLUMNS, _COLUMNS)]
    rest = sums[size * _COLUMNS :]
    own, means = rest[: len(_PHASES) + len(_TAGS)], rest[len(_PHASES) + len(_TAGS) :]
    per_step = [seconds / size / max(record.timed, 1) for seconds in own]
    slowest_s = max(row[_SECONDS] for row in rows)
    values = {name: float(value) for name, value in record.values.items()}
    for name, total, count in zip(record.means, means[::2], means[1::2], strict=True):
        if count:
            values[name] = total / count
    timed = record.timed > 0
    traced = timed and record.traced
    late_rank, late_s = _latest([row[_SECONDS] - row[_EXPOSED] for row in rows])
    weight = sum(samples for _, samples in record.losses)
    return StepFigures(
        step=record.step,
        steps=record.steps,
        loss=sum(float(x) * n for x, n in record.losses) / weight if weight else None,
        step_s=slowest_s / record.timed if timed else None,
        samples_per_s=record.samples / slowest_s if timed and record.samples else None,
        phases_s={p.value: s for p, s in zip(_PHASES, per_step, strict=False) if s},
        exposed_s={t.value: s for t, s in zip(_TAGS, per_step[len(_PHASES) :], strict=True) if s},
        exposed_share=sum(r[_EXPOSED] for r in rows) / sum(r[_SECONDS] for r in rows) if traced else None,
        late_rank=late_rank if traced and size > 1 else None,
        late_s=late_s / record.timed if traced and size > 1 else None,
        rss_bytes=int(max(row[_RSS] for row in rows)) or None,
        gpu_bytes=int(max(row[_GPU] for row in rows)) or None,
        values=values,
    )  # fmt: skip


def _latest(work_s: list[float]) -> tuple[int, float]:
    """Who worked longest, and how much longer than the median of the others, as reports have it."""
    rank = max(range(len(work_s)), key=work_s.__getitem__)
    others = work_s[:rank] + work_s[rank + 1 :]
    return rank, work_s[rank] - statistics.median(others) if others else 0.0


def _name(writer: object) -> str:
    return getattr(writer, "__name__", type(writer).__name__)


def _told(problem: Exception) -> str:
    return str(problem) or type(problem).__name__
