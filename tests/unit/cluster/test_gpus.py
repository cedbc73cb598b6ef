"""Which GPUs a process may use, and what NVML adds."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import machines
from fivefold.cluster import nvml
from fivefold.cluster.gpus import Gpu, _completed, gpus, visible
from nvml_table import NvmlTable


@pytest.fixture
def four(tmp_path: Path) -> tuple[Gpu, ...]:
    return gpus(machines.two_sockets(tmp_path))


@pytest.mark.parametrize(
    ("told", "chosen"),
    [
        ("0,1,2,3", [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        ("GPU-31b2", [3]),
        ("1,nonsense,2", [1]),  # CUDA stops at the first that it does not know
        ("7", []),
        ("-1", []),
        ("", []),
    ],
)
def test_cuda_visible_devices(four: tuple[Gpu, ...], told: str, chosen: list[int]) -> None:
    assert visible(four, {"CUDA_VISIBLE_DEVICES": told}) == tuple(four[i] for i in chosen)


def test_without_a_choice_all_are_visible_but_those_inside_a_processor(
    four: tuple[Gpu, ...], tmp_path: Path
) -> None:
    assert visible(four, {}) == four
    assert visible(gpus(machines.laptop(tmp_path / "laptop")), {}) == ()


def test_gpus_that_a_control_group_withholds_are_not_counted(tmp_path: Path) -> None:
    root = machines.two_sockets(tmp_path)
    (root / "dev/nvidia0").unlink()
    (root / "dev/nvidia2").unlink()
    found = gpus(root)
    assert [gpu.granted for gpu in found] == [False, True, False, True]
    # As Slurm sets it for a task with --gpus-per-task=1: the first of those that it may open.
    assert [gpu.address for gpu in visible(found, {"CUDA_VISIBLE_DEVICES": "0"})] == [
        "0000:41:00.0"
    ]


def test_render_nodes_of_other_makers(tmp_path: Path) -> None:
    root = machines.crusher(tmp_path)
    (root / "sys/bus/pci/devices/0000:c1:00.0/drm/renderD128").mkdir(parents=True)
    assert visible(gpus(root), {}) == ()
    machines.write(root, {"dev/dri/renderD128": ""})
    assert len(visible(gpus(root), {})) == 1


def test_amd_counts_what_rocr_left(tmp_path: Path) -> None:
    own = visible(gpus(machines.crusher(tmp_path)), {})
    assert len(own) == 1
    both = {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "3"}
    assert visible(own, both) == own
    assert visible(own, {"ROCR_VISIBLE_DEVICES": "1"}) == ()


class _Fake(ModuleType):
    """A library with one GPU, as older bindings answer: with bytes."""

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    def __init__(self, broken: bool = False) -> None:
        super().__init__("pynvml")
        self.broken, self.open = broken, 0

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open -= 1

    def __getattr__(self, name: str) -> object:
        answers = {
            "nvmlDeviceGetCount": 1,
            "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:C1:00.0"),
            "nvmlDeviceGetName": b"NVIDIA A100",
            "nvmlDeviceGetUUID": "GPU-1",
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=40 << 30),
            "nvmlDeviceGetMigMode": (0, 0),
        }

        def answer(*_: object) -> object:
            return answers[name]

        return answer


def test_what_nvml_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Fake()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    told = nvml.devices()
    assert told == {"0000:c1:00.0": nvml.Told("NVIDIA A100", "GPU-1", 40 << 30)}
    assert library.open == 0


def test_a_broken_nvml_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _Fake(broken=True))
    assert nvml.devices() == {}


# ---- MIG. What NVML answers was written by its documentation: see nvml_table.py

BIG, SMALL, PART = (
    f"MIG-{begin}-0000-5000-8000-000000000000" for begin in ("11110000", "22220000", "22223333")
)
GPUS = [f"GPU-{n}1b2c3d4-0000-4000-8000-00000000000{n}" for n in range(4)]


@pytest.fixture
def divided(four: tuple[Gpu, ...], monkeypatch: pytest.MonkeyPatch) -> tuple[Gpu, ...]:
    """Four GPUs: the first in three slices, the second divided by MIG and without any, and two whole ones."""
    monkeypatch.setitem(sys.modules, "pynvml", NvmlTable())
    told = nvml.devices()
    return tuple(_completed(gpu, told[gpu.address]) for gpu in four)


def test_nvml_tells_slices(divided: tuple[Gpu, ...]) -> None:
    first, second, third, fourth = divided
    assert [one.slices for one in (second, third, fourth)] == [(), None, None]
    assert first.slices is not None
    assert first.memory_bytes is None  # of the whole GPU not everybody may know
    assert [(one.uuid, one.gpu_instance, one.compute_instance) for one in first.slices] == [
        (BIG, 2, 0),
        (SMALL, 7, 0),
        (PART, 5, 1),
    ]
    assert [one.memory_bytes for one in first.slices] == [20937965568, 5100273664, None]


@pytest.mark.parametrize(
    ("told", "chosen"),
    [
        (None, [BIG, SMALL, PART, GPUS[2], GPUS[3]]),
        ("0", [BIG, SMALL, PART]),
        ("1", []),
        ("2,0", [GPUS[2], BIG, SMALL, PART]),
        (f"{GPUS[0]}", [BIG, SMALL, PART]),
        (f"{SMALL},{BIG}", [SMALL, BIG]),
        ("MIG-1111,MIG-2222,3", [BIG]),  # the second may mean two
        (f"{PART},{PART},{GPUS[3]}", [PART, GPUS[3]]),
        (f"MIG-{GPUS[0]}/7/0,MIG-{GPUS[0]}/5/1", [SMALL, PART]),  # drivers before 470
        (f"MIG-{GPUS[0]}/7/1", []),
        (f"MIG-{GPUS[1]}/7/0", []),
        ("MIG-9999", []),
    ],
)
def test_slices_are_what_a_process_may_use(
    divided: tuple[Gpu, ...], told: str | None, chosen: list[str]
) -> None:
    found = visible(divided, {} if told is None else {"CUDA_VISIBLE_DEVICES": told})
    assert [gpu.uuid for gpu in found] == chosen
    assert [gpu.is_slice for gpu in found] == [one.startswith("MIG") for one in chosen]


def test_a_slice_lies_where_its_gpu_does(divided: tuple[Gpu, ...]) -> None:
    part = visible(divided, {"CUDA_VISIBLE_DEVICES": SMALL})[0]
    assert (part.address, part.numa) == (divided[0].address, divided[0].numa)
    assert (part.name, part.memory_bytes) == ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5100273664)


def test_uuids_that_the_driver_does_not_tell_are_none(tmp_path: Path) -> None:
    root = machines.two_sockets(tmp_path)
    told = root / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    told.write_text(told.read_text().replace(GPUS[0], "GPU-????????-????-????-????-????????????"))
    assert [gpu.uuid for gpu in gpus(root)] == ["", *GPUS[1:]]


def test_what_computes_on_which_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", NvmlTable())
    assert nvml.computing() == {uuid: {4711} if n == 2 else set() for n, uuid in enumerate(GPUS)}
