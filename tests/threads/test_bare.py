"""A bare `loss.backward()` outside of `step`: exact or refused, as the table in exactness.md has it."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fivefold as ff
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.plan import Layout, Plan
from ranks import run_ranks

torch.manual_seed(3)
NET = nn.Sequential(
    nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1)
).double()
X, Y = torch.randn(7, 2, 6, 5, dtype=torch.float64), torch.randint(0, 3, (7, 6, 5))
REPLICAS = [Plan(layout=Layout(data=2)), Plan(layout=Layout(data=3))]
IN_PARTS = [Plan(layout=Layout(height=2)), Plan(layout=Layout(data=2, width=2))]


def expected(training: bool, rows: int = 7) -> list[Tensor]:
    net = copy.deepcopy(NET).train(training)
    F.cross_entropy(net(X[:rows]), Y[:rows]).backward()
    return [p.grad for p in net.parameters() if p.grad is not None]


@pytest.mark.long(every=8)
@pytest.mark.parametrize("shard", ["none", "optimizer", "parameters"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rows", [7, 6])
def test_replicas_weigh_their_means_by_their_samples(rows: int, training: bool, shard: str) -> None:
    def check(mesh: Mesh) -> list[Tensor]:
        model = ff.parallelize(copy.deepcopy(NET), mesh, loss=nn.CrossEntropyLoss())
        model.train(training)
        x, y = model.shard(X[:rows], Y[:rows])
        F.cross_entropy(model(x), y).backward()
        return [
            p.grad.full_tensor() if shard != "none" else p.grad  # type: ignore[attr-defined, union-attr, misc]
            for p in model.parameters()
        ]

    for plan in REPLICAS:
        divided = Plan(layout=plan.layout, memory=ff.plan.Memory(shard=shard))
        for got in run_ranks(plan.layout.size, check, plan=divided):
            for one, other in zip(got, expected(training, rows), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


class Standardised(nn.Conv2d):
    """Normalises its weights by batch norm, as timm's ResNetV2 and NFNet do."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True, momentum=0.0)
        return F.conv2d(input, weight.reshape_as(self.weight), self.bias, padding=1)


def test_weights_that_are_normalised_are_no_samples() -> None:
    """In training, where norms join replicas, they would be joined too."""
    net = nn.Sequential(Standardised(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)).double()

    def check(mesh: Mesh) -> list[Tensor | None]:
        model = ff.parallelize(copy.deepcopy(net), mesh)
        x, y = model.shard(X, Y)
        with pytest.raises(UsageError, match=r"samples depend on each other in batch_norm in '0'"):
            model(x)
        model.eval()
        F.cross_entropy(model(x), y).backward()
        return [p.grad for p in model.parameters()]

    F.cross_entropy(net.eval()(X), Y).backward()
    wanted = [p.grad for p in net.parameters()]
    net.train().zero_grad()
    for plan in REPLICAS:
        for got in run_ranks(plan.layout, check):
            for one, other in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


def test_outputs_that_depend_on_each_other_are_weighed_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.first(x)
            return y, self.second(y.tanh())

    torch.manual_seed(4)
    net, x = Twice().double(), torch.randn(5, 4, dtype=torch.float64)

    def loss(outputs: tuple[Tensor, Tensor]) -> Tensor:
        return sum(one.square().mean() for one in outputs)  # type: ignore[return-value]

    def check(mesh: Mesh) -> list[Tensor | None]:
        model = ff.parallelize(copy.deepcopy(net), mesh)
        loss(model(model.shard(x))).backward()
        return [p.grad for p in model.parameters()]

    loss(net(x)).backward()
    for got in run_ranks(2, check):
        for one, parameter in zip(got, net.parameters(), strict=True):
            torch.testing.assert_close(one, parameter.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("plan", IN_PARTS, ids=lambda plan: str(plan.layout))
@pytest.mark.parametrize("training", [True, False])
def test_tiles_refuse(plan: Plan, training: bool) -> None:
    def check(mesh: Mesh) -> bool:
        model = ff.parallelize(copy.deepcopy(NET), mesh, example=X)
        model.train(training)
        outputs = model(model.shard(X))
        with pytest.raises(UsageError, match=r"outside of model\.step.*tile"):
            outputs.sum().backward()
        with torch.no_grad():
            model(model.shard(X))
        return all(p.grad is None for p in model.parameters())

    assert all(run_ranks(plan.layout.size, check, plan=plan))


def test_stages_refuse() -> None:
    def check(mesh: Mesh) -> None:
        model = ff.parallelize(copy.deepcopy(NET), mesh, example=X)
        model.eval()
        with pytest.raises(UsageError, match=r"outside of model\.step: a pipe axis"):
            model(model.shard(X)).sum().backward()

    run_ranks(2, check, plan=Plan(layout=Layout(pipe=2)))


def test_hooks_of_parameters_refuse() -> None:
    def check(mesh: Mesh) -> None:
        net = copy.deepcopy(NET)
        net[0].weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        model = ff.parallelize(net, mesh)
        with pytest.raises(UsageError, match="hooks of parameters"):
            model(model.shard(X)).sum().backward()

    run_ranks(2, check)


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=2, width=2)], ids=str)
@pytest.mark.parametrize("evaluated", [False, True])
def test_a_net_trained_beside_its_model_is_refused(layout: Layout, evaluated: bool) -> None:
    def check(mesh: Mesh) -> None:
        net = copy.deepcopy(NET)
        model = ff.parallelize(net, mesh, loss=nn.CrossEntropyLoss())
        x, y = X[mesh.rank :: 2], Y[mesh.rank :: 2]
        if evaluated:
            model.evaluate(*model.shard(X, Y), lambda o, _t: o.new_ones(1))
        with pytest.raises(
            UsageError, match=r"the model that it returned was not called.*model\.step"
        ):
            F.cross_entropy(net(x), y).backward()
        model.step(*model.shard(X, Y))

    run_ranks(layout, check, plan=Plan(layout=layout))


