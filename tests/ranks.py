"""Ranks as threads: a whole mesh inside one test, in a fraction of a second.

    def check(mesh):                  # runs once per rank
        ...
        return value
    values = run_ranks(4, check)      # list by rank

Real torch.distributed over gloo, with one world per thread. The private names of torch that make this
possible stand here and nowhere else; torch 2.11 to 2.15 have them. The random generators stay global to
the process: tests of dropout and seeding belong to the `processes` tier.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import fivefold.mesh as ff_mesh
from fivefold.mesh import Mesh
from fivefold.plan import Layout, Plan

__all__ = ["run_ranks"]

T = TypeVar("T")

# Where there is no GPU, every call replaces the guard of CUDA, and torch 2.11, built for GPUs, frees the one
# before, which another thread may be about to use. One call is enough.
torch._C._ensureCUDADeviceGuardSet()
torch._C._ensureCUDADeviceGuardSet = lambda: None


class _WorldPerThread:
    """Stands in for torch's one `_world`: every thread sees a world of its own."""

    def __init__(self) -> None:
        self.__dict__["_local"] = threading.local()

    def _world(self) -> Any:
        local = self.__dict__["_local"]
        if not hasattr(local, "world"):
            # `_World` keeps some of its state in module globals; WorldData-like plain storage does not.
            local.world = getattr(threading.current_thread(), "_ff_world", None) or _World()
        return local.world

    def inherit(self, thread: threading.Thread) -> None:
        """Let a thread that is about to start share the world of the one that starts it."""
        if hasattr(self.__dict__["_local"], "world"):
            thread.__dict__["_ff_world"] = self._world()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._world(), name, value)


class _World:
    """The attributes that torch's functions expect of a world."""

    def __init__(self) -> None:
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, Any] = {}
        self.pg_group_ranks: dict[Any, Any] = {}
        self.pg_backend_config: dict[Any, Any] = {}
        self.group_count = 0
        self.tags_to_pg: dict[Any, Any] = {}
        self.pg_to_tag: dict[Any, Any] = {}
        self.pg_coalesce_state: dict[Any, Any] = {}
        self.pg_default_device: dict[Any, Any] = {}
        self.comms: list[Any] = []
        self.pg_flight_recorder_hooks: dict[Any, Any] = {}  # since torch 2.15


class _AsGloo(type):
    """Stands in for torch's class of gloo groups: what it makes are such."""

    def __instancecheck__(cls, thing: object) -> bool:
        return isinstance(thing, dist.ProcessGroupGloo)

    def __getattr__(cls, name: str) -> Any:
        return getattr(dist.ProcessGroupGloo, name)


class _GlooOnOneDevice(metaclass=_AsGloo):
    """Gloo groups that share a device. One of their own costs each group some 10 ms when it ends: its
    thread looks so seldom whether it should."""

    device: Any = None

    def __new__(
        cls, store: dist.Store, rank: int, size: int, timeout: timedelta, **later: Any
    ) -> Any:
        assert not later.get("enable_reconfigure"), "torch 2.15 asks for it where ranks come and go"
        options = dist.ProcessGroupGloo._Options()
        if cls.device is None:
            cls.device = dist.ProcessGroupGloo.create_default_device()
        options._devices, options._timeout = [cls.device], timeout
        return dist.ProcessGroupGloo(store, rank, size, options)


@contextmanager
def _thread_worlds() -> Any:
    before, worlds, start = c10d._world, _WorldPerThread(), threading.Thread.start
    gloo, c10d.ProcessGroupGloo = c10d.ProcessGroupGloo, _GlooOnOneDevice  # type: ignore[misc]
    c10d._world = worlds  # type: ignore[assignment]
    torch._C._distributed_c10d._set_thread_isolation_mode(True)

    def start_in_world(thread: threading.Thread) -> None:
        worlds.inherit(thread)
        start(thread)

    threading.Thread.start = start_in_world  # type: ignore[method-assign]
    try:
        yield
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        c10d._world, c10d.ProcessGroupGloo = before, gloo  # type: ignore[misc]


@contextmanager
def _groups_end_here(groups: list[Any]) -> Any:
    """Let groups end when no rank runs, not whenever garbage is collected.

    The end of a gloo group waits for its threads while it holds the interpreter, which those threads may
    need to give back a tensor. So: nothing is collected meanwhile, then the threads get their time.
    """
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()  # what is loaded stays; collecting the rest is quick
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        time.sleep(0.005)
        groups.clear()
        gc.collect()


def run_ranks(
    layout: Layout | int,
    check: Callable[..., T],
    *arguments: Any,
    plan: Plan | None = None,
    timeout_s: float = 120.0,
) -> list[T]:
    """Call `check(mesh, *arguments)` on every rank of `layout` (a number means `data=`); results by rank.

    The first exception of any rank is raised here; the other ranks are then released by the timeout of
    their collectives, which is short.
    """
    layout = Layout(data=layout) if isinstance(layout, int) else layout
    plan = Plan(layout=layout) if plan is None else plan
    results: list[Any] = [None] * layout.size
    errors: list[BaseException | None] = [None] * layout.size
    store = dist.HashStore()
    groups: list[Any] = []

    def rank_main(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                c10d.init_process_group(
                    "gloo",
                    store=store,
                    rank=rank,
                    world_size=layout.size,
                    timeout=timedelta(seconds=timeout_s / 2),
                )
                try:
                    mesh: Mesh = ff_mesh.start(plan, device="cpu")
                    results[rank] = check(mesh, *arguments)
                finally:
                    groups.extend(c10d._world.pg_map)
                    c10d.destroy_process_group()
        except BaseException as problem:  # noqa: BLE001 - carried to the test's own thread
            errors[rank] = problem

    with _thread_worlds(), _groups_end_here(groups):
        threads = [
            threading.Thread(target=rank_main, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(layout.size)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    stuck = [thread.name for thread in threads if thread.is_alive()]
    _raise_first(errors)
    assert not stuck, f"still running after {timeout_s} s: {stuck}"
    return results


def _raise_first(errors: list[BaseException | None]) -> None:
    found = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if not found:
        return
    # A rank that fails on its own tells more than the ranks that then miss it.
    from fivefold.comm import CommError

    rank, error = next((f for f in found if not isinstance(f[1], CommError)), found[0])
    error.add_note(f"on rank {rank} of {len(errors)}")
    raise error
