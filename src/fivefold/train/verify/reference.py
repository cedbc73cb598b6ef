"""Asking one process that trains the unmodified model on the whole batch: what every layout has to equal.

The net is built anew for every question, from the seed that the layout's net is built from, so that hooks,
closures and caches are real ones on both sides; `one_process` trains it, which shares no code with Fivefold.
Where net and loss are `Named`, that is a process of its own.

Random masks are a function of (seed, step, node, global sample) under every layout, `data=1` included. A net
that draws random numbers is therefore run with those masks instead of torch's.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fivefold.train.verify import one_process
from fivefold.train.verify.measure import StepResult

__all__ = [
    "OPTIMIZER",
    "CannotRun",
    "Named",
    "Reference",
    "ReferenceStep",
    "default_dtype",
    "seeded",
]

OPTIMIZER: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
"""Of both sides. Momentum and decay move a weight whose gradient is zero, but not one whose gradient is
missing, so that the updated weights tell these apart."""


@dataclass(frozen=True)
class Named:
    """A function and its arguments, by names that another process can import."""

    module: str
    function: str
    arguments: tuple[Any, ...] = ()

    def __call__(self) -> Any:
        """What the function returns."""
        return getattr(importlib.import_module(self.module), self.function)(*self.arguments)

    def told(self) -> dict[str, Any]:
        """As a request has it."""
        return {
            "module": self.module,
            "function": self.function,
            "arguments": list(self.arguments),
        }


@dataclass(frozen=True)
class ReferenceStep:
    """What a step of one process started from, and computed."""

    state: Mapping[str, Mapping[str, Tensor]]
    """`weights`, `buffers` and `momentum` by name"""
    snapshot: StepResult
    draws: bool
    """whether the net draws random numbers"""
    uncontrolled: bool
    """whether some of them do not follow the global sample"""


class CannotRun(Exception):
    """One process alone cannot train the net."""


class Reference:
    """One process; `loss` is a loss, or `Named` what makes one, or None if `build` returns (net, loss).

    To be closed, since it may have started one.
    """

    def __init__(
        self,
        build: Callable[[], Any],
        loss: Any,
        batches: Sequence[tuple[Any, Any]],
        micro_batches: Sequence[list[list[int]] | None],
        *,
        seed: int,
        device: torch.device,
    ) -> None:
        self._build, self._loss, self._batches = build, loss, list(batches)
        self._process: subprocess.Popen[str] | None = None
        self._request: dict[str, Any] = {
            "seed": seed,
            "masks": seed,
            "device": str(device),
            "optimizer": OPTIMIZER,
            "evaluate": [],
            "threads": torch.get_num_threads(),
            "steps": [
                {"batch": number, "micro_batches": parts}
                for number, parts in enumerate(micro_batches)
            ],
        }

    def train(
        self,
        dtype: torch.dtype,
        *,
        states: Sequence[Any] | None = None,
        rounded: torch.dtype | None = None,
        moved: int | None = None,
    ) -> list[ReferenceStep]:
        """All steps in `dtype`, from `states` if they are given, else each from where the last one ended.

        With `rounded`, states are rounded to that dtype; with `moved`, inputs are moved to neighbouring
        numbers. Raises `CannotRun`.
        """
        name = _name(dtype)
        request = {**self._request, "dtype": name, "cast": name, "moved": moved}
        request["round"] = None if rounded is None else _name(rounded)
        if isinstance(self._build, Named) and isinstance(self._loss, Named):
            records = self._asked(request, self._build, self._loss, states)
        else:
            records = self._here(request, states)
        return [_step(record) for record in records]

    def _here(self, request: dict[str, Any], states: Sequence[Any] | None) -> list[Any]:
        made: list[Any] = []

        def net() -> Any:
            made.append(self._build())
            return made[0][0] if self._loss is None else made[0]

        def loss() -> Any:
            return made[0][1] if self._loss is None else _copied(self._loss)

        told = {**request, "net": net, "loss": loss, "batch": self._batches.__getitem__}
        dtype, device = getattr(torch, request["dtype"]), torch.device(request["device"])
        with default_dtype(dtype), seeded(0, device):
            try:
                return one_process.OneProcess({**told, "states": states}).results()["steps"]
            except Exception as problem:
                raise CannotRun(_said(type(problem).__name__, str(problem))) from problem

    def _asked(
        self, request: dict[str, Any], build: Named, loss: Named, states: Sequence[Any] | None
    ) -> list[Any]:
        with tempfile.TemporaryDirectory(prefix="fivefold-verify-") as name:
            folder = Path(name)
            torch.save(self._batches, folder / "batches.pt")
            request |= {"net": build.told(), "loss": loss.told(), "path": [str(Path.cwd())]}
            request |= {"batch": {"file": str(folder / "batches.pt")}}
            request |= {"answer": str(folder / "answer.pt")}
            if states is not None:
                torch.save(list(states), folder / "states.pt")
                request["states"] = str(folder / "states.pt")
            said = self._told(json.dumps({**request, "apart": True}))
            answer = json.loads(said)
            if answer["error"] is not None:
                raise CannotRun(_said(answer["kind"], answer["error"]))
            return torch.load(folder / "answer.pt", weights_only=True)["steps"]

    def _told(self, request: str) -> str:
        """What the other process says. Importing torch takes longer than most questions: it does so once."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, one_process.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        with contextlib.suppress(BrokenPipeError):
            asked.write(request + "\n")
            asked.flush()
        said = answers.readline()
        if not said:
            raise CannotRun(f"the process that tried ended with {self._process.wait()}")
        return said

    def close(self) -> None:
        """Let the other process end."""
        if self._process is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None


def _step(record: Mapping[str, Any]) -> ReferenceStep:
    found = [leaf for leaf in record["outputs"].values() if isinstance(leaf, Tensor)]
    names = ["output"] if len(found) == 1 else [f"output {i}" for i in range(len(found))]
    snapshot = StepResult(
        loss={"loss": record["loss"]},
        outputs=dict(zip(names, found, strict=True)),
        gradients=record["gradients"],
        buffers=record["buffers"],
        weights=record["weights"],
    )
    return ReferenceStep(record["before"], snapshot, record["draws"], record["uncontrolled"])


def _copied(loss: Any) -> Any:
    return copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss


def _said(kind: str, text: str) -> str:
    said = text.strip().splitlines() or ["no reason given"]
    return f"{kind}: {said[0]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Generator[None]:
    """Within the block all global generators start from `seed`; afterwards they go on where they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Generator[None]:
    """A net that makes tensors of its own, `torch.zeros(n)`, makes them in the dtype it is run in."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