@pytest.mark.parametrize("bare", [False, True])
def test_models_that_share_layers_train_by_turns(bare: bool) -> None:
    torch.manual_seed(6)
    body = nn.Linear(4, 6)
    nets = [nn.Sequential(body, nn.ReLU(), nn.Linear(6, out)).double() for out in (3, 2)]
    x = torch.randn(5, 4, dtype=torch.float64)
    targets = [torch.randn(5, out, dtype=torch.float64) for out in (3, 2)]
    loss = nn.MSELoss()

    def train(nets: list[nn.Sequential], step: Callable[[int], object]) -> list[Tensor]:
        held = list(dict.fromkeys(p for net in nets for p in net.parameters()))
        optim = torch.optim.SGD(held, lr=0.1)
        for which in (0, 0, 1, 0, 1):
            step(which)
            if which:
                optim.step()
                optim.zero_grad()
        return [p.detach() for p in held]

    def check(mesh: Mesh, bare: bool) -> list[Tensor]:
        own = copy.deepcopy(nets)
        models = [ff.parallelize(net, mesh, loss=loss) for net in own]

        def step(which: int) -> None:
            model = models[which]
            mine, theirs = model.shard(x, targets[which])
            loss(model(mine), theirs).backward() if bare else model.step(mine, theirs)

        return train(own, step)

    alone = copy.deepcopy(nets)
    one = train(alone, lambda n: loss(alone[n](x), targets[n]).backward())
    for found in run_ranks(2, check, bare):
        torch.testing.assert_close(found, one, rtol=1e-12, atol=1e-15)


SMOOTH = nn.Sequential(
    nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 6 * 5, 1)
).double()


@pytest.mark.parametrize("rows", [7, 6])
@pytest.mark.parametrize("plan", REPLICAS, ids=lambda plan: str(plan.layout))
def test_gradients_of_inputs_are_each_samples_own(rows: int, plan: Plan) -> None:
    def check(mesh: Mesh) -> None:
        model = ff.parallelize(copy.deepcopy(SMOOTH), mesh)
        for training in (True, False):
            x = model.train(training).shard(X[:rows]).requires_grad_()
            (found,) = torch.autograd.grad(model(x).sum(), x)
            torch.testing.assert_close(found, model.shard(whole), rtol=1e-10, atol=1e-14)

    x = X[:rows].clone().requires_grad_()
    (whole,) = torch.autograd.grad(SMOOTH(x).sum(), x)
    run_ranks(plan.layout.size, check, plan=plan)


def critic(call: Callable[[Tensor], Tensor], x: Tensor, between: Tensor) -> Tensor:
    """The loss of a critic with a penalty of its gradient (Gulrajani et al. 2017)."""
    between = between.clone().requires_grad_()
    (slope,) = torch.autograd.grad(call(between).sum(), between, create_graph=True)
    return call(x).mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()


@pytest.mark.parametrize("rows", [7, 6])
@pytest.mark.parametrize("plan", REPLICAS, ids=lambda plan: str(plan.layout))
def test_penalties_of_gradients_are_means_over_samples(rows: int, plan: Plan) -> None:
    plain, between = copy.deepcopy(SMOOTH), X[:rows].flip(0) * 0.5
    wanted: list[list[Tensor]] = []
    for _ in range(2):
        plain.zero_grad()
        critic(plain, X[:rows], between).backward()
        wanted.append([p.grad.clone() for p in plain.parameters() if p.grad is not None])

    def check(mesh: Mesh) -> None:
        model = ff.parallelize(copy.deepcopy(SMOOTH), mesh)
        for step in range(2):
            model.zero_grad()
            critic(model, *model.shard(X[:rows], between)).backward()
            for parameter, one in zip(model.parameters(), wanted[step], strict=True):
                torch.testing.assert_close(parameter.grad, one, rtol=1e-10, atol=1e-14)

    run_ranks(plan.layout.size, check, plan=plan)


@pytest.mark.parametrize("rows", [7, 6])
@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_parameters_asked_for_are_refused(rows: int, training: bool) -> None:
    def check(mesh: Mesh) -> None:
        model = ff.parallelize(copy.deepcopy(NET), mesh).train(training)
        x, y = model.shard(X[:rows], Y[:rows])
        loss = F.cross_entropy(model(x), y)
        with pytest.raises(
            UsageError, match="would give the gradients of parameters for this rank"
        ):
            torch.autograd.grad(loss, [*model.parameters()])

    run_ranks(2, check)
