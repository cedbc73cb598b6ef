"""What a rank does: the case under its layout, and a record of everything that can be compared."""

from __future__ import annotations

import contextlib
import importlib
import math
import random
import traceback
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import fivefold as ff
from fivefold.comm import CommError
from fivefold.errors import FivefoldError
from fivefold.mesh import part_of
from fivefold.parallel.program import compiled
from fivefold.plan import Provenance
from fuzz import choices, events, nets
from fuzz.cases import Case
from fuzz.judge import DEVICE, OPTIMIZER, called, made_by
from fuzz.leaves import flat

__all__ = ["run"]


def run(case: Case, fault: str = "") -> dict[str, Any]:
    """Everything about a case on this rank; whatever is raised is part of it.

    `ended` is "done", "refused" or "raised". `fault` names a function of `fuzz.faults`, or another as
    module:function, that returns a context in which something is broken.
    """
    told: dict[str, Any] = {"ended": "done", "steps": [], "evaluated": [], "outside": None}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        under = _Under(case, told)
        try:
            with _fault(fault):
                under.run()
        except Exception as problem:  # noqa: BLE001 - it is what is looked for
            refused = isinstance(problem, FivefoldError) and not isinstance(problem, CommError)
            told["ended"] = "refused" if refused else "raised"
            told["kind"], told["text"] = type(problem).__name__, str(problem)
            told["trace"] = traceback.format_exc()
        told["fakes"] = [] if under.net is None else list(_fakes(under.net))
    told["warnings"] = sorted({str(w.message) for w in heard})
    return told


def _fault(name: str) -> AbstractContextManager[Any]:
    if not name:
        return contextlib.nullcontext()
    module, _, function = name.rpartition(":")
    return getattr(importlib.import_module(module or "fuzz.faults"), function)()


