import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

import fivefold as ff
from fivefold import comm
from fivefold.errors import PlanError
from fivefold.mesh import Mesh
from fivefold.plan import AXES, Layout, Plan, Provenance
from fivefold.trace import Tag, recording
from ranks import run_ranks

CPU = torch.device("cpu")


def test_ranks_are_row_major_with_tiles_innermost() -> None:
    layout = Layout(data=2, pipe=1, height=2, width=2)

    def where(mesh: Mesh) -> tuple[int, ...]:
        return tuple(mesh.coordinate(axis) for axis in AXES)

    places = run_ranks(layout, where)
    assert places == [(d, 0, 0, h, w) for d in range(2) for h in range(2) for w in range(2)]


def test_a_mesh_is_told_in_one_line() -> None:
    told = run_ranks(Layout(data=2, height=2), str)
    assert told[3] == "Mesh(rank 3 of 4, data=2,height=2, cpu)"


def test_a_group_joins_the_ranks_that_differ_along_its_axes_only() -> None:
    asked = {
        ("data",): [1, 5],
        ("width",): [4, 5],
        ("width", "height"): [4, 5, 6, 7],
        ("data", "pipe", "width"): [0, 1, 4, 5],
        ("pipe", "depth"): [5],
    }

    def members(mesh: Mesh) -> list[tuple[list[int], list[int]]]:
        def of(group: dist.ProcessGroup) -> list[int]:
            return comm.all_gather(torch.tensor([mesh.rank]), group, Tag.CONTROL).flatten().tolist()

        return [(of(mesh.group(*axes)), of(mesh.own_group(*axes))) for axes in asked]

    assert run_ranks(Layout(data=2, height=2, width=2), members)[5] == [
        (ranks, ranks) for ranks in asked.values()
    ]


def test_every_group_waits_as_long_as_the_plan_says() -> None:
    def limits(mesh: Mesh) -> set[float]:
        groups = [mesh.group(axis) for axis in AXES]
        groups += [mesh.group("data", "height"), mesh.own_group("height"), mesh.own_group(*AXES)]
        groups += [mesh.device_mesh.get_group(axis) for axis in AXES]
        groups += [mesh.device_mesh[axis].get_group() for axis in AXES]
        groups += [mesh.pair_group("data"), mesh.joint_group({0}, "data"), mesh.own_group()]
        replicas = mesh.own_replicas()
        groups += [replicas.get_group("data"), replicas.get_group("tiles")]
        return {group._get_backend(CPU).options._timeout.total_seconds() for group in groups}

    layout = Layout(data=2, height=2)
    plan = Plan(layout=layout).replace({"comm.timeout_s": 77.0}, Provenance("user", "test"))
    assert run_ranks(layout, limits, plan=plan, timeout_s=2 * 77) == [{77.0}] * 4


def test_the_share_of_a_batch_follows_the_data_axis() -> None:
    shares = run_ranks(Layout(data=3, width=2), lambda mesh: tuple(mesh.share(8)))
    assert shares == [(0, 1), (0, 1), (2, 3, 4), (2, 3, 4), (5, 6, 7), (5, 6, 7)]


def test_a_layout_that_does_not_fit_says_what_would() -> None:
    plan = Plan().replace({"layout.data": 3}, Provenance("user", "--layout"))
    with pytest.raises(PlanError) as error:
        ff.start(plan, device="cpu")
    message = str(error.value)
    assert "data=3 (user: --layout) needs 3 processes, but 1 was started" in message
    assert "fivefold run -n 3" in message


def test_alone_it_is_a_mesh_of_one_and_leaves_nothing_behind() -> None:
    with ff.start(device="cpu") as mesh:
        assert (mesh.rank, mesh.size, mesh.layout) == (0, 1, Layout())
        assert mesh.group("data").size() == 1
        assert dist.is_initialized()
        with pytest.raises(PlanError, match="did you mean 'width'"):
            mesh.group("widht")
    assert not dist.is_initialized()
    mesh.stop()


def test_a_layout_that_nobody_chose_becomes_data() -> None:
    layouts = run_ranks(3, lambda mesh: mesh.layout, plan=Plan())
    assert layouts == [Layout(data=3)] * 3


def test_collectives_are_timed_under_their_tag() -> None:
    def check(mesh: Mesh) -> tuple[int, int]:
        with recording() as recorder:
            comm.all_reduce(torch.ones(3), mesh.group("data"), Tag.LOSS)
            comm.start_all_reduce(torch.ones(3), mesh.group("data"), Tag.GRADIENTS).wait()
        return recorder.stats[Tag.LOSS].count, recorder.stats[Tag.GRADIENTS].count

    assert run_ranks(2, check) == [(1, 2)] * 2  # at once; issue and wait


def test_text_is_told_by_the_first_rank() -> None:
    def check(mesh: Mesh) -> str:
        mine = "runs/größe-001" if mesh.rank == 0 else None
        return comm.broadcast_text(mine, mesh.group("data"), mesh.device)

    assert run_ranks(3, check) == ["runs/größe-001"] * 3


def test_a_collective_that_fails_names_rank_operation_and_tag() -> None:
    def check(mesh: Mesh) -> str:
        if mesh.rank == 1:
            return ""
        with pytest.raises(comm.CommError) as error:
            comm.all_reduce(torch.ones(1), mesh.group("data"), Tag.BATCH_NORM)
        return str(error.value)

    said = run_ranks(2, check, timeout_s=20)[0]
    assert "rank 0 of 2: all_reduce for batch-norm statistics failed" in said


def test_layouts_of_thousands_of_ranks_are_cheap_to_lay_out() -> None:
    store = torch.testing._internal.distributed.fake_pg.FakeStore()
    dist.init_process_group("fake", store=store, rank=1029, world_size=2048)
    try:
        mesh = ff.start(Plan(layout=Layout(data=8, pipe=4, height=8, width=8)), device="cpu")
        assert [mesh.coordinate(axis) for axis in AXES] == [4, 0, 0, 0, 5]
        assert mesh.share(64) == range(32, 40)
        mesh.stop()
        assert dist.is_initialized()  # it was running before start
    finally:
        dist.destroy_process_group()
