"""Which GPUs a process may use, and what NVML adds."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import machines
from fivefold.cluster import nvml
from fivefold.cluster.gpus import Gpu, gpus, visible


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