class _Under:
    def __init__(self, case: Case, told: dict[str, Any]) -> None:
        self.case, self.told, self.made = case, told, made_by(case)
        self.net: nn.Module | None = None

    def run(self) -> None:
        """Build, train, evaluate."""
        case = self.case
        torch.set_default_dtype(torch.float64)
        _seed(case["seed"])
        self.net = net = _there(called(self.made["net"]))
        self.loss = loss = _there(called(self.made["loss"], net))
        layout = ff.Layout(**case["layout"])
        if "memory.budget" in case["plan"]:
            choices.at_random(case["seed"])
        compiled._BACKEND = "aot_eager"  # all of torch.compile but its last part
        compiled._SLOWEST = math.inf
        plan = ff.Plan(layout=layout).replace(case["plan"], Provenance("user", "fuzz"))
        self.mesh = mesh = ff.start(plan, device=DEVICE)
        needed = layout.pipe > 1 or case["example"]
        example = called(self.made["batch"], 0)[0] if needed else None
        self.model = model = ff.parallelize(net, mesh, example=example, loss=loss)
        self.own = dict(loss.named_parameters()) if isinstance(loss, nn.Module) else {}
        # A rank whose stage has no parameters has nothing to optimise, which torch's optimisers refuse.
        spare = [nn.Parameter(torch.zeros(1, device=DEVICE))]
        held = [*model.parameters(), *self.own.values()]
        self.optimizer = torch.optim.SGD(
            held or spare, **{**OPTIMIZER, **case.get("optimizer", {})}
        )
        model.train()
        for number, step in enumerate(case["steps"]):
            self.told["steps"].append(self._step(number, step))
        last = case["steps"][-1]["batch"]
        self.told["evaluated"] = [self._evaluate(last)]
        if layout.pipe == 1 and case["plan"].get("memory.shard", "none") == "none":
            self.told["outside"] = self._outside(last)

    def _step(self, number: int, step: Mapping[str, Any]) -> dict[str, Any]:
        if step.get("evaluate") is not None:
            self._evaluate(step["evaluate"])
        for event in step.get("events", ()):
            events.happen(self.model.module, self.loss, event, self.model)
        if step.get("zero", True):
            self.optimizer.zero_grad()
        inputs, targets = called(self.made["batch"], step["batch"])
        rows = self.case["batches"][step["batch"]]["rows"]
        _seed(self.case["seed"] + 1 + number)
        seen: list[dict[str, Any]] = []
        # At once: a loss may change them in place.
        self.model.on_outputs = lambda made: seen.extend(self._pieces(made, rows))
        loss = self.model.step(*self.model.shard(inputs, targets))
        gradients = self._whole({n: p.grad for n, p in self._parameters().items()})
        if step.get("clip"):
            ff.clip_grad_norm_(self.model, step["clip"])
        if step.get("update", True):
            self.optimizer.step()
        return {
            "loss": _real(loss),
            "outputs": seen,
            "gradients": gradients,
            "buffers": self._whole(dict(self.model.module.named_buffers())),
            "weights": self._whole(self._parameters()),
            "state": nets.state(self.model.module, self.loss),
        }

    def _parameters(self) -> dict[str, Any]:
        self.model.parameters()  # which puts them as the optimiser has them
        of_loss = {f"loss:{name}": parameter for name, parameter in self.own.items()}
        held = dict(self.model.named_parameters())
        named = {n: held.get(n, p) for n, p in self.model.module.named_parameters()}
        return {**named, **of_loss}

    def _whole(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Copies of whole tensors; of other stages', what the rank that has them has."""
        own = {
            name: None if t is None else t.full_tensor() if isinstance(t, DTensor) else t.detach()
            for name, t in tensors.items()
        }
        if self.model.stages is not None:
            held = {
                *dict(self.model.named_parameters()),
                *dict(self.model.named_buffers()),
                *(f"loss:{name}" for name in self.own),
            }
            every = self.model.stages.everywhere(
                {name: value for name, value in own.items() if not name.startswith("loss:")}
            )
            own = {name: own[name] if name in held else every[name] for name in own}
        return {name: _real(value) for name, value in own.items()}

    def _pieces(self, returned: Any, rows: int) -> list[dict[str, Any]]:
        """Every leaf of what the net returned here: its path, what it is, and where it lies in the whole."""
        made: list[dict[str, Any]] = []
        mine = self.mesh.share(rows)
        for path, leaf in flat(returned).items():
            if not isinstance(leaf, Tensor):
                made.append({"path": path, "value": leaf})
                continue
            part, value = part_of(leaf), _real(leaf)
            if part is not None:
                origin, shape = list(part.origin), list(part.shape)
            elif value.dim() and value.shape[0] in (len(mine), max(len(mine), 1)):
                origin = [mine.start, *[0] * (value.dim() - 1)]
                shape = [rows, *value.shape[1:]]
            else:
                origin, shape = None, None
            if not len(mine) and value.dim() and origin is not None:
                value = value[:0]  # the stand-in of an empty share
            made.append({"path": path, "value": value, "origin": origin, "shape": shape})
        return made

    @torch.no_grad()
    def _evaluate(self, number: int) -> list[dict[str, Any]]:
        model = self.model
        model.eval()
        _seed(self.case["seed"])
        inputs = model.shard(called(self.made["batch"], number)[0])
        if isinstance(inputs, dict):
            returned = model(**inputs)
        else:
            returned = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        pieces = self._pieces(returned, self.case["batches"][number]["rows"])
        model.train()
        return pieces

    @torch.no_grad()
    def _outside(self, number: int) -> dict[str, Any] | None:
        """The plain net on the whole batch, without Fivefold; None if it keeps parts of tensors."""
        net = self.model.module
        if _parts(self.model):
            return None
        net.eval()
        _seed(self.case["seed"])
        inputs = tree_map(_there, called(self.made["batch"], number)[0])
        if isinstance(inputs, dict):
            returned = net(**inputs)
        else:
            returned = net(*inputs) if isinstance(inputs, tuple) else net(inputs)
        net.train()
        return {p: _real(v) if isinstance(v, Tensor) else v for p, v in flat(returned).items()}


def _parts(model: ff.ParallelModel) -> bool:
    """Whether the forward has left tensors in attributes of which this rank has a part."""
    tiles: Any = model._tiles
    return tiles is not None and bool(tiles.programs.left)


def _real(value: Any) -> Any:
    """A copy that can be sent; what is no tensor of numbers is told by its name."""
    if value is None:
        return None
    if isinstance(value, FakeTensor) or value.is_meta:
        return f"{type(value).__name__} on {value.device}"
    return value.detach().cpu() if value.is_cuda else value.detach().clone()


def _there(thing: Any) -> Any:
    """A module or tensor where it is computed with; anything else as it is."""
    return thing.to(DEVICE) if DEVICE != "cpu" and isinstance(thing, nn.Module | Tensor) else thing


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)


def _fakes(net: nn.Module) -> list[str]:
    """Where tensors without numbers are left in a net: parameters, buffers, attributes, containers."""
    found: list[str] = []
    seen: set[int] = set()

    def look(thing: Any, path: str) -> None:
        if isinstance(thing, FakeTensor):
            found.append(path)
        elif isinstance(thing, Tensor):
            if isinstance(thing.grad if thing.is_leaf else None, FakeTensor):
                found.append(f"{path}.grad")
        elif id(thing) not in seen and isinstance(thing, dict | list | tuple | set):
            seen.add(id(thing))
            pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
            for key, value in pairs:
                look(value, f"{path}.{key}")
        elif id(thing) not in seen and (isinstance(thing, nn.Module) or hasattr(thing, "__dict__")):
            seen.add(id(thing))
            if isinstance(thing, nn.Module) or type(thing).__module__ in ("types", "fuzz.nets"):
                look(vars(thing), path)

    look(net, "net")
    return found
