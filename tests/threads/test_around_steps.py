"""What a script may do around steps: the same as in one process, or refused in a sentence."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.parallel import parallelize
from fivefold.plan import Layout, Plan
from joined import (
    CHECKED,
    DATA,
    PIPE,
    USER,
    WIDTH,
    Images,
    Net,
    batches,
    expect_exact,
    made,
    plan_for,
)
from ranks import run_ranks

pytestmark = CHECKED


@pytest.mark.parametrize("layout", [DATA, PIPE], ids=str)
def test_a_step_without_gradients_is_refused(layout: Layout) -> None:
    def check(mesh: Mesh) -> None:
        x, y = (t.double() for t in batches(Net)[0])
        model = parallelize(made(Net, lambda _n, h: h, dict), mesh, example=x, loss=nn.MSELoss())
        with torch.no_grad(), pytest.raises(UsageError, match=r"use model\.evaluate"):
            model.step(*model.shard(x, y))

    run_ranks(layout, check, plan=plan_for(layout))


@pytest.mark.parametrize("layout", [DATA, Layout(data=2, pipe=2)], ids=str)
@pytest.mark.parametrize("later", [0, 2], ids=["at once", "later"])
def test_replicas_of_which_some_do_not_know_their_samples(layout: Layout, later: int) -> None:
    """Who does not know asks all others, which have to answer. Those of other stages are left waiting."""

    def check(mesh: Mesh) -> None:
        data = [(x.double(), y.double()) for x, y in batches(Net)]
        net = made(Net, lambda _n, h: h, dict)
        model = parallelize(net, mesh, example=data[0][0], loss=nn.MSELoss())
        for number, batch in enumerate(data):
            x, y = model.shard(*batch)
            model.step(x * 1 if number >= later and mesh.coordinate("data") else x, y)

    with pytest.raises(UsageError, match="does not say which samples of the whole one it has"):
        run_ranks(layout, check, plan=plan_for(layout))


def test_a_tensor_without_dims_is_no_part_of_a_batch() -> None:
    def check(mesh: Mesh) -> None:
        x, y = batches(Net)[0]
        model = parallelize(made(Net, lambda _n, h: h, dict), mesh, example=x, loss=nn.MSELoss())
        with pytest.raises(UsageError, match="a tensor without dims, so it has no samples"):
            model.shard((x, torch.tensor(2.0)), y)

    run_ranks(DATA, check)


def assign(net: Net) -> None:
    for parameter in net.parameters():
        parameter.data = parameter.data * 0.5


def exchange(net: Net) -> None:
    net.first.weight = nn.Parameter(net.first.weight.detach() * 0.5)


def grow(net: Net) -> None:
    net.more = nn.Linear(2, 2).double()
    for parameter in net.more.parameters():  # ranks are threads, which draw from one generator
        nn.init.zeros_(parameter)


@pytest.mark.long(every=8)
@pytest.mark.parametrize("shard", ["optimizer", "parameters"])
@pytest.mark.parametrize("change", [assign, exchange, grow])
@pytest.mark.parametrize("when", ["at once", "evaluated", "after two steps"])
def test_divided_parameters_that_become_others_are_refused(
    when: str, shard: str, change: Callable[[Net], None]
) -> None:
    def check(mesh: Mesh) -> None:
        net = made(Net, lambda _n, h: h, dict)
        x, y = (t.double() for t in batches(Net)[0])
        model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
        if when == "evaluated":
            with torch.no_grad():
                model.eval()(*model.shard((x,)))
        for _ in range(2 * (when == "after two steps")):
            model.train().step(*model.shard(x, y))
        change(net)
        with pytest.raises(UsageError, match="has become another tensor since it was divided"):
            model.step(*model.shard(x, y))

    plan = Plan(layout=DATA).replace({"memory.shard": shard}, USER)
    run_ranks(DATA, check, plan=plan)


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "gems"])
def test_parameters_that_are_assigned_are_summed_in_stages(schedule: str) -> None:
    x, y = (t.double() for t in batches(Net, rows=(8,) * 4)[0])

    def trained(
        model: nn.Module, state: dict[str, Tensor], step: Callable[[], Tensor]
    ) -> list[float]:
        half = {name: value * 0.5 for name, value in state.items()}
        model.load_state_dict(half, assign=True)
        optimizer, told = torch.optim.SGD(model.parameters(), 0.5), list[float]()
        for _ in range(3):
            optimizer.zero_grad()
            told.append(step().item())
            optimizer.step()
        return told

    plain = made(Net, lambda _n, h: h, dict)

    def plainly() -> Tensor:
        loss = nn.MSELoss()(plain(x), y)
        loss.backward()
        return loss

    wanted = trained(plain, plain.state_dict(), plainly)

    def check(mesh: Mesh) -> None:
        net = made(Net, lambda _n, h: h, dict)
        model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
        state = model.full_state_dict()
        assert trained(model, state, lambda: model.step(*model.shard(x, y))) == pytest.approx(
            wanted
        )

    plan = Plan(layout=PIPE).replace({"pipeline.schedule": schedule}, USER)
    run_ranks(PIPE, check, plan=plan)


def test_a_net_that_grows_is_refused_in_stages() -> None:
    def check(mesh: Mesh) -> None:
        net = made(Net, lambda net, h: net.more(h) if hasattr(net, "more") else h, dict)
        x, y = (t.double() for t in batches(Net)[0])
        model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
        model.step(x, y)
        net.more = nn.Linear(6, 6).double()
        with pytest.raises(UsageError, match=r"'more\.bias' has come or gone"):
            model.step(x, y)

    run_ranks(PIPE, check, plan=plan_for(PIPE))


def test_an_optimiser_that_looks_at_all_parameters_is_refused_in_stages() -> None:
    def check(mesh: Mesh) -> None:
        net = made(Net, lambda _n, h: h, dict)
        x, y = (t.double() for t in batches(Net)[0])
        model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
        optim = torch.optim.LBFGS(model.parameters())
        with pytest.raises(UsageError, match="LBFGS looks at all parameters"):
            optim.step(lambda: model.step(x, y))

    run_ranks(PIPE, check, plan=plan_for(PIPE))


def test_a_net_that_stages_hold_already_is_refused() -> None:
    def check(mesh: Mesh) -> None:
        net = made(Net, lambda _n, h: h, dict)
        x = batches(Net)[0][0].double()
        parallelize(net, mesh, example=x, loss=nn.MSELoss())
        with pytest.raises(UsageError, match="without numbers"):
            parallelize(net, mesh, example=x, loss=nn.MSELoss())

    run_ranks(PIPE, check, plan=plan_for(PIPE))


def test_torchs_norm_of_some_stages_is_refused() -> None:
    def check(mesh: Mesh) -> None:
        x, y = (t.double() for t in batches(Net)[0])
        model = parallelize(made(Net, lambda _n, h: h, dict), mesh, example=x, loss=nn.MSELoss())
        model.step(x, y)
        with pytest.raises(UsageError, match=r"use fivefold\.clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.nn.utils.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0)

    run_ranks(PIPE, check, plan=plan_for(PIPE))


@pytest.mark.parametrize(
    ("layout", "shard"),
    [(DATA, "optimizer"), (DATA, "parameters"), (Layout(data=2, pipe=2), "optimizer")],
    ids=str,
)
def test_optimisers_that_hold_what_was_before_or_cannot_step_parts_are_refused(
    layout: Layout, shard: str
) -> None:
    def check(mesh: Mesh) -> None:
        net = made(Net, lambda _n, h: h, dict)
        early = torch.optim.SGD(net.parameters(), 0.1)
        x, y = (t.double() for t in batches(Net)[0])
        model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
        model.step(*model.shard(x, y))
        with pytest.raises(UsageError, match="SGD was made before parallelize"):
            early.step()
        for kind in (torch.optim.Rprop, torch.optim.Adafactor, torch.optim.Muon):
            with pytest.raises(UsageError, match=r"cannot step parameters that replicas divide"):
                kind([p for p in model.parameters() if p.dim() == 2]).step()  # Muon takes matrices
        torch.optim.SGD(model.parameters(), 0.1).step()

    run_ranks(layout, check, plan=plan_for(layout).replace({"memory.shard": shard}, USER))


def test_inputs_that_ask_for_gradients_are_refused_in_stages() -> None:
    def check(mesh: Mesh) -> None:
        x, y = (t.double() for t in batches(Net)[0])
        model = parallelize(made(Net, lambda _n, h: h, dict), mesh, example=x, loss=nn.MSELoss())
        with pytest.raises(UsageError, match="the inputs ask for gradients"):
            model.step(x.requires_grad_(), y)

    run_ranks(PIPE, check, plan=plan_for(PIPE))


def test_batch_norm_of_a_micro_batch_of_one_sample_is_refused() -> None:
    def check(mesh: Mesh) -> None:
        net = made(Net, lambda net, h: net.norm(h), lambda: {"norm": nn.BatchNorm1d(6)})
        x, y = (t.double() for t in batches(Net)[0])
        model = parallelize(net, mesh, example=x, loss=nn.MSELoss())
        with pytest.raises(
            UsageError, match=r"more than 1 value per channel .* of 4 micro-batches"
        ):
            model.step(x, y)

    run_ranks(PIPE, check, plan=Plan(layout=PIPE).replace({"pipeline.micro_batches": 4}, USER))


def test_kthvalue_in_tiles() -> None:
    expect_exact(WIDTH, lambda _net, h: h + h.kthvalue(3, 3)[0].unsqueeze(3), kind=Images)
