"""Numbers, addresses and cores of helpers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fivefold.cluster import cores
from fivefold.cluster.cores import physical
from fivefold.errors import UsageError
from fivefold.launch import helpers
from fivefold.launch.helpers import Helpers, narrowed, plan_helpers
from fivefold.launch.hosts import LOCAL, Host
from fivefold.launch.job import Job

PATH = {"PATH": os.environ["PATH"]}


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that grants cores 4 to 11, with no siblings told."""
    monkeypatch.setattr(helpers, "affinity", lambda: tuple(range(4, 12)))
    monkeypatch.setattr(helpers, "granted_cores", lambda: 8)
    monkeypatch.setattr(helpers, "physical", lambda mask: physical(mask, Path("/nowhere")))


def planned(*hosts: Host, share_cores: bool = False) -> Helpers:
    found = plan_helpers(hosts, ["python", "a.py"], share_cores=share_cores, environ=PATH)
    assert found is not None
    return found


def test_nobody_is_nobody() -> None:
    assert plan_helpers([], ["python"], environ=PATH) is None


@pytest.mark.usefixtures("eight_cores")
def test_helpers_of_this_node_get_its_last_cores() -> None:
    found = planned(Host(LOCAL, 2), Host(LOCAL, 1))
    assert [helper.cores for helper in found.members] == [(9,), (10,), (11,)]
    assert (found.trainer_cores, found.threads) == ((4, 5, 6, 7, 8), 5)
    assert [helper.number for helper in found.members] == [0, 1, 2]
    assert len({helper.address for helper in found.members}) == 3
    assert all(helper.address.startswith("unix:/") for helper in found.members)


@pytest.mark.usefixtures("eight_cores")
def test_cores_of_a_host_file_are_taken_from_the_trainers() -> None:
    found = planned(Host(LOCAL, 2, (4, 5)), Host(LOCAL, 1))
    assert [helper.cores for helper in found.members] == [(4, 5), (4, 5), (11,)]
    assert found.trainer_cores == (6, 7, 8, 9, 10)
    assert found.for_helper(found.members[0])["OMP_NUM_THREADS"] == "1"
    alone = planned(Host(LOCAL, 1, (4, 5)))
    assert alone.for_helper(alone.members[0])["OMP_NUM_THREADS"] == "2"


@pytest.mark.usefixtures("eight_cores")
def test_cores_may_be_shared() -> None:
    found = planned(Host(LOCAL, 9), share_cores=True)
    assert {helper.cores for helper in found.members} == {()}
    assert (found.trainer_cores, found.threads) == (tuple(range(4, 12)), 8)


@pytest.mark.usefixtures("eight_cores")
def test_a_helper_gets_a_physical_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for core in range(4, 12):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{core % 4 + 4},{core % 4 + 8}\n")
    monkeypatch.setattr(helpers, "physical", lambda mask: physical(mask, tmp_path))
    found = planned(Host(LOCAL, 1))
    assert found.members[0].cores == (7, 11)
    assert found.trainer_cores == (4, 5, 6, 8, 9, 10)


@pytest.mark.usefixtures("eight_cores")
def test_a_quota_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpers, "granted_cores", lambda: 3)
    found = planned(Host(LOCAL, 1))
    assert (len(found.trainer_cores), found.threads) == (7, 2)
    with pytest.raises(
        UsageError, match="3 helpers on this node leave no core for the trainers: 3"
    ):
        planned(Host(LOCAL, 3))


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize("slots", [8, 9])
def test_trainers_need_a_core(slots: int) -> None:
    with pytest.raises(UsageError, match=r"leave no core.*: 8 are granted; .*offload\.share_cores"):
        planned(Host(LOCAL, slots))


@pytest.mark.usefixtures("eight_cores")
def test_cores_that_are_not_ours_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"cores=2-3 of the host file are not granted .* cores 4-11"
    ):
        planned(Host(LOCAL, 1, (2, 3, 4)))


def test_helpers_elsewhere_listen_at_ports_in_a_row() -> None:
    environ = {**PATH, "FIVEFOLD_RSH": "sh -c"}
    hosts = [Host("me@dpu01", 2, (0,), 21001), Host("dpu02", 2)]
    found = plan_helpers(hosts, ["python", "a.py"], environ=environ)
    assert found is not None
    first, second, third, fourth = found.members
    assert (first.address, first.listens) == ("dpu01:21001", "0.0.0.0:21001")
    assert (second.host, second.address) == ("me@dpu01", "dpu01:21002")
    port = int(third.address.removeprefix("dpu02:"))
    assert 20000 <= port < 32000 and fourth.address == f"dpu02:{port + 1}"
    assert found.trainer_cores == cores.affinity()


def test_a_remote_shell_is_needed_for_other_hosts() -> None:
    for told in ("no-such-shell -q", "'"):
        environ = {**PATH, "FIVEFOLD_RSH": told}
        with pytest.raises(UsageError, match="FIVEFOLD_RSH"):
            plan_helpers([Host("dpu01")], ["python"], environ=environ)


def test_helpers_by_hand_and_by_the_launcher_do_not_mix() -> None:
    environ = {**PATH, "FIVEFOLD_HELPERS": "dpu01:1"}
    with pytest.raises(UsageError, match="FIVEFOLD_HELPERS is set, and helpers are to be started"):
        plan_helpers([Host(LOCAL)], ["python"], share_cores=True, environ=environ)


def test_another_host_may_have_another_python() -> None:
    import sys

    environ = {**PATH, "FIVEFOLD_RSH": "sh -c"}
    hosts = [Host("dpu01", python="/arm/python")]
    found = plan_helpers(hosts, [sys.executable, "a.py"], environ=environ)
    assert found is not None
    assert found.command_of(found.members[0]) == ["/arm/python", "a.py"]


def test_trainers_are_told_and_divide_what_is_left(tmp_path: Path) -> None:
    found = planned(Host(LOCAL, 1), share_cores=True)
    job = Job(["python", "a.py"], 1, log_dir=tmp_path, helpers=found)
    environ = job.rank_environment("local")
    assert environ["FIVEFOLD_HELPERS"] == found.members[0].address
    assert len(bytes.fromhex(environ["FIVEFOLD_HELPER_KEY"])) == 32
    assert found.key not in repr(job)
    assert "FIVEFOLD_ROLE" not in environ


def test_this_process_runs_on_fewer_cores_while_it_lasts() -> None:
    before = os.sched_getaffinity(0)
    found = planned(Host(LOCAL, 1), share_cores=True)
    few = Helpers(found.members, found.command, found.folder, (min(before),), 1)
    with narrowed(few):
        assert os.sched_getaffinity(0) == {min(before)}
    assert os.sched_getaffinity(0) == before
    with narrowed(None):
        assert os.sched_getaffinity(0) == before
