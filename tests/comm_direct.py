"""What ranks of the tests of `Direct` do: their tensors take the way of those on a GPU that ranks share."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

import comm_checks
import trace_checks
from comm_checks import draw, in_order, raw, reference
from fivefold.comm import registration
from fivefold.comm.device_memory import NoDeviceMemory
from fivefold.comm.direct import Direct, direct
from fivefold.comm.operations import Operations
from fivefold.comm.shared_group import SharedGroup
from host_memory import HostMemory

__all__ = [
    "every_operation",
    "large_operations",
    "mismatch",
    "none_there",
    "placed",
    "random_operations",
    "recorded",
]


@contextlib.contextmanager
def _directly() -> Generator[Direct]:
    """The world, and groups that are made within the block, take host memory for that of a device."""
    made, world = registration.Operations, cast(Any, dist.group.WORLD)
    kept = world._operations

    def make(*given: Any) -> Direct:
        return _Whole(made(*given), HostMemory())

    registration.Operations = make  # pyright: ignore[reportAttributeAccessIssue]
    world._operations = found = Direct(kept, HostMemory())
    found.log = kept.log
    try:
        yield found
    finally:
        registration.Operations, world._operations = made, kept


class _Whole(Direct):
    """Of a group that has no other operations."""

    def close(self) -> None:
        Operations.close(self)


def every_operation(dtype: str, count: int, later: bool) -> dict[str, list[bytes] | str]:
    with _directly():
        comm_checks.under_another_default()
        return comm_checks.every_operation(dtype, count, later)


def recorded(folder: str) -> dict[str, Any]:
    with _directly():
        return trace_checks.every_operation(folder)


def random_operations(seed: int, rounds: int, most_bytes: int, one_by_one: bool) -> int:
    with _directly():
        return comm_checks.random_operations(seed, rounds, most_bytes, None, False, one_by_one)


def large_operations(count: int) -> None:
    """Tensors of several windows, with gaps, and one that is the conjugate of another."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with _directly():
        drawn = [draw(1, q, count, torch.float32) for q in range(size)]
        own = torch.zeros(count, 2)[:, 1].copy_(drawn[rank])
        dist.all_reduce(own)
        assert raw(own) == raw(reference("sum", drawn))
        own = drawn[rank].clone()
        dist.broadcast(own, size - 1)
        assert raw(own) == raw(drawn[-1])
        every = [torch.zeros(count) for _ in range(size)]
        dist.all_gather(every, drawn[rank])
        assert [*map(raw, every)] == [*map(raw, drawn)]
        part, each = torch.zeros(count // size), count // size
        dist.reduce_scatter(part, [*drawn[rank][: each * size].split(each)])
        assert raw(part) == raw(reference("sum", drawn)[rank * each : (rank + 1) * each])
        turned = torch.complex(drawn[rank], drawn[rank] + 1).conj()
        total = turned.clone()
        dist.all_reduce(total)
        told = [torch.empty_like(total) for _ in range(size)]
        dist.all_gather(told, turned.resolve_conj())
        assert torch.equal(told[rank], turned.resolve_conj())
        assert torch.allclose(total, torch.stack(told).sum(0))


def placed(count: int) -> list[int]:
    """Sums where they lie, of wholes and parts, of ranks that differ in that; memory is given again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = cast(SharedGroup, dist.group.WORLD)
    with _directly() as way:
        windows = way.windows

        def summed(tensor: Tensor, number: int, name: str = "sum") -> None:
            drawn = [draw(number, q, tensor.numel(), tensor.dtype) for q in range(size)]
            tensor.copy_(drawn[rank])
            dist.all_reduce(tensor, comm_checks.REDUCTIONS[name])
            add = in_order if way.group.in_order else reference
            assert raw(tensor) == raw(add(name, drawn)), (number, name)

        flat = windows.zeros(count, torch.float32)
        other = windows.zeros(count, torch.bfloat16)
        assert not flat.any() and not other.any()
        addresses = [flat.data_ptr()]
        for number in range(3):
            summed(flat, number)
            summed(other, 10 + number, "avg")
            summed(flat[1 : count // 2], 20 + number)
            summed(flat[rank : rank + count // 2], 30 + number)  # no place of all
            summed(flat if rank else torch.empty(count), 40 + number)
        world.add_in_order()
        summed(flat, 50, "avg")
        summed(other, 51)
        del flat
        gc.collect()
        flat = windows.zeros(count // 2, torch.float32)  # what is free on all ranks
        assert not flat.any()
        summed(flat, 60)
        addresses.append(flat.data_ptr())
        held = flat if rank == 0 else None
        del flat
        flat = windows.zeros(count // 2, torch.float32)  # rank 0 still has the other
        assert held is None or held.data_ptr() != flat.data_ptr()
        summed(flat, 61)
        addresses.append(flat.data_ptr())
    return [address == addresses[0] for address in addresses]


def mismatch() -> str:
    with _directly():
        try:
            dist.all_reduce(torch.ones(3 + dist.get_rank()))
        except RuntimeError as problem:
            return str(problem)
    return ""


def none_there(step: str) -> str:
    """One rank cannot: all do without, and what is asked for afterwards works."""
    world = cast(Any, dist.group.WORLD)
    fails = step if dist.get_rank() == 1 else ""
    assert direct(world._operations, HostMemory(fails)) is None
    try:
        Direct(world._operations, HostMemory(fails))
    except NoDeviceMemory as problem:
        own = torch.ones(3)
        dist.all_reduce(own)
        assert own.tolist() == [dist.get_world_size()] * 3
        return str(problem)
    return ""
