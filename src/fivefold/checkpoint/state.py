"""The complete state of a run: named objects, the step, and every rank's random generators.

    model.conv1.weight                    tensors and values under the names of the objects
    optim.state.conv1.weight.exp_avg
    per_rank.3.rng.torch                  what differs from rank to rank, under the rank's number
    fivefold.step

DCP stores a key once, whoever gives it: values of several ranks under one key would all become those of one
rank. So ranks compare what should be equal, and what is not equal is stored for each.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fivefold.checkpoint.objects import adapter_of
from fivefold.checkpoint.state_adapter import Path, SavedEntry, StateAdapter, StateEntry
from fivefold.checkpoint.values import fingerprint
from fivefold.errors import UsageError
from fivefold.torch_private import is_dtensor

__all__ = ["Captured", "Request", "State", "saved_in"]

_PER_RANK = "per_rank"
_PROGRESS = "fivefold"
_RANDOM = "rng"
_PARAMS = "params"
"""names of an optimiser's parameters: on a `pipe` axis every rank knows some of them"""


@dataclass(frozen=True)
class Captured:
    """The state of one moment, by object. Tensors that rest are still the object's own."""

    parts: Mapping[str, Sequence[StateEntry]]
    shared: frozenset[str]
    """objects whose state is one over all ranks"""

    def prints(self) -> dict[str, str]:
        """For each object that may differ from rank to rank, what tells whether it does."""
        return {
            name: fingerprint([(entry.path, entry.value) for entry in entries])
            for name, entries in self.parts.items()
            if name not in self.shared
        }

    def buffers(self) -> list[str]:
        """Keys of tensors that no optimiser keeps alike on all ranks, such as statistics of batch norm."""
        return [
            _key((name, *entry.path))
            for name, entries in self.parts.items()
            for entry in entries
            if name in self.shared and _is_buffer(entry)
        ]

    def without(self, keys: Collection[str]) -> Captured:
        """The same without these buffers: another rank saves its own."""
        parts = {
            name: [
                e for e in entries if not (_is_buffer(e) and _key((name, *e.path)) in keys)
            ]
            for name, entries in self.parts.items()
        }  # fmt: skip
        return replace(self, parts=parts)

    def params(self) -> dict[str, list[str]]:
        """The parameter names of each group of each optimiser."""
        return {
            f"{name}.{entry.path[1]}": entry.value
            for name, entries in self.parts.items()
            for entry in entries
            if name in self.shared and _names_params(entry)
        }

    def with_params(self, every: Sequence[Mapping[str, list[str]]]) -> Captured:
        """The same with the parameter names that all ranks have told."""

        def of_all(name: str, entry: StateEntry) -> StateEntry:
            if not _names_params(entry) or name not in self.shared:
                return entry
            told = [one.get(f"{name}.{entry.path[1]}", []) for one in every]
            return replace(entry, value=list(dict.fromkeys(sum(told, list[str]()))))

        parts = {n: [of_all(n, entry) for entry in entries] for n, entries in self.parts.items()}
        return replace(self, parts=parts)

    def flat(self, rank: int, differ: frozenset[str]) -> tuple[dict[str, Any], dict[str, Path]]:
        """What DCP stores, by key, and the path that each key stands for; objects in `differ` per rank.

        Raises `UsageError` if two paths have one key.
        """
        found: dict[str, Any] = {}
        paths: dict[str, Path] = {}
        for name, entries in self.parts.items():
            start: Path = (_PER_RANK, str(rank), name) if name in differ else (name,)
            for entry in entries:
                path = (*start, *entry.path)
                key = _key(path)
                if key in found:
                    raise UsageError(
                        f"two values of the state are both called {key!r}: rename one of them"
                    )
                found[key], paths[key] = entry.value, path
        return found, paths


def _key(path: Path) -> str:
    return ".".join(map(str, path))


def _is_buffer(entry: StateEntry) -> bool:
    value = entry.value
    return isinstance(value, torch.Tensor) and not is_dtensor(value) and not entry.rests


def _names_params(entry: StateEntry) -> bool:
    path = entry.path
    return len(path) == 3 and path[0] == "param_groups" and path[2] == _PARAMS


def saved_in(metadata: Metadata) -> dict[Path, SavedEntry]:
    """What a checkpoint holds, in the order in which objects told it: DCP goes by the ranks that wrote.

    Keys of one that was not written by us are split at their dots.
    """
    paths = cast("Mapping[str, Path]", metadata.planner_data or {})
    every = metadata.state_dict_metadata
    found: dict[Path, SavedEntry] = {}
    for key in (
        *(key for key in paths if key in every),
        *(key for key in every if key not in paths),
    ):
        held = every[key]
        path = paths.get(key) or tuple(key.split("."))
        tensor = held if isinstance(held, TensorStorageMetadata) else None
        size = None if tensor is None else tensor.size
        found[path] = SavedEntry(path, size, None if tensor is None else tensor.properties.dtype)
    return found


@dataclass(frozen=True)
class Request:
    """What one rank reads of a checkpoint."""

    targets: dict[str, Any]
    """by key: a tensor that is filled, or None for a value"""
    paths: Mapping[str, tuple[str, Path]]
    """key to the name of the object and the path within it"""
    notes: Sequence[str]
    """what is not restored, for people"""


