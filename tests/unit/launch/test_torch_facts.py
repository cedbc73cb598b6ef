"""PyTorch is asked in a process of its own, whatever state it is in. Here it is a file of some lines."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fivefold.launch.torch_facts import Probe, TorchFacts

GOOD = """
from types import SimpleNamespace
print("a banner of some plug-in")
__version__ = "2.13.0+cu130"
version = SimpleNamespace(cuda="13.0", hip=None)
cuda = SimpleNamespace(device_count=lambda: 4)
"""


def ask(tmp_path: Path, source: str, limit_s: float = 60.0) -> TorchFacts:
    (tmp_path / "torch.py").write_text(source)
    with Probe({**os.environ, "PYTHONPATH": str(tmp_path)}, limit_s) as probe:
        return probe.answer()


def test_a_build_for_gpus(tmp_path: Path) -> None:
    found = ask(tmp_path, GOOD)
    assert (found.version, found.gpus_of, found.devices) == ("2.13.0+cu130", "CUDA 13.0", 4)
    assert found.problem == "" and found.seconds > 0


def test_a_build_for_cpus(tmp_path: Path) -> None:
    found = ask(tmp_path, GOOD.replace('"13.0"', "None").replace(": 4", ": 0"))
    assert (found.gpus_of, found.devices) == ("", 0)


def test_a_build_for_gpus_of_amd(tmp_path: Path) -> None:
    found = ask(tmp_path, GOOD.replace('cuda="13.0", hip=None', 'cuda=None, hip="6.4"'))
    assert (found.gpus_of, found.devices) == ("ROCm 6.4", 4)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (
            "raise ImportError('libcudart.so.13: cannot open')",
            "ImportError: libcudart.so.13: cannot open",
        ),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "importing it ended with SIGSEGV",
        ),
        ("import sys; sys.exit(3)", "importing it ended with code 3"),
        (GOOD + "import atexit; atexit.register(print, 'bye')", "it answered 'bye'"),
        ("", "AttributeError: module 'torch' has no attribute 'version'"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(tmp_path: Path, source: str, problem: str) -> None:
    found = ask(tmp_path, source)
    assert found.problem.startswith(problem)
    assert found.version == ""


def test_the_process_that_is_asked_records_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIVEFOLD_TRACE", str(tmp_path))
    told = GOOD.replace('"2.13.0+cu130"', 'str(__import__("os").environ.get("FIVEFOLD_TRACE"))')
    assert ask(tmp_path, told).version == "None"


def test_a_slow_import_is_ended_when_the_time_is_up(tmp_path: Path) -> None:
    began = time.monotonic()
    found = ask(tmp_path, "import time; time.sleep(300)", limit_s=0.5)
    assert found.problem == "it was not imported within 0.5 s"
    assert time.monotonic() - began < 60  # of 300; no process is left behind (tests/conftest.py)


def test_a_question_that_is_given_up_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time; time.sleep(300)")
    with Probe({**os.environ, "PYTHONPATH": str(tmp_path)}):
        pass
