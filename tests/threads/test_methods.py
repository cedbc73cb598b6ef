"""Methods of a net other than its forward, on a mesh, against the same in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import ParallelModel, parallelize
from fivefold.plan import Layout, Memory, Parallel, Plan, Tiles
from ranks import run_ranks

PLANS = [
    Plan(),
    Plan(layout=Layout(data=2)),
    Plan(layout=Layout(width=2)),
    Plan(layout=Layout(data=2, width=2)),
    Plan(tiles=Tiles(turns="height=2,width=2")),
    Plan(layout=Layout(width=2), tiles=Tiles(turns="width=2")),
    Plan(layout=Layout(data=2), memory=Memory(shard="optimizer")),
]
EVERY = pytest.mark.parametrize("plan", PLANS, ids=repr)


class Codec(nn.Module):
    """An autoencoder, with dropout; what it is decoded with can be changed."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.5)
        self.up = nn.ConvTranspose2d(6, 3, 4, stride=2, padding=1)
        self.scale = 1.0
        self.past: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x)[0])

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(self.down(x))
        return h, h.square()

    def decode(self, z: Tensor, *, times: float = 1.0) -> Tensor:
        return self.up(self.drop(z)) * self.scale * times

    def follow(self, z: Tensor) -> Tensor:
        """Smoothed over the calls before, as causal video decoders are."""
        h = self.down(z)
        self.past = h if self.past is None else (self.past + h) / 2
        return self.up(self.past)


def made() -> Codec:
    torch.manual_seed(5)
    return Codec().double()


def image(*shape: int) -> Tensor:
    torch.manual_seed(6)
    return torch.randn(shape, dtype=torch.float64)


def run(plan: Plan, check: Callable[[ParallelModel, Codec], None]) -> None:
    net = made()

    def on_rank(mesh: Mesh) -> None:
        check(parallelize(copy.deepcopy(net), mesh), copy.deepcopy(net))

    run_ranks(plan.layout, on_rank, plan=plan)


def own(model: ParallelModel, tensor: Tensor) -> Tensor:
    """This replica's samples."""
    mine = model.mesh.share(len(tensor))
    return tensor[mine.start : mine.stop]


def expect(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, rtol=1e-11, atol=1e-12)


@EVERY
def test_each_is_what_it_is_in_one_process(plan: Plan) -> None:
    x, z = image(3, 3, 14, 18), image(3, 6, 7, 9)

    @torch.no_grad()
    def check(model: ParallelModel, plain: Codec) -> None:
        model.eval(), plain.eval()
        for scale in (1.0, 2.0):
            for net in (model.module, plain):
                net.scale = scale
            found = model.whole(model.run("encode", model.shard(x)))
            for one, wanted in zip(found, plain.encode(x), strict=True):
                expect(one, own(model, wanted))
            for times in (1.0, 3.0):
                found = model.whole(model.run("decode", model.shard(z), times=times))
                expect(found, own(model, plain.decode(z, times=times)))
            expect(model.whole(model(model.shard(x))), own(model, plain(x)))

    run(plan, check)


@pytest.mark.parametrize("plan", [one for one in PLANS if not one.tiles.turns], ids=repr)
def test_what_one_call_leaves_the_next_one_finds(plan: Plan) -> None:
    x = image(2, 3, 14, 18)

    @torch.no_grad()
    def check(model: ParallelModel, plain: Codec) -> None:
        model.eval(), plain.eval()
        for number in range(1, 5):
            found = model.whole(model.run("follow", model.shard(x * number)))
            expect(found, own(model, plain.follow(x * number)))

    run(plan, check)


def test_what_turns_would_leave_in_pieces_is_refused() -> None:
    def check(model: ParallelModel, _plain: Codec) -> None:
        with pytest.raises(UsageError, match="leaves tensors behind"):
            model.run("follow", image(2, 3, 14, 18))

    run(Plan(tiles=Tiles(turns="height=2")), check)


@EVERY
def test_a_method_is_trained_in_place_of_forward(plan: Plan) -> None:
    z, y = image(3, 6, 7, 9), image(3, 3, 14, 18)
    begun = made()
    begun.drop.p = 0.0

    def check(mesh: Mesh) -> None:
        net, plain = copy.deepcopy(begun), copy.deepcopy(begun)
        model = parallelize(net.decode, mesh, loss=nn.MSELoss())
        assert model.module is net
        ours = torch.optim.SGD(model.parameters(), 0.1)
        theirs = torch.optim.SGD(plain.parameters(), 0.1)
        for _ in range(3):
            ours.zero_grad(), theirs.zero_grad()
            loss = nn.functional.mse_loss(plain.decode(z), y)
            loss.backward()
            expect(model.step(*model.shard(z, y)), loss.detach())
            ours.step(), theirs.step()
        for name, wanted in plain.state_dict().items():
            expect(model.full_state_dict()[name], wanted)
        with torch.no_grad():
            expect(model.whole(model.eval()(model.shard(z))), own(model, plain.eval().decode(z)))

    run_ranks(plan.layout, check, plan=plan)


def test_what_is_no_method_is_refused() -> None:
    def check(model: ParallelModel, _plain: Codec) -> None:
        with pytest.raises(UsageError, match="Codec has no method 'decod'"):
            model.run("decod", image(2, 6, 7, 9))
        with pytest.raises(UsageError, match="Codec has no method 'scale'"):
            model.run("scale", image(2, 6, 7, 9))

    run(Plan(), check)


def test_parameters_that_are_gathered_by_layers_are_refused() -> None:
    plan = Plan(layout=Layout(data=2), memory=Memory(shard="parameters"))
    x = image(2, 6, 7, 9)

    def check(model: ParallelModel, _plain: Codec) -> None:
        with pytest.raises(UsageError, match='decode cannot be called: use "optimizer"'):
            model.run("decode", x)

    run(plan, check)


def test_stages_are_of_the_forward() -> None:
    x, begun = image(4, 3, 14, 18), made()

    def check(mesh: Mesh) -> None:
        net = copy.deepcopy(begun)
        with pytest.raises(UsageError, match="a pipe axis cuts what the net's forward computes"):
            parallelize(net.decode, mesh, example=x)
        with pytest.raises(UsageError, match="so decode cannot be called"):
            parallelize(net, mesh, example=x).run("decode", x)

    run_ranks(2, check, plan=Plan(layout=Layout(pipe=2)))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(memory=Memory(budget="1GiB")),
        Plan(layout=Layout(width=2), memory=Memory(recompute="auto")),
        Plan(parallel=Parallel(compile=True)),
    ],
    ids=["budget", "recompute", "compile"],
)
def test_plans_for_forwards_alone(plan: Plan) -> None:
    net = made()

    def check(mesh: Mesh) -> None:
        with pytest.raises(UsageError, match="called by their forward, not by decode"):
            parallelize(net.decode, mesh)

    run_ranks(plan.layout, check, plan=plan)
