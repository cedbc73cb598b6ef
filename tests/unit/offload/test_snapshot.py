"""Snapshots: one flat copy of parameters and buffers, and back, bit for bit."""

from __future__ import annotations

import copy

import torch
from torch import nn

import fivefold as ff
from fivefold.offload.snapshot import Packing, Snapshot, load, tensors_of
from ranks import run_ranks


class Odd(nn.Module):
    """Tensors of many kinds: of other dtypes, empty, of no dims, shared, and one that state_dict omits."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 7, bias=False).to(torch.bfloat16)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64), persistent=False)
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("flags", torch.rand(9) > 0.5)


def test_a_flat_copy_gives_back_every_tensor() -> None:
    net, other = Odd(0).to(memory_format=torch.channels_last), Odd(1)
    packing = Packing(net)
    assert not packing.problem
    assert packing.digest() == Packing(other).digest()
    flat = packing.packed(tensors_of(net))
    assert flat.numel() == packing.size_bytes
    load(other, packing.views(flat))
    for name, tensor in tensors_of(other).items():
        assert torch.equal(tensor, tensors_of(net)[name]), name
        assert packing.views(flat)[name].data_ptr() % 64 == 0 or not tensor.numel()
    assert Packing(nn.Linear(5, 7)).digest() != packing.digest()


def test_a_net_computes_with_a_snapshot_and_then_as_before() -> None:
    def check(mesh: ff.Mesh) -> None:
        net = Odd(0)
        model = ff.parallelize(net, mesh)
        snapshot = Snapshot(model, Packing(net))
        was = {name: tensor.clone() for name, tensor in tensors_of(net).items()}
        with torch.no_grad():
            for tensor in tensors_of(net).values():
                tensor.copy_(torch.ones_like(tensor))
        now, versions = copy.deepcopy(net), [p._version for p in net.parameters()]
        places = [tensor.data_ptr() for tensor in tensors_of(net).values()]
        with snapshot.installed():
            for name, tensor in tensors_of(net).items():
                assert torch.equal(tensor, was[name]), name
            assert net.tied.weight is net.head.weight
        for name, tensor in tensors_of(net).items():
            assert torch.equal(tensor, tensors_of(now)[name]), name
        assert [tensor.data_ptr() for tensor in tensors_of(net).values()] == places
        assert [p._version for p in net.parameters()] == versions, "a staged checkpoint saw nothing"
        state = snapshot.state_dict()
        assert state.keys() == net.state_dict().keys()
        assert all(torch.equal(value, was[name]) for name, value in state.items())

    run_ranks(1, check)


class Extra(nn.Linear):
    def get_extra_state(self) -> object:
        return {"scale": 3}

    def set_extra_state(self, state: object) -> None:
        pass


def test_state_beside_tensors_is_named() -> None:
    assert "the module 'odd' (Extra)" in Packing(nn.ModuleDict({"odd": Extra(2, 2)})).problem
