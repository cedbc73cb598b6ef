"""`Checkpointer`: what a training script sees of checkpoints.

    ckpt = ff.Checkpointer("runs/a", mesh, model=model, optim=optim, data=data)
    for step, (x, y) in ckpt.resume(data):
        ...
        ckpt.maybe_save(step)

A step:   maybe_save ── state captured ── staged beside the next forward and backward ── written, protected,
          flushed by other threads and processes. Training waits for the staging alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sized
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from fivefold.checkpoint.compare import Comparing, check_given, given
from fivefold.checkpoint.loading import load
from fivefold.checkpoint.manifest import Manifest
from fivefold.checkpoint.members import members_of, resolved_scheme
from fivefold.checkpoint.node import RankNode
from fivefold.checkpoint.notices import Notices
from fivefold.checkpoint.opening import open_run, seen
from fivefold.checkpoint.ranks import Ranks
from fivefold.checkpoint.rhythm import Rhythm
from fivefold.checkpoint.saving import GOES_ON, Saved, Stamp
from fivefold.checkpoint.settings import settings_of
from fivefold.checkpoint.sharing import agents_share
from fivefold.checkpoint.signals import STOPPED, Signals
from fivefold.checkpoint.staging import Staging, wait_before_steps
from fivefold.checkpoint.state import State
from fivefold.checkpoint.store import LocalStore, PersistentStore
from fivefold.checkpoint.writing import Channels, Writing
from fivefold.closing import Closing
from fivefold.errors import CheckpointError, UsageError
from fivefold.launch.progress import own_progress
from fivefold.mesh import Mesh
from fivefold.mesh.duty import help_instead
from fivefold.mesh.groups import cpu_groups
from fivefold.plan import Layout
from fivefold.trace import Phase, span

__all__ = ["Checkpointer", "Resumed"]

_Batch = TypeVar("_Batch")


class Resumed(Generic[_Batch]):
    """The steps that are left of a run, by number, with their batches. See `Checkpointer.resume`."""

    def __init__(
        self, steps: Iterator[tuple[int, _Batch]], data: Iterable[_Batch], epochs: int | None
    ) -> None:
        self._steps = steps
        self.step = 0
        """the number of the one under way"""
        known = epochs is not None and hasattr(data, "upcoming")
        self.total = epochs * len(cast(Sized, data)) if epochs is not None and known else None
        """how many the run has in all; None where that is not known"""

    def __iter__(self) -> Resumed[_Batch]:
        return self

    def __next__(self) -> tuple[int, _Batch]:
        self.step, batch = next(self._steps)
        own_progress().given(self.step)
        return self.step, batch


class _Positioned(Protocol):
    """A loader that knows where it stands: `fivefold.data.Loader`."""

    @property
    def cursor(self) -> Any: ...

    @property
    def upcoming(self) -> Any: ...


class Checkpointer(Closing):
    """Saves the state of a run so that it survives the loss of nodes, and brings it back.

    Every save goes to each node's own storage, is protected by the other nodes, and every n-th is copied to
    `directory` in the background. Making one, and every method, is collective over all ranks.

    Args:
        directory: of this run, on storage that all nodes see; a path, or a URL that fsspec knows.
        mesh: what `fivefold.start` returned; its plan has the section `[checkpoint]`.
        process_group: without a mesh, the ranks that train; by default all.
        local: directory on each node's own storage.
        scheme: "auto", "single", "partner", "xor" or "rs": what nodes keep for each other.
        set_size: the most nodes that protect each other.
        every: steps from save to save of `maybe_save`; 0: as often as measured costs and `mtbf_s` suggest.
        flush_every: every n-th save is copied to `directory`; 0: the last alone.
        flush_bytes_per_s: how fast each node copies; 0: as fast as it goes.
        keep: how many saves each node keeps, at least.
        keep_flushed: how many copies stay in `directory`; older ones of this run are removed. 0: all.
        mtbf_s: mean time between failures of the whole job, in seconds.
        max_overhead: the most that saving may lengthen training, as a fraction.
        signals: whether SIGTERM and SIGUSR1 make the run save and end, with exit code 75.
        begin_again: whether the run may begin at step 0 where it has made saves and none can be loaded;
            without it, that is an error. Where one can be loaded, the run goes on from it.
        node: name of this rank's node, the host name by default: ranks with one name share a disk.
        objects: what is saved, by name: modules, optimisers, loaders, schedulers, scalers and whatever else
            has state_dict and load_state_dict; tensors and dicts, which are changed in place.

    Raises:
        UsageError: an object cannot be saved, there are fewer nodes than the scheme needs, or a directory
            will not do.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        mesh: Mesh | None = None,
        *,
        process_group: dist.ProcessGroup | None = None,
        local: str | os.PathLike[str] | None = None,
        scheme: str | None = None,
        set_size: int | None = None,
        every: int | None = None,
        flush_every: int | None = None,
        flush_bytes_per_s: float | None = None,
        keep: int | None = None,
        keep_flushed: int | None = None,
        mtbf_s: float | None = None,
        max_overhead: float | None = None,
        signals: bool = True,
        begin_again: bool = False,
        node: str | None = None,
        **objects: Any,
    ) -> None:
        help_instead()
        told = {
            "local": local, "scheme": scheme, "set_size": set_size, "every_steps": every,
            "flush_every": flush_every, "flush_bytes_per_s": flush_bytes_per_s, "keep": keep,
            "keep_flushed": keep_flushed, "mtbf_s": mtbf_s, "max_overhead": max_overhead,
        }  # fmt: skip
        plan = None if mesh is None else mesh.plan
        self._settings = settings = settings_of(directory, plan, node, told)
        groups = cpu_groups(process_group, 3, settings.timeout_s)
        self._begin_again = begin_again
        self._given = given(settings, objects, signals=signals, begin_again=begin_again)
        on_cpu = mesh is None or mesh.device.type == "cpu"
        self._threads = torch.get_num_threads() if on_cpu else 1
        self._channels = Channels(*map(Ranks, groups))
        self._notices = Notices(self._channels.training)
        self._layout = Layout(data=self._channels.training.size) if mesh is None else mesh.layout
        self._open(objects)
        self._hook(objects, signals=signals)

    def _open(self, objects: Mapping[str, Any]) -> None:
        """Find out which run the directory holds, and on which nodes we are."""
        ranks, values = self._channels.training, self._settings.plan
        self._state = State(objects, ranks.rank)
        check_given(ranks.agree("checking the state", self._check_state))
        self._opened = open_run(ranks, PersistentStore(self._settings.directory))
        store = LocalStore(self._settings.local, self._opened.run.run)
        members = members_of(ranks, self._settings.node, store.root, store.files)
        self._scheme = resolved_scheme(values.scheme, members, values.set_size)
        self._node = RankNode(store, members, timeout_s=min(self._settings.timeout_s, 60.0))
        self._rhythm = Rhythm(
            values.every_steps, values.mtbf_s, values.max_overhead, values.flush_every,
            agents_share=agents_share(ranks, members, self._threads),
        )  # fmt: skip

    def _hook(self, objects: Mapping[str, Any], *, signals: bool) -> None:
        """Be called before the optimisers' steps, and by signals."""
        optimizers = {n: thing for n, thing in objects.items() if isinstance(thing, Optimizer)}
        self._staging = Staging(at_once=not optimizers)
        self._unhook = wait_before_steps(optimizers, self._wait_for_staging)
        self._comparing = Comparing(self._channels.training)
        self._signals = Signals() if signals else None
        self._writing: Writing | None = None
        self.resumed = ""
        """from where the run went on, in words: "after step 120, from ..."; empty if it began"""
        self._seen: Mapping[str, str] | None = None
        """what the directory told when saves were looked for"""
        self._asked = self._closed = False
        self._under_way: Future[Saved] | None = None
        self._unflushed: Manifest | None = None
        """what was loaded, where it is on the nodes alone"""
        self._step = self._saved_step = -1
        self._stall_s = self._looked_at = 0.0
        self.last: Saved | None = None
        """how the last save went that has ended"""
        self._saved = False
        """whether one succeeded"""

    def _check_state(self) -> dict[str, Any]:
        self._state.capture(0)
        self._settings.check_local()
        return {"given": self._given}

    # ---- going on

    def load(self) -> int | None:
        """Go on from the newest save: every object gets its state. Returns its step; None if there is none.

        Saves that are damaged, or that too many nodes took with them, are passed over with a warning.

        Raises:
            AllLost: the run has made saves, and none can be loaded; see `begin_again`.
            UsageError: the saves are of another model, or of a number of ranks that will not do.
        """
        self._asked = True
        notes: list[str] = []
        with span(Phase.CHECKPOINT), own_progress().unwatched():
            self._seen = seen(self._channels.training, self._opened.store)
            found = load(
                self._channels.training,
                self._node,
                self._opened,
                state=self._state,
                begin_again=self._begin_again,
                warn=notes.append,
            )
        for note in notes:  # now that no rank waits for another
            self._notices.warn(note)
        self._notices.meet()
        run = self._opened.run.run
        own_progress().went_on_from(-1 if found is None else found.step, run)
        if found is None:
            return None
        self._opened.resumed = found.step, found.epoch
        self._unflushed = found.unflushed
        self.resumed = str(found)
        self._step = found.step
        return found.step

    def resume(self, data: Iterable[_Batch], epochs: int | None = None) -> Resumed[_Batch]:
        """Load, and yield what is left of `data`: (number of the step, from 1; batch).

        The first rank says on standard error from where a run goes on, or that it is finished. With `epochs`,
        the state after the last step is saved, so that a run that is started once more knows that.

        Args:
            data: a loader that was given to the Checkpointer, so that it goes on where it stood; of
                `fivefold.loader`, or any other whose iteration goes on after `load_state_dict`.
            epochs: how many in all; by default, the epoch that `data` stands in.
        """
        return Resumed(self._left(data, epochs), data, epochs)

    def _left(self, data: Iterable[_Batch], epochs: int | None) -> Iterator[tuple[int, _Batch]]:
        self._claim()  # first: while another job saves on, the newest save is not known
        step = self.load() or 0
        self._prepare()
        where = self._settings.directory
        if self.resumed:
            self._tell(f"the run in {where} goes on {self.resumed}")
        if not hasattr(data, "upcoming"):
            for _ in range(1 if epochs is None else epochs):
                for batch in data:
                    step += 1
                    yield step, batch
            return
        stream = cast(_Positioned, data)
        last = stream.upcoming.epoch + 1 if epochs is None else epochs
        if stream.upcoming.epoch >= last:
            self._tell(f"the run in {where} is finished: step {step} was the last of epoch {last}")
            return
        while stream.upcoming.epoch < last:
            for batch in data:
                yield int(stream.cursor.step), batch
        if epochs is not None:
            self.save(int(stream.cursor.step))

    def _tell(self, text: str) -> None:
        if self._channels.training.rank == 0:
            sys.stderr.write(f"fivefold: {text}\n")
            sys.stderr.flush()

    # ---- saving

    def maybe_save(self, step: int) -> bool:
        """After every step of the optimiser: save if it is time. Returns whether a save began.

        Raises:
            SystemExit: a signal asked the run to end; it is saved. The code is 75.
            UsageError: ranks are at different steps.
        """
        self._step = step
        own_progress().reached(step)
        first = self._channels.training.rank == 0
        if not (self._noticed(may_save=first) or self._rhythm.by_step(step)):
            return False
        self.save(step)
        return True

    def poll(self) -> None:
        """In phases without steps, such as validation, now and then: notice signals. See `maybe_save`."""
        own_progress().alive()
        self._noticed(may_save=False)

    def save(self, step: int) -> None:
        """Begin to save the state after `step` steps. Waits for the save before, if that is still under way.

        What goes wrong is told by a warning, and does not stop the run.
        """
        begun = time.perf_counter()
        with span(Phase.CHECKPOINT):
            self._finish_save()
            writing = self._prepare()
            if step == self._saved_step:
                return
            self._step = self._saved_step = step
            own_progress().reached(step)
            self._rhythm.saved()
            captured: Any
            try:
                captured = self._staging.begin(self._state.capture(step))
            except Exception as problem:  # noqa: BLE001 - told to all ranks
                self._staging.abandon()
                captured = problem
            self._under_way = writing.start(step, captured)
        self._stall_s = time.perf_counter() - begun

    def wait(self) -> None:
        """Return when the save under way is protected and copies under way are complete, or have failed.

        Waits without limit for what still gets on: copies keep to `flush_bytes_per_s`. What failed is told by
        warnings.
        """
        with own_progress().unwatched():
            self._finish_save()
            if self._writing is not None:
                self._writing.wait()
        self._look_after()
        self._notices.meet()

    def close(self) -> None:
        """Finish what is under way, copy the last save to the persistent directory, and end the helpers.

        In this order, so that little time does most: the save under way is written and protected; copies
        under way are completed, from now on as fast as it goes; the last save is copied. A line on standard
        error tells what is waited for if it takes longer than a moment. Of a copy that stands still for
        `comm.timeout_s` of the plan a warning tells, and it is given up: the save is on the nodes.

        Raises `CheckpointError` if saves were begun and none succeeded: such a run did not end well.
        """
        if self._closed:
            return
        self._closed = True
        try:
            with own_progress().unwatched():
                self._finish_save()
                if self._writing is not None:
                    self._writing.close()
            self._comparing.close()
            self._look_after()
            self._notices.meet()
        finally:
            self._let_go()
        if self.last is not None and not self._saved:
            why = self.last.problem.replace(GOES_ON, "")
            raise CheckpointError(f"the run ends without any save: {why}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        """`close`; after an error, which other ranks may not have, wait for them a moment only."""
        if kind is None:
            self.close()
        else:
            self._closed = True
            if self._writing is not None:
                self._writing.abandon()
            self._let_go(failed=True)

    # ---- parts

    def _finish_save(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
        self._look_after()

    def _prepare(self) -> Writing:
        """Before the first save: claim the directory, start agents and threads. Collective."""
        if self._writing is not None:
            return self._writing
        if self._opened.known and not self._asked:
            raise UsageError(
                f"{self._settings.directory} holds the saves of a run: go on from them with load() or "
                "resume(), or save to another directory"
            )
        self._claim()
        scheme, sets = self._scheme
        layout = {axis: int(getattr(self._layout, axis)) for axis in vars(self._layout)}
        self._writing = Writing(
            self._channels,
            self._node,
            opened=self._opened,
            settings=self._settings,
            staging=self._staging,
            stamp=Stamp(self._opened.run.run, self._opened.epoch, layout, scheme, sets),
            rhythm=self._rhythm,
        )
        if self._unflushed is not None:
            self._writing.adopt(self._unflushed)
        return self._writing

    def _claim(self) -> None:
        """Collective; see `Opened.claim`."""
        if self._closed:
            raise UsageError("this Checkpointer is closed: make another one to save more")
        self._opened.claim(self._channels.training, self._seen)

    def _wait_for_staging(self) -> None:
        begun = time.perf_counter()
        self._staging.wait()
        self._stall_s += time.perf_counter() - begun

    def _look_after(self) -> None:
        """Tell what other threads have found, without waiting for them."""
        if self._under_way is not None and self._under_way.done():
            self.last, self._under_way = self._under_way.result(), None
            self._saved = self._saved or self.last.manifest is not None
            if self.last.problem:
                self._notices.warn(self.last.problem)
            else:
                self._rhythm.measured(self._stall_s + self.last.cpu_s, self.last.agent_cpu_s)
                beside_s = self.last.copied_s + self.last.written_s + self.last.protected_s
                own_progress().saved(self._stall_s + beside_s)
        for problem in self._writing.problems() if self._writing is not None else ():
            self._notices.warn(problem)

    def _received(self) -> int:
        return 0 if self._signals is None else self._signals.received

    def _noticed(self, *, may_save: bool) -> bool:
        """End if a signal asks for it, or raise what failed; whether it is time for a save. Collective."""
        before, self._looked_at = self._looked_at, time.monotonic()
        if before:
            own_progress().noticed(self._looked_at - before)
        self._look_after()
        due = may_save and self._rhythm.by_time() and self._under_way is None
        failed = self._notices.failed
        agreed = self._comparing.tell(self._step, self._received(), due=due, failed=failed)
        if agreed.signal:
            self._stop()
        if agreed.failed:
            self._notices.meet()
        return agreed.due

    def _stop(self) -> None:
        """Save, unless that was done at this step, and end."""
        if self._signals is not None:
            self._signals.acted = True
        if self._step >= 0:
            self.save(self._step)
        self.close()
        raise SystemExit(STOPPED)

    def _let_go(self, *, failed: bool = False) -> None:
        self._unhook()
        self._staging.abandon()
        if self._signals is not None:
            self._signals.close()
        self._opened.close()
        self._node.close(failed=failed)
