"""`parallel.compile`: graphs between messages give the numbers of the net as it is, or run as it is."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.errors import PlanError, UsageError
from fivefold.mesh import Mesh
from fivefold.parallel.program import compiled
from fivefold.plan import Layout, Plan, Provenance
from fivefold.recipes import models
from ranks import run_ranks
from small_models import SMALL, batch_of, loss_of, net_of

STEPS = 4
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method:DeprecationWarning",
    # Ranks that are threads share one list of filters, which the compiler's warnings then get through.
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)

Event = Callable[[nn.Module, int], None]


@pytest.fixture(autouse=True)
def traced_only(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs go through all of torch.compile but its last part, which takes most of the time.
    They are used whether or not they are faster: here nothing is computed long enough."""
    monkeypatch.setattr(compiled, "_SLOWEST", math.inf)
    if "compiler" not in request.keywords and "kernels" not in request.fixturenames:
        monkeypatch.setattr(compiled, "_BACKEND", "aot_eager")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs become machine code, in this process: the compiler's helpers would stay until it ends."""
    from torch._inductor import config

    monkeypatch.setattr(config, "compile_threads", 1)


def nothing(_net: nn.Module, _step: int) -> None:
    pass


def record(net: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {"loss": loss.detach().clone()}
    found |= {n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()}
    return found | {n: b.clone() for n, b in net.named_buffers()}


def one_process(
    net: nn.Module, loss: nn.Module, batches: list[tuple[Tensor, Tensor]], event: Event = nothing
) -> list[dict[str, Tensor | None]]:
    """Torch alone."""
    net, found = copy.deepcopy(net), list[dict[str, Tensor | None]]()
    optim = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for number, (x, y) in enumerate(batches):
        event(net, number)
        optim.zero_grad()
        told = loss(net(x), y)
        told.backward()
        found.append(record(net, told))
        optim.step()
    return found


def compiled_steps(
    mesh: Mesh,
    net: nn.Module,
    loss: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    event: Event = nothing,
) -> list[dict[str, Tensor | None]]:
    own, found = copy.deepcopy(net), list[dict[str, Tensor | None]]()
    model = ff.parallelize(own, mesh, example=batches[0][0], loss=copy.deepcopy(loss))
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number, (x, y) in enumerate(batches):
        event(model.module, number)
        optim.zero_grad()
        told = model.step(*model.shard(x, y))
        found.append(record(model.module, told))
        optim.step()
    return found


def compiling(layout: Layout | None = None, **more: Any) -> Plan:
    words = {"parallel.compile": True, **more}
    return Plan(layout=layout or Layout()).replace(words, Provenance())


def check_equal(
    made: list[dict[str, Tensor | None]],
    right: list[dict[str, Tensor | None]],
    bound: float = 1e-10,
) -> None:
    assert len(made) == len(right)
    for own, other in zip(made, right, strict=True):
        held = (t for t in other.values() if t is not None and not t.is_meta)
        norms = [float(t.norm()) for t in held if t.is_floating_point()]
        for name, value in own.items():
            expected = other[name]
            if value is not None and value.is_meta:
                continue
            assert (value is None) == (expected is None), name
            if value is None or expected is None:
                continue
            assert value.shape == expected.shape
            error = float((value.double() - expected.double()).norm())
            assert error <= bound * max(float(expected.double().norm()), 1e-3 * max(norms)), name


def graphs_of(net: nn.Module, loss: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> int:
    """How many graphs were in use in one process; checks the numbers too."""
    used: list[compiled.Graph] = []
    usable = compiled.Graph.usable

    def noted(self: compiled.Graph, given: Any) -> bool:
        if found := usable(self, given):
            used.append(self)
        return found

    with pytest.MonkeyPatch.context() as patch, ff.start(compiling(), device="cpu") as mesh:
        patch.setattr(compiled.Graph, "usable", noted)
        made = compiled_steps(mesh, net, loss, batches)
    check_equal(made, one_process(net, loss, batches))
    return len({id(graph) for graph in used})


# ---- exact


def layouts(name: str) -> list[Layout]:
    axis = "width" if models.dims(name) == 2 else "depth"
    return [
        Layout(), Layout(data=2), Layout(**{axis: 2}), Layout(pipe=2), Layout(data=2, **{axis: 2}),
    ]  # fmt: skip


def cases(*, all_layouts: bool) -> list[tuple[str, Layout]]:
    """Every model under all layouts, or some under one of them."""
    found: list[tuple[str, Layout]] = []
    for number, name in enumerate(SMALL):
        mine = layouts(name)
        if all_layouts:
            found += [(name, one) for one in mine]
        elif number % 3 == 0:
            found.append((name, mine[number // 3 % len(mine)]))
    return found


@pytest.mark.long(every=4)
@pytest.mark.timeout(250)
@pytest.mark.filterwarnings("ignore:parallel.compile leaves as it is. BatchNorm.d .*register_hook")
@pytest.mark.parametrize(("name", "layout"), cases(all_layouts=False), ids=str)
def test_small_models_stay_exact(name: str, layout: Layout) -> None:
    stay_exact(name, layout)


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.filterwarnings("ignore:parallel.compile leaves as it is. BatchNorm.d .*register_hook")
@pytest.mark.parametrize(("name", "layout"), cases(all_layouts=True), ids=str)
def test_small_models_stay_exact_under_all_layouts(name: str, layout: Layout) -> None:
    stay_exact(name, layout)


def stay_exact(name: str, layout: Layout) -> None:
    torch.manual_seed(3)
    net, loss = net_of(name).double(), loss_of(name).double()
    batches = [
        (x.double(), y.double() if y.is_floating_point() else y)
        for x, y in map(batch_of, [name] * STEPS)
    ]
    words: dict[str, Any] = {"tiles.fuse": "2"}
    if layout.pipe > 1:
        words |= {"pipeline.micro_batches": 2, "pipeline.schedule": "1f1b"}
    as_without_compiling((net, loss, batches), layout, words)


def as_without_compiling(
    case: tuple[nn.Module, nn.Module, list[tuple[Tensor, Tensor]]],
    layout: Layout,
    words: dict[str, Any],
) -> None:
    """Under stages, which normalise each micro-batch, one process is another yardstick."""
    made = run_ranks(layout, compiled_steps, *case, plan=compiling(layout, **words), timeout_s=100)
    plan = Plan(layout=layout).replace(words, Provenance())
    plain = run_ranks(layout, compiled_steps, *case, plan=plan, timeout_s=100)
    for own, right in zip(made, plain, strict=True):
        check_equal(own, right)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.second, self.pool = nn.Conv2d(6, 6, 3, padding=1), nn.MaxPool2d(2)
        self.group, self.head = nn.GroupNorm(2, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu_(self.norm(self.first(x)))
        x = self.pool(x + self.group(self.second(x)))
        return self.head(x.mean((2, 3)))


def batches(sizes: list[tuple[int, int, int]]) -> list[tuple[Tensor, Tensor]]:
    made: list[tuple[Tensor, Tensor]] = []
    for number, (rows, height, width) in enumerate(sizes):
        draw = torch.Generator().manual_seed(number)
        x = torch.randn(rows, 3, height, width, generator=draw, dtype=torch.float64)
        made.append((x, torch.randint(0, 5, (rows,), generator=draw)))
    return made


SLOW = [pytest.param(layout, marks=pytest.mark.slow) for layout in (Layout(), Layout(width=2))]
SIZES = [(6, 9, 11), (6, 9, 11), (6, 9, 11), (5, 8, 7), (5, 8, 7), (6, 9, 11), (5, 8, 7)]


def changed(net: nn.Module, step: int) -> None:
    """What users do between steps."""
    found: Any = net
    if step == 2:
        found.norm.momentum, found.norm.eps = 0.3, 1e-2
    elif step == 3:
        found.norm.momentum = None
    elif step == 4:
        found.first.weight.requires_grad_(False)
        found.norm.register_buffer("running_mean", torch.ones(6, dtype=torch.float64))
    elif step == 5:
        found.norm.eval()
        found.first.weight.requires_grad_(True)
        found.group.eps = 1e-1
    elif step == 6:
        found.norm.train()
        found.norm.weight = nn.Parameter(torch.full((6,), 0.5, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:parallel.compile leaves as it is. BatchNorm2d .*__float__")
@pytest.mark.parametrize("layout", [Layout(), Layout(data=2), Layout(width=2)], ids=str)
def test_changes_between_steps_are_seen(layout: Layout) -> None:
    follow_changes(layout, SIZES)


def test_statistics_change_before_the_backward_of_a_micro_batch() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3)
    ).double()
    net = nn.Sequential(net, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    case = net, nn.CrossEntropyLoss(), batches([(8, 9, 11)] * 3)
    words = {"pipeline.micro_batches": 4, "pipeline.schedule": "1f1b"}
    as_without_compiling(case, Layout(pipe=2), words)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore:parallel.compile leaves as it is. BatchNorm2d .*__float__")
@pytest.mark.parametrize("layout", [Layout(data=2), *SLOW], ids=str)
def test_machine_code_stays_exact(kernels: None, layout: Layout) -> None:
    follow_changes(layout, SIZES[:4])


def follow_changes(layout: Layout, sizes: list[tuple[int, int, int]]) -> None:
    torch.manual_seed(0)
    case = Net().double(), nn.CrossEntropyLoss(), batches(sizes), changed
    right = one_process(*case)
    for own in run_ranks(layout, compiled_steps, *case, plan=compiling(layout), timeout_s=300):
        check_equal(own, right)


# ---- what is in a graph, and what is not


def test_one_process_is_one_graph() -> None:
    net = Net().double()
    assert graphs_of(net, nn.CrossEntropyLoss(), batches(SIZES[:3])) == 1


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 3 * ctx.saved_tensors[0] * grad  # not the derivative, on purpose


class Twice(nn.Module):
    """Two halves, with something between that stays as it is."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Linear(4, 6), nn.Linear(6, 5), between

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.one(x)) * 2
        return torch.sigmoid(self.two(self.between(x))) * 3


def flat(steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(6, 4, generator=draw, dtype=torch.float64),
            torch.randint(0, 5, (6,), generator=draw),
        )
        for _ in range(steps)
    ]


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().mean(1, keepdim=True)
    return x / scale


def detached(x: Tensor) -> Tensor:
    return x.detach() + x


@pytest.mark.parametrize(
    ("between", "graphs"),
    [(torch.square, 1), (without_gradients, 2), (detached, 1)],
    ids=["square", "no_grad", "detach"],
)
def test_what_belongs_together_is_one_graph(
    between: Callable[[Tensor], Tensor], graphs: int
) -> None:
    assert graphs_of(Twice(between).double(), nn.CrossEntropyLoss(), flat()) == graphs


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_takes_longer_as_a_graph_runs_as_it_is(
    deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sluggish(graph: Any, _inputs: Any) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            time.sleep(0.05)
            return graph(*given)

        return run

    monkeypatch.setattr(compiled, "_SLOWEST", 1.0)
    monkeypatch.setattr(compiled, "_BACKEND", sluggish)
    torch.use_deterministic_algorithms(deterministic)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # nothing is wrong with it
            used = graphs_of(Twice(torch.square).double(), nn.CrossEntropyLoss(), flat())
    finally:
        torch.use_deterministic_algorithms(False)
    assert used == (1 if deterministic else 0)


def test_where_nothing_is_fused_no_graph_is_made() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Flatten(), nn.ReLU())
    assert graphs_of(net.double(), nn.CrossEntropyLoss(), flat()) == 0


def test_an_autograd_function_stays_as_it_is_and_is_named() -> None:
    with pytest.warns(UserWarning, match=r"leaves as it is: .*in the net .*(user's|backward)"):
        assert graphs_of(Twice(Square.apply).double(), nn.CrossEntropyLoss(), flat()) == 2


class Heads(nn.Module):
    """The loss looks at one head, then at the other."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        return torch.tanh(self.one(x)), torch.tanh(self.two(x))


class OneHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(outputs[self.calls > 3], targets)


def test_what_the_loss_does_not_use_has_no_gradient() -> None:
    """Zeros would be decayed by an optimiser, in place of nothing."""
    net = Heads().double()
    right = one_process(net, OneHead(), flat(6))
    assert right[1]["two.weight"] is None
    assert right[4]["one.weight"] is None
    with warnings.catch_warnings(), ff.start(compiling(), device="cpu") as mesh:
        warnings.simplefilter("ignore")  # a loss that nobody knows is told
        made = compiled_steps(mesh, net, OneHead(), flat(6))
    check_equal(made, right)


# ---- compilers that fail


def test_a_graph_that_does_not_compile_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(torch, "compile", broken)
    with pytest.warns(
        UserWarning, match=r"from linear in .* runs as it is: RuntimeError: no compiler"
    ):
        assert graphs_of(Twice(torch.square).double(), nn.CrossEntropyLoss(), flat()) == 0


@pytest.mark.parametrize("wrong", ["outputs", "gradients", "gradients-missing", "buffers"])
def test_a_graph_that_computes_something_else_runs_as_it_is(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def miscompiled(graph: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def run(*given: Tensor) -> Any:
            if wrong == "gradients-missing":
                return graph(*(one.detach() if one.dim() == 1 else one for one in given))
            made = graph(*given)
            if wrong == "buffers":
                [one.data.add_(1) for one in given if one.dim() == 1 and not one.requires_grad]
                return made
            other = tuple(one * 1.001 for one in made)
            if wrong == "outputs":
                return other
            return tuple(a + (b - b.detach()) for a, b in zip(made, other, strict=True))

        return run

    monkeypatch.setattr(torch, "compile", miscompiled)
    with pytest.warns(
        UserWarning, match=f"runs as it is: compiled, its {wrong.partition('-')[0]} differ"
    ):
        assert graphs_of(Net().double(), nn.CrossEntropyLoss(), batches(SIZES[:3])) == 0


# ---- nets that are compiled already, and what does not go together


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_net_is_taken_as_it_was(in_place: bool) -> None:
    net, loss = Net().double(), nn.CrossEntropyLoss()
    right = one_process(net, loss, batches(SIZES[:3]))
    given: Any = copy.deepcopy(net)
    if in_place:
        given.compile()
    else:
        given = torch.compile(given)
    with ff.start(device="cpu") as mesh:
        with pytest.warns(UserWarning, match="the net is compiled: Fivefold takes the plain net"):
            model = ff.parallelize(given, mesh, loss=loss)
        assert [*model.state_dict()] == [*net.state_dict()]
        optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        made: list[dict[str, Tensor | None]] = []
        for x, y in batches(SIZES[:3]):
            optim.zero_grad()
            made.append(record(model.module, model.step(x, y)))
            optim.step()
        with pytest.raises(UsageError, match="memory is not predicted for compiled steps"):
            model.memory(*batches(SIZES[:1])[0])
    check_equal(made, right)


def test_a_part_that_is_compiled_is_refused() -> None:
    net = nn.Sequential(nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)))  # type: ignore[arg-type]
    with (
        ff.start(device="cpu") as mesh,
        pytest.raises(
            UsageError, match=r"'1' is compiled: give .* the plain net, and set parallel"
        ),
    ):
        ff.parallelize(net, mesh)


@pytest.mark.parametrize("words", [{"memory.budget": "1GiB"}, {"memory.recompute": 2}])
def test_what_is_computed_again_is_not_compiled(words: dict[str, Any]) -> None:
    loss = nn.CrossEntropyLoss()
    with (
        ff.start(compiling(**words), device="cpu") as mesh,
        pytest.raises(
            PlanError, match=r"parallel.compile cannot be used here, since memory.budget"
        ),
    ):
        ff.parallelize(Net(), mesh, loss=loss)
    plan = Plan().replace(words, Provenance())
    with (
        ff.start(plan, device="cpu") as mesh,
        pytest.warns(UserWarning, match="the net is compiled: Fivefold runs the plain net, since"),
    ):
        ff.parallelize(torch.compile(Net()), mesh, loss=loss)  # type: ignore[arg-type]


def test_a_net_that_cannot_be_recorded_runs_as_it_is() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * (2 if float(x.sum().detach()) > 0 else 3)

    net, loss = Odd().double(), nn.CrossEntropyLoss()
    with (
        ff.start(compiling(), device="cpu") as mesh,
        pytest.warns(UserWarning, match="parallel.compile leaves the net as it is, since"),
    ):
        made = compiled_steps(mesh, net, loss, flat())
    check_equal(made, one_process(net, loss, flat()))
