"""Users of process groups inside torch, each as small as it can be; they return bits to compare."""

from __future__ import annotations

import tempfile
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm_checks import raw

CPU = torch.device("cpu")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(50, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 5)
    )


def train(model: nn.Module, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 50, generator=generator)).square().mean().backward()
        optimizer.step()


def flat(tensors: Any) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def data_parallel() -> Tensor:
    model = nn.parallel.DistributedDataParallel(net(), bucket_cap_mb=1)
    train(model)
    return flat(model.parameters())


def zero_redundancy() -> Tensor:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(net())
    train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
    return flat(model.parameters())


def sharded(model: nn.Sequential) -> Any:
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fully_sharded() -> Tensor:
    model = sharded(net())
    train(model)
    return flat(p.full_tensor() for p in model.parameters())


def arena_of_fully_shard() -> int:
    from fivefold.comm.own_arena import own_arena

    model = sharded(net())
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.set_allocate_memory_from_process_group_for_comm(True)  # type: ignore[operator]
    train(model)
    return own_arena().touched_bytes


def first_fully_sharded() -> Tensor:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(net(), device_id=CPU)
        train(model)
        return model.clip_grad_norm_(1.0)


def distributed_tensors() -> Tensor:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    left = distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)])
    right = distribute_tensor(torch.randn(6, 9), mesh, [Shard(1)])
    product: Any = left @ right.redistribute(mesh, [Replicate()])
    parts = DTensor.from_local(torch.ones(4, 4) * dist.get_rank(), mesh, [Partial()])
    return flat([product.full_tensor(), parts.redistribute(mesh, [Shard(0)]).full_tensor()])


def tensor_parallel() -> Tensor:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(net()[:3], mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    output = model(torch.ones(4, 50))
    output.sum().backward()
    return output


def functional() -> Tensor:
    import torch.distributed._functional_collectives as functional_

    group: Any = dist.group.WORLD
    own = torch.arange(6.0) + dist.get_rank()
    twice = own.repeat(2)
    results = [
        functional_.all_reduce(own, "sum", group),
        functional_.all_gather_tensor(own, 0, group),
        functional_.reduce_scatter_tensor(twice, "avg", 0, group),
        functional_.all_to_all_single(twice, None, None, group),
        functional_.broadcast(own, 1, group),
        *functional_.all_reduce_coalesced([own, twice], "sum", group),
    ]
    return flat(functional_.wait_tensor(result) for result in results)


def pipeline() -> Tensor:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layer = nn.Linear(16, 16)
    stage = PipelineStage(layer, rank, size, CPU)
    schedule = Schedule1F1B(stage, 4, loss_fn=nn.MSELoss())
    if rank == 0:
        schedule.step(torch.ones(8, 16))
    else:
        schedule.step(target=torch.zeros(8, 16))
    assert layer.weight.grad is not None
    return layer.weight.grad


def checkpoint() -> Tensor:
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder, 0)
        dcp.save({"a": torch.arange(10.0)}, checkpoint_id=folder[0])
        state = {"a": torch.zeros(10)}
        dcp.load(state, checkpoint_id=folder[0])
        dist.barrier()
    return state["a"]


def bucketed() -> Tensor:
    """Fivefold's own reducer; over shared memory its buckets lie where all ranks see them."""
    import fivefold as ff
    from fivefold.comm.own_arena import own_arena

    model = ff.parallelize(net(), ff.start(), loss=nn.MSELoss())
    before = own_arena().touched_bytes
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = torch.randn(7, 50, generator=generator), torch.zeros(7, 5)
        model.step(*model.shard(inputs, targets))
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
    if dist.get_backend() == "fivefold":
        assert own_arena().touched_bytes > before
    return flat(model.parameters())


_CONSUMERS = (data_parallel, zero_redundancy, fully_sharded, first_fully_sharded, distributed_tensors,
              tensor_parallel, functional, pipeline, checkpoint, bucketed)  # fmt: skip
ALL = [consumer.__name__ for consumer in _CONSUMERS]


def result_of(name: str) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return raw(next(c for c in _CONSUMERS if c.__name__ == name)())
