from __future__ import annotations

import pytest
import torch

from fivefold.train import warmup_cosine


def rates(steps: int, warmup: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = warmup_cosine(optimizer, steps, warmup)
    used = []
    for _ in range(steps):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return used


def test_rises_to_the_full_rate_and_falls_towards_nothing():
    used = rates(steps=10, warmup=4)
    assert used[:4] == pytest.approx([0.125, 0.25, 0.375, 0.5])
    assert used[4:] == sorted(used[4:], reverse=True)
    assert used[4] == pytest.approx(0.5)
    assert used[7] == pytest.approx(0.25), "half of the way down, half of the rate"
    assert 0 < used[-1] < 0.05


def test_a_short_run_still_reaches_the_full_rate():
    assert max(rates(steps=4, warmup=100)) == pytest.approx(0.5)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_shortest_runs_have_a_rate(steps: int):
    assert rates(steps, warmup=0)[0] == pytest.approx(0.5)
