"""Operations under way, as torch.distributed knows them."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.arena.native import KINDS, Call, CallReport, core
from fivefold.comm.core import AskedMessage, Core, explain
from fivefold.comm.events import event
from fivefold.comm.unwaited import unwaited
from fivefold.trace.trace import Trace

__all__ = ["Completer", "Finished", "MessageWork", "OpWork", "SeveralWorks"]

_FOREVER_S = -1.0


class Completer:
    """Sets the futures of works, in the order in which they were asked for, in a thread of its own.

    Only works whose future is asked for pass through here: waiting needs no thread.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[_Work, torch.futures.Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def future_of(self, work: _Work) -> torch.futures.Future[Any]:
        """A future that is set when `work` is done."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fivefold-futures", daemon=True)
            self._thread.start()
        self._waiting.put((work, future))
        return future

    def is_here(self) -> bool:
        """Whether the caller is the thread that sets futures."""
        return threading.current_thread() is self._thread

    def close(self) -> None:
        """Wait until all futures are set."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            work, future = item
            try:
                work.wait()
            except Exception as problem:  # noqa: BLE001 - belongs to whoever waits for the future
                future.set_exception(problem)
            else:
                future.set_result(work.result())
            del item, work, future


class _Work(dist.Work):
    """What all works have: results, and a future where one is asked for."""

    def __init__(self, results: Sequence[Tensor], completer: Completer | None) -> None:
        super().__init__()
        self._results = list(results)
        self._completer = completer
        self._future: torch.futures.Future[Any] | None = None

    def result(self) -> list[Tensor]:
        """The tensors that hold the result."""
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result, set by a thread."""
        if self._future is None:
            if self._completer is None:
                self._future = torch.futures.Future()
                self._future.set_result(self._results)
            else:
                self._future = self._completer.future_of(self)
        return self._future

    def synchronize(self) -> None:
        """The same as `wait`, on CPUs."""
        self.wait()


class Finished(_Work):
    """A work that was done before its caller saw it."""

    def __init__(self, results: Sequence[Tensor] = ()) -> None:
        super().__init__(results, None)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Yes."""
        return True

    def is_success(self) -> bool:
        """Yes."""
        return True

    def exception(self) -> None:
        """None."""


class _Operation(Protocol):
    """What the core has under way."""

    def wait(self, timeout_s: float, report: CallReport) -> int:
        """Block until it has ended, or for `timeout_s` (below 0: as long as it may take); its status."""
        ...

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def free(self) -> None:
        """Give it back; it is not asked again."""
        ...

    def explained(self, report: CallReport) -> Exception:
        """What a failure says to people."""
        ...

    def event(self, name: str) -> AbstractContextManager[object]:
        """A range of torch.profiler for what is done with it: `name`, and what it is."""
        ...


class _Pending(_Work):
    """A work of the core that ends later. `kept` must live until then; `after` runs once it has ended.

    It is in `under_way` until somebody finds it ended: its tensors live until then, even if it is dropped.
    """

    def __init__(
        self,
        operation: _Operation,
        *,
        completer: Completer,
        results: Sequence[Tensor],
        kept: object,
        after: Callable[[], None] | None,
        under_way: dict[Any, None],
    ) -> None:
        super().__init__(results, completer)
        self._operation = operation
        self._under_way = under_way
        under_way[self] = None
        self._kept, self._after = kept, after
        self._error: Exception | None = None
        self._ending = threading.Lock()
        self._ended = False
        self._trace: Trace | None = None
        self._issued = self._blocked_ns = 0

    def recorded(self, trace: Trace, issued: int) -> None:
        """Tell `trace` of the end of what it knows as `issued`."""
        self._trace, self._issued = trace, issued

    @property
    def ended(self) -> bool:
        """Whether somebody has found it done, by waiting or asking. Costs nothing."""
        return self._ended

    def get_future(self) -> torch.futures.Future[Any]:
        """A future of the result, set by a thread."""
        trace = self._trace
        if trace is not None and self._future is None:
            unwaited(trace).watch(self._issued)
        return super().get_future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until done; a `timeout` above 0 bounds this wait alone. Raises `RuntimeError`."""
        if not self._ended:
            limit_s = timeout.total_seconds()
            with self._ending:
                if not self._ended:
                    self._end(limit_s if limit_s > 0 else _FOREVER_S)
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Whether the result, or an error, is there."""
        if self._ended:
            return True
        if not self._ending.acquire(blocking=False):
            return False  # another thread waits, and will free what we would ask
        try:
            if not self._ended and self._operation.done():
                self._end(_FOREVER_S)
        finally:
            self._ending.release()
        return self._ended

    def is_success(self) -> bool:
        """Whether the result is there."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """What went wrong, if something did."""
        return self._error

    def _end(self, timeout_s: float) -> None:
        report = CallReport()
        begun = time.monotonic_ns()
        with self._operation.event("wait"):
            status = self._operation.wait(timeout_s, report)
        self._blocked_ns += time.monotonic_ns() - begun
        if status and not self._operation.done():  # only this wait has ended
            raise self._operation.explained(report)
        self._operation.free()
        if status:
            self._error = self._operation.explained(report)
        elif self._after is not None:
            self._after()
        self._kept = self._after = None
        self._ended = True
        self._under_way.pop(self, None)
        trace, self._trace = self._trace, None
        if trace is None:
            return
        started_ns = int(report.started_ns)
        if self._completer is not None and self._completer.is_here():
            unwaited(trace).ended(self._issued, time.monotonic_ns(), started_ns)
        else:
            trace.ended(self._issued, self._blocked_ns, started_ns)


class _Collective:
    """Of a group of the core."""

    def __init__(self, group: Core, call: Call, size_bytes: int) -> None:
        self._group, self._call, self._size_bytes = group, call, size_bytes
        with self.event("start"):
            self._handle = core().ff_post(group.pointer, ctypes.byref(call))
        if not self._handle:
            raise MemoryError("no memory for a collective")

    def wait(self, timeout_s: float, report: CallReport) -> int:
        group = self._group.pointer
        return int(core().ff_wait(group, self._handle, timeout_s, ctypes.byref(report)))

    def done(self) -> bool:
        return bool(core().ff_op_done(self._handle))

    def free(self) -> None:
        core().ff_op_free(self._group.pointer, self._handle)

    def explained(self, report: CallReport) -> Exception:
        return explain(self._group, report, self._call)

    def event(self, name: str) -> AbstractContextManager[object]:
        return event(f"{name} {KINDS[self._call.kind]}", self._size_bytes, self._group.tag)


class OpWork(_Pending):
    """A collective under way."""

    def __init__(
        self, group: Core, call: Call, size_bytes: int, *, completer: Completer, results: Sequence[Tensor],
        kept: object, after: Callable[[], None] | None, under_way: dict[OpWork, None],
    ) -> None:  # fmt: skip
        operation = _Collective(group, call, size_bytes)
        super().__init__(
            operation,
            completer=completer,
            results=results,
            kept=kept,
            after=after,
            under_way=under_way,
        )


class _Message:
    """Between two ranks of a group of the core."""

    def __init__(
        self, group: Core, handle: int, peer: int, tag: int, tensor: Tensor, *, sends: bool
    ) -> None:
        if not handle:
            raise MemoryError("no memory for a message")
        self._group, self._handle, self._sends = group, handle, sends
        self._tag, self._dtype, self._size_bytes = tag, tensor.dtype, tensor.nbytes
        self.peer = peer

    def wait(self, timeout_s: float, report: CallReport) -> int:
        group = self._group.pointer
        return int(
            self._group.library.ff_message_wait(
                group, self._handle, timeout_s, ctypes.byref(report)
            )
        )

    def done(self) -> bool:
        return bool(self._group.library.ff_message_done(self._group.pointer, self._handle))

    def free(self) -> None:
        self.peer = int(self._group.library.ff_message_peer(self._handle))
        self._group.library.ff_message_free(self._group.pointer, self._handle)

    def explained(self, report: CallReport) -> Exception:
        return explain(self._group, report, AskedMessage(self.peer, self._tag, self._dtype))

    def event(self, name: str) -> AbstractContextManager[object]:
        what = "send" if self._sends else "receive"
        return event(f"{name} {what}", self._size_bytes, self._group.tag)


class MessageWork(_Pending):
    """A message under way, which the core knows as `handle`. `peer` -1 receives from anyone."""

    def __init__(
        self, group: Core, handle: int, tensor: Tensor, *, peer: int, tag: int, sends: bool,
        completer: Completer, after: Callable[[], None] | None, under_way: dict[MessageWork, None],
    ) -> None:  # fmt: skip
        self._message = _Message(group, handle, peer, tag, tensor, sends=sends)
        super().__init__(
            self._message, completer=completer, results=[tensor], kept=tensor, after=after,
            under_way=under_way,
        )  # fmt: skip

    def _source_rank(self) -> int:
        """Who sent it."""
        return self._message.peer


class SeveralWorks(_Work):
    """Works that are waited for together."""

    def __init__(self, works: Sequence[_Work], completer: Completer) -> None:
        super().__init__([tensor for work in works for tensor in work.result()], completer)
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for each. Raises `RuntimeError`."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        """Whether all are done."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether all have results."""
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        """The first of their errors."""
        return next(filter(None, (work.exception() for work in self._works)), None)
