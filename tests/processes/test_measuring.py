"""What a planner measures: steps on one core, processes that keep the others busy, messages between two."""

from __future__ import annotations

import copy
import time

import psutil
import pytest
import torch
from torch import nn

from fivefold.errors import UsageError
from fivefold.plan import Layout
from fivefold.tune.candidates import Candidate
from fivefold.tune.machine import this_machine
from fivefold.tune.measure import measured_between, measuring, others_busy
from fivefold.tune.predict import Case
from fivefold.tune.subject import Subject


def test_steps_are_timed_and_the_net_stays_as_it_was() -> None:
    sample = (16, 32, 32)
    net = nn.Sequential(
        nn.Conv2d(16, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * 15 * 15, 3),
    )  # fmt: skip
    before = copy.deepcopy(net.state_dict())
    with measuring(net, sample, 1, optimizer="adam") as measured:
        timed = Subject(net, sample, this_machine(1), measured=measured)
        work = timed.staged(Layout(), 1, 2).work
        case = Case(timed, Candidate(Layout(pipe=2), "gpipe", 2), 4, "adam")
        told = case.predict()
    assert all(s > 0 for s in work.forward_s[:2]) and work.backward_s[0] > work.weight_s[0] >= 0
    assert told.parts.update_s > 0
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.long
def test_others_are_busy_meanwhile() -> None:
    me = psutil.Process()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    before = set(me.children())
    with others_busy(1, net, (2, 3, 8, 8)):
        (other,) = set(me.children()) - before
        begun_s = other.cpu_times().user
        time.sleep(0.5)
        assert other.cpu_times().user > begun_s
    assert not other.is_running()


def test_a_net_that_no_other_process_can_have_is_refused() -> None:
    class Here(nn.Module):
        pass

    with pytest.raises(UsageError, match="at the top of a module"), others_busy(1, Here(), (1,)):
        pass


@pytest.mark.long
def test_messages_are_timed_between_processes() -> None:
    between = measured_between()
    link = between.link
    assert 0 < between.action_s < 0.1
    assert 0 < link.latency_s < 1 and 1e4 < link.bytes_per_s < 1e13 and 0 < link.reduction_s < 1
