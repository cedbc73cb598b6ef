"""What kernels take beside their tensors counts where they take it; a CPU that counts stands in for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.parallel.memory import step
from fivefold.parallel.memory.slots import Counts
from fivefold.parallel.program.weightless import Count
from fivefold.plan import Provenance
from fivefold.torch_private import FakeTensor

Decision = step.Decision
CONV, BACKWARD = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default


class Greedy(Count):
    """Counts what real tensors take, and what convolutions with weights of some shapes take beside them."""

    def __init__(
        self, existing: list[Tensor], takes: dict[tuple[Any, tuple[int, ...]], int]
    ) -> None:
        super().__init__(existing, "cpu")
        self.takes = takes

    def again(self) -> None:
        """The most counts anew."""
        self._most = self._now

    def _add(self, tensor: Tensor) -> None:
        if not isinstance(tensor, FakeTensor):
            super()._add(tensor)

    def result(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        found = func(*args, **kwargs)
        if func in (CONV, BACKWARD):
            weight = args[1] if func is CONV else args[2]
            made = [t for t in (found if isinstance(found, tuple) else (found,)) if t is not None]
            if not isinstance(weight, FakeTensor):
                taken = self.takes.get((func, tuple(weight.shape)), 0)
                most = self.now() + sum(t.nbytes for t in made) + taken
                self._lately, self._most = max(self._lately, most), max(self._most, most)
        return found


def net() -> nn.Module:
    """Most is alive in the middle of a step; the first convolution is alone with the batch."""
    layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(6):
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Steps of such a net under a budget: what was chosen, the most alive in each, parameters, workspaces."""
    counts: list[Greedy] = []

    def count_of(_: torch.device) -> Counts:
        return counts[-1]

    def made(
        budget: int, takes: dict[tuple[Any, tuple[int, ...]], int]
    ) -> tuple[str, list[int], list[Tensor], list[int]]:
        decisions: list[step.Decision] = []

        def decided(*values: Any) -> step.Decision:
            decisions.append(Decision(*values))
            return decisions[-1]

        monkeypatch.setattr(step, "device_count", count_of)
        monkeypatch.setattr(step, "Decision", decided)
        torch.manual_seed(0)
        own, x, y = net(), torch.randn(8, 3, 64, 64), torch.randint(0, 4, (8,))
        most: list[int] = []
        plan = ff.Plan().replace({"memory.budget": f"{budget}B"}, Provenance("user", "test"))
        present = [*own.parameters(), *own.buffers(), x, y]
        with Greedy(present, takes) as count, ff.start(plan, device=torch.device("cpu")) as mesh:
            counts.append(count)
            model = ff.parallelize(own, mesh, loss=nn.CrossEntropyLoss())
            optimiser = torch.optim.SGD(own.parameters(), lr=0.01)
            for _ in range(8):
                optimiser.zero_grad()
                count.again()
                model.step(x, y)
                most.append(count.most())
                optimiser.step()
            told = str(model.memory(x, y))
        (decision,) = decisions
        return (
            told,
            most,
            [p.detach().clone() for p in own.parameters()],
            [*decision.workspaces.values()],
        )

    yield made
    counts.clear()


def test_what_little_is_beside_may_take_much(steps: Callable[..., Any]) -> None:
    _, free, kept, none = steps(1 << 40, {})
    much = int(0.6 * free[-1])
    told, most, found, workspaces = steps(int(1.05 * free[-1]), {(CONV, (8, 3, 3, 3)): much})
    assert not none and 0.8 * much < max(workspaces) <= much
    assert "computed again" not in told, told
    assert max(most[4:]) <= 1.05 * free[-1]
    assert all(map(torch.equal, found, kept))


@pytest.mark.parametrize("where", [CONV, BACKWARD], ids=["forward", "backward"])
def test_what_much_is_beside_may_take_less(where: Any, steps: Callable[..., Any]) -> None:
    _, free, kept, none = steps(1 << 40, {})
    takes = {(where, (8, 8, 3, 3)): int(0.2 * free[-1])}
    told, most, found, workspaces = steps(int(0.8 * free[-1]), takes)
    (taken,) = takes.values()
    assert not none and sum(0.99 * taken < size <= taken for size in workspaces) >= 2
    assert "again" in told, told
    assert 0.5 * free[-1] < max(most[4:]) <= 0.8 * free[-1]
    assert all(map(torch.equal, found, kept))