class State:
    """The objects of a run by name."""

    def __init__(self, objects: Mapping[str, object], rank: int) -> None:
        for name in objects:
            if name in (_PER_RANK, _PROGRESS, _RANDOM) or not name.isidentifier():
                raise UsageError(
                    f"an object of a checkpoint cannot be called {name!r}: that name is taken"
                )
        modules = {n: thing for n, thing in objects.items() if isinstance(thing, nn.Module)}
        self._rank = rank
        self._progress: dict[str, Any] = {}
        self._adapters: dict[str, StateAdapter] = {
            n: adapter_of(n, thing, modules) for n, thing in objects.items()
        }
        self._adapters[_PROGRESS] = adapter_of(_PROGRESS, self._progress, {})
        self._adapters[_RANDOM] = adapter_of(_RANDOM, _Generators(), {})

    @property
    def step(self) -> int:
        """The step of the state that was restored last."""
        return int(self._progress.get("step", 0))

    def capture(self, step: int) -> Captured:
        """The state after `step` steps. Values are copied, tensors are not.

        Raises `UsageError` for what cannot be stored.
        """
        self._progress["step"] = step
        shared = frozenset(name for name, one in self._adapters.items() if one.shared) | {_PROGRESS}
        return Captured({n: list(one.entries()) for n, one in self._adapters.items()}, shared)

    # ---- and back

    def missing(self, saved: Mapping[Path, SavedEntry]) -> list[str]:
        """What this rank needs and the checkpoint does not have."""
        found: list[str] = []
        for name, one in self._adapters.items():
            apart = any(path[0] == _PER_RANK and path[2] == name for path in saved)
            if not apart and not _below(saved, (name,)):
                found.append(f"{name} (all of it)")
            else:
                found += [f"{name}.{key}" for key in one.missing(_below(saved, (name,)))]
        return found

    def strange(self, saved: Mapping[Path, SavedEntry]) -> list[str]:
        """What the checkpoint has of this rank's objects and this rank does not hold; another may."""
        found: list[str] = []
        for name, one in self._adapters.items():
            names = one.names()
            if names is not None:
                there = {one.name_of(path) for path in _below(saved, (name,))} - {None}
                found += [f"{name}.{key}" for key in sorted(there - set(names), key=str)]
        return found

    def request(self, saved: Mapping[Path, SavedEntry], world: int, saved_world: int) -> Request:
        """What to read so that this rank goes on; `world` ranks there are, and there were.

        Raises `UsageError`: an object has another shape, or it differed from rank to rank and there are now
        more or fewer ranks.
        """
        targets: dict[str, Any] = {}
        paths: dict[str, tuple[str, Path]] = {}
        notes: list[str] = []
        for name, one in self._adapters.items():
            start = self._start(name, saved, world, saved_world)
            if start is None:
                notes.append(
                    f"there is no state of {name} for rank {self._rank}: it stays as it is"
                )
                continue
            for path, target in one.targets(_below(saved, start)).items():
                key = ".".join(map(str, (*start, *path)))
                targets[key], paths[key] = target, (name, path)
        others = {str(path[0]) for path in saved} - {*self._adapters, _PER_RANK}
        if others:
            notes.append(
                f"the checkpoint also holds {', '.join(sorted(others))}, which nobody asked for"
            )
        return Request(targets, paths, notes)

    def _start(
        self, name: str, saved: Mapping[Path, SavedEntry], world: int, saved_world: int
    ) -> Path | None:
        if _below(saved, (name,)):
            return (name,)
        own: Path = (_PER_RANK, str(self._rank), name)
        if name == _RANDOM:
            return own if _below(saved, own) else None
        if world != saved_world:
            raise UsageError(
                f"{name} differed from rank to rank, so {saved_world} ranks are needed to go on, not "
                f"{world}: start as many, or leave {name} out; what a rank needs of its own should be a "
                "function of (seed, step, rank)"
            )
        return own

    def restore(self, request: Request, read: Mapping[str, Any]) -> None:
        """Hand every object what was read."""
        found: dict[str, dict[Path, Any]] = {name: {} for name, _ in request.paths.values()}
        for key, value in read.items():
            name, path = request.paths[key]
            found[name][path] = value
        # Generators last: giving an object its state may draw from them.
        for name in sorted(found, key=lambda n: n == _RANDOM):
            self._adapters[name].restore(found[name])


def _below(saved: Mapping[Path, SavedEntry], start: Path) -> dict[Path, SavedEntry]:
    return {path[len(start) :]: one for path, one in saved.items() if path[: len(start)] == start}


class _Generators:
    """The generators that are global to a process: Python's, numpy's, torch's, and its GPU's."""

    def state_dict(self) -> dict[str, Any]:
        kind, words, position, has_gauss, gauss = cast(Any, np.random.get_state())  # noqa: NPY002
        found: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": [kind, words, position, has_gauss, gauss],
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            found["cuda"] = torch.cuda.get_rng_state()
        return found

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        random.setstate(state_dict["python"])
        np.random.set_state(tuple(state_dict["numpy"]))  # noqa: NPY002
        torch.set_rng_state(state_dict["torch"])
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])
