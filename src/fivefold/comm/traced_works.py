"""Works of torch's own groups, whose ends the trace is told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fivefold.comm.gpu_times import GpuTimes
from fivefold.comm.unwaited import unwaited
from fivefold.trace.trace import Trace

__all__ = ["TracedWork"]

_now = time.monotonic_ns


class TracedWork(dist.Work):
    """A work as it is, for operations that the trace knows as `events`.

    Its end is when somebody who waits has waited, or finds it complete. Where somebody takes its future
    instead, it is when that is set.
    """

    def __init__(
        self, inner: Any, trace: Trace, events: Sequence[int], gpu: GpuTimes | None = None,
        futures: list[Any] | None = None,
    ) -> None:  # fmt: skip
        """`futures`: where those are kept whose callbacks may be under way."""
        super().__init__()
        self._futures = futures
        self._inner, self._trace, self._events, self._gpu = inner, trace, events, gpu
        self._blocked_ns = 0
        self._open = True
        self._future: Any = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """As torch's, measured: on a GPU, how long the stream stands still."""
        if not self._open:
            return self._inner.wait(timeout) if timeout else self._inner.wait()
        mark = None if self._gpu is None else self._gpu.mark()
        begun = _now()
        done = self._inner.wait(timeout) if timeout else self._inner.wait()
        self._blocked_ns += _now() - begun
        if self._gpu is not None and mark is not None:
            self._open = False
            self._gpu.waited(self._events, mark)
        else:
            self._end()
        return bool(done)

    def synchronize(self) -> None:
        """As torch's."""
        begun = _now()
        self._inner.synchronize()
        self._blocked_ns += _now() - begun
        if self._gpu is None:
            self._end()

    def is_completed(self) -> bool:
        """As torch's."""
        done = bool(self._inner.is_completed())
        if done and self._gpu is None and self._future is None:
            self._end()
        return done

    def get_future(self) -> Any:
        """As torch's; on CPUs, the trace is told when it is set."""
        if self._future is None:
            self._future = self._inner.get_future()
            if self._open and self._gpu is None:
                self._watch()
        return self._future

    def _watch(self) -> None:
        self._open = False
        events, watched = self._events, unwaited(self._trace)
        for event in events:
            watched.watch(event)

        def ended(_: Any) -> None:
            now = _now()
            for event in events:
                watched.ended(event, now)

        self._future.add_done_callback(ended)
        if self._futures is not None:
            self._futures[:] = [future for future in self._futures if not future.done()]
            self._futures.append(self._future)

    def _end(self) -> None:
        if self._open:
            self._open = False
            for event in self._events[:-1]:
                self._trace.ended(event, 0)
            # Several that were begun as one are waited for once.
            self._trace.ended(self._events[-1], self._blocked_ns)

    def __del__(self) -> None:
        # Nobody will wait for it any more: left open, it would look like a hang.
        if getattr(self, "_open", False) and self._gpu is None:
            self._end()

    def is_success(self) -> bool:
        """As torch's."""
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        """As torch's."""
        return self._inner.exception()

    def result(self) -> Any:
        """As torch's."""
        return self._inner.result()

    def source_rank(self) -> int:
        """As torch's."""
        return int(self._inner._source_rank())  # noqa: SLF001

    _source_rank = source_rank

    def block_current_stream(self) -> None:
        """As torch's."""
        self._inner.block_current_stream()

    def get_future_result(self) -> torch.futures.Future[Any]:
        """As torch's."""
        return self._inner.get_future_result()

    def _get_op_type(self) -> Any:
        return self._inner._get_op_type()  # noqa: SLF001

    def _get_duration(self) -> float:
        return float(self._inner._get_duration())  # noqa: SLF001
