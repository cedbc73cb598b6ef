"""What a net calls and does, recorded by running it once on tensors that have a shape but no numbers.

The unmodified forward runs as it is: its control flow may depend on shapes, on options, on the numbers of
parameters and buffers, on anything but those of its inputs. Meanwhile stand-ins take the place of the net's
tensors; afterwards everything Python that the forward can reach is put back, and what it has changed there is
part of the recording (`effects`), as what it can read is (`guards`).

    reach ──► stand-ins ──► forward under Recorder ──► tape       what it computes
      │                          │                     effects    what it does besides
      └── put back ◄─────────────┘                     guards     what it has seen
"""

from __future__ import annotations

import gc
import inspect
import itertools
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointFunction, noop_context_fn

from fivefold.errors import FivefoldError, UsageError
from fivefold.parallel.graph.containers import Found
from fivefold.parallel.graph.effects import Effects, noted
from fivefold.parallel.graph.fingerprint import calls
from fivefold.parallel.graph.guards import Guards
from fivefold.parallel.graph.hooks import hooked
from fivefold.parallel.graph.numbered import by_row
from fivefold.parallel.graph.reach import Reach, gathers
from fivefold.parallel.graph.recorder import WHOLE_MODULES, CallRecorder, Look
from fivefold.parallel.graph.recurrent import from_zeros
from fivefold.parallel.graph.refs import Ref, StateRef, Value, map_refs, refs_of
from fivefold.parallel.graph.tape import Node, Tape
from fivefold.parallel.graph.writes import Writes
from fivefold.parallel.trees import flatten, leaves, map_tensors
from fivefold.torch_private import (
    CHECKPOINT,
    FUNCTION,
    SCRIPTED,
    FakeTensorMode,
    apply_of,
    class_of,
    early_stops,
    fake_of,
    forward_hooks,
    is_dtensor,
    restore_apply,
)

__all__ = ["LeftBehind", "record"]


class LeftBehind(UsageError):
    """A forward keeps tensors without numbers where nobody can take them away: it would compute with them."""


def _whole(tensor: Tensor) -> None:  # noqa: ARG001 - none is a part of another
    return None


def record(  # noqa: PLR0917 - a forward and what it runs on
    net: nn.Module,
    call: Callable[[Callable[..., Any], Any], Any],
    inputs: Any,
    shapes: Sequence[torch.Size],
    device: torch.device | None = None,
    parts: Callable[[Tensor], tuple[int, ...] | None] = _whole,
) -> Tape:
    """Run `call(net, inputs)` on fake tensors and note every call.

    Args:
        net: the user's net; afterwards it is as before.
        call: how the net is called with a tree of inputs.
        inputs: a tree with this rank's tensors, of which dtype and device count.
        shapes: the shape that each of them stands for, in the order of `leaves`.
        device: where the net computes, by default where its first parameter is; parameters on the meta device
            stand for those that another rank holds.
        parts: the shape of what a tensor in an attribute is a part of; None if it is none.

    Raises `UsageError`, which names the module and the line, for what cannot be recorded; `LeftBehind` if the
    net cannot be run afterwards either.
    """
    _check_hooks(net)
    device = device or next((p.device for p in net.parameters()), torch.device("cpu"))
    stand_ins: list[weakref.ref[Tensor]] = []
    try:
        tape, lines = _recorded(net, call, inputs, shapes, device, parts, stand_ins)
        if lines is not None:
            again = _recorded(net, call, inputs, shapes, device, parts, stand_ins, as_before=True)
            _check_same(lines, again[1] or [])
    except UsageError as problem:
        _forget(problem, stand_ins)
        raise
    _check_left(stand_ins)
    return tape


def _recorded(  # noqa: PLR0917 - what `record` was given
    net: nn.Module,
    call: Callable[..., Any],
    inputs: Any,
    shapes: Sequence[torch.Size],
    device: torch.device,
    parts: Callable[[Tensor], tuple[int, ...] | None],
    stand_ins: list[weakref.ref[Tensor]],
    *,
    as_before: bool = False,
) -> tuple[Tape, list[tuple[str, str]] | None]:
    """The recording; every tensor without numbers that took part is added to `stand_ins`, in failure too.

    Second, what the net calls, if it has parts that one process runs without gradients first, and with them
    in backward; else None. `as_before`: such parts are recorded as they run first.
    """
    objects = [leaf for leaf in flatten(inputs)[0] if not isinstance(leaf, Tensor)]
    reach = Reach(
        net, [(f"object {number} of the inputs", leaf) for number, leaf in enumerate(objects)]
    )
    _check_iterators(reach)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        writes = Writes(fake)
        sizes = iter(shapes)
        given_inputs = map_tensors(
            lambda t: torch.empty(next(sizes), dtype=t.dtype, device=device), inputs
        )
        places = _places(net, reach)
        recorder: CallRecorder | None = None
        try:
            named, carried = _stood_in(reach, places, writes, device, parts)
            given = [*leaves(given_inputs), *(stand_in for _, stand_in in carried)]
            look = Look(lambda n: places[n].now(), reach.changes)
            recorder = CallRecorder(named, given, writes, device, look, modules=[*net.modules()])
            recorder.as_before = as_before
            with _ours_apart(net), _no_cache(), _no_inference(), writes, recorder:
                returned = _run(recorder, net, call, given_inputs)
            recorder.check_counted()
            recorder.check_flags()
            _check_iterators(reach, LeftBehind)
            changes = reach.changes()
            sets = noted(changes, recorder.ref, writes.own)
            tape = _tape(recorder, returned, Effects(recorder.written(), sets))
            stand_ins += [weakref.ref(t) for t in recorder.held if writes.own(t)]
        except UsageError:
            held = () if recorder is None else recorder.held
            stand_ins += [weakref.ref(t) for t in held if writes.own(t)]
            _check_iterators(reach, LeftBehind)
            for ours in (recorder, writes):  # which frames of the problem know
                if ours is not None:
                    vars(ours).clear()
            raise
        finally:
            reach.restore()
    tape.guards = Guards(reach, changes, recorder.looked, device)
    tape.places, tape.carried = places, [found for found, _ in carried]
    return tape, calls(recorder.nodes) if recorder.reentrant else None


def _check_iterators(reach: Reach, error: type[UsageError] = UsageError) -> None:
    if path := reach.advanced():
        raise error(
            f"the net may take from the iterator {path} in its forward, which nobody can wind back: keep a "
            "number or a list in its place"
        )


def _places(net: nn.Module, reach: Reach) -> dict[str, Found]:
    """Where the tensors are that the net holds, by what they are called: parameters, buffers, attributes."""
    names: dict[int, str] = {}
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        names.setdefault(id(tensor), name)
    found: dict[str, Found] = {}
    for one in reach.tensors:
        name = names.setdefault(id(one.tensor), f".{one.path}{[*one.inner] or ''}")
        found.setdefault(name, one)
    return found


def _stood_in(
    reach: Reach,
    places: Mapping[str, Found],
    writes: Writes,
    device: torch.device,
    parts: Callable[[Tensor], tuple[int, ...] | None],
) -> tuple[list[tuple[Tensor, StateRef]], list[tuple[Found, Tensor]]]:
    """Put stand-ins in the place of the net's tensors.

    They, and the real ones, with their names; and those for tensors of which this rank has a part.
    """
    made: dict[int, Tensor] = {}
    names = {id(found.tensor): name for name, found in places.items()}
    named: list[tuple[Tensor, StateRef]] = []
    carried: list[tuple[Found, Tensor]] = []

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) in made:
            return made[id(tensor)]
        name, shape = names[id(tensor)], parts(tensor)
        if shape is None:
            new = made[id(tensor)] = writes.adopt(tensor, _fake(writes.fake, tensor, device))
            named.extend((one, StateRef(name)) for one in (new, tensor))
        else:
            new = made[id(tensor)] = torch.empty(shape, dtype=tensor.dtype, device=device)
            carried.append((places[name], new))
        return new

    reach.put_in_place(stand_in)
    return named, carried


def _fake(fake: FakeTensorMode, tensor: Tensor, device: torch.device) -> Tensor:
    divided = is_dtensor(tensor)  # among replicas, between steps
    if not (tensor.is_meta or divided):
        return fake_of(fake, tensor)
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _run(recorder: CallRecorder, net: nn.Module, call: Callable[..., Any], inputs: Any) -> Any:
    """Call the net; what it raises becomes one readable error."""

    def called_here(inputs: Any) -> Any:  # where the frames of the user's code begin
        return call(net, inputs)

    try:
        with _scopes(recorder, net), unseen_calls_noted(recorder):
            return called_here(inputs)
    except FivefoldError:
        raise
    except Exception as problem:
        said = str(problem).strip().splitlines() or ["no reason given"]
        where = _raised_at(problem)
        raise UsageError(
            f"{_module(recorder)} cannot be recorded, which tiles and stages need: "
            f"{type(problem).__name__} in {where}: {said[0]}"
        ) from problem


def _module(recorder: CallRecorder) -> str:
    scope = recorder.failed or recorder.scopes[-1]
    return f"the module {scope!r}" if scope else "the net"


def _raised_at(problem: Exception) -> str:
    """The last line of the user's that took part."""
    own = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
    frames = [
        f for f in traceback.extract_tb(problem.__traceback__) if not f.filename.startswith(own)
    ]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "torch"


@contextmanager
def _scopes(recorder: CallRecorder, net: nn.Module) -> Generator[None]:
    """Within the block, calls know the module that makes them."""
    found = dict(net.named_modules())
    before = {name: module.__dict__.get("forward") for name, module in found.items()}
    for name, module in found.items():
        module.__dict__["forward"] = _entered(recorder, name, module, module.forward)
    try:
        yield
    finally:
        for name, module in found.items():
            if before[name] is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before[name]


def _entered(
    recorder: CallRecorder, name: str, module: nn.Module, forward: Callable[..., Any]
) -> Callable[..., Any]:
    kind = class_of(module)

    def enter(*args: Any, **kwargs: Any) -> Any:
        recorder.scopes.append(name)
        try:
            if kind in WHOLE_MODULES:
                return recorder.as_one(module, kind, *args, **kwargs)
            return forward(*args, **kwargs)
        except Exception:
            recorder.failed = recorder.failed or name
            raise
        finally:
            recorder.scopes.pop()

    return enter


@contextmanager
def _no_cache() -> Generator[None]:
    """Within the block, autocast keeps no casts of weights: it would keep those of stand-ins."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


# ---- what is not the user's

_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def _check_hooks(net: nn.Module) -> None:
    """Refuse hooks of a module's backward, which no recording sees."""
    every = any(vars(nn.modules.module)[f"_global{kind}"] for kind in _HOOKS)
    for name, module in net.named_modules():
        if every or any(getattr(module, kind) for kind in _HOOKS):
            where = f"the module {name!r}" if name else "the net"
            raise UsageError(
                f"{where} has a hook of its backward (register_full_backward_hook), which a recorded net "
                "would drop: use tensor.register_hook in the forward, or the data axis only"
            )


@contextmanager
def _ours_apart(net: nn.Module) -> Generator[None]:
    """Within the block, modules are without the hooks by which parameters are gathered."""
    taken: list[tuple[dict[Any, Any], dict[Any, Any]]] = []
    for module in net.modules():
        for hooks in forward_hooks(module):
            if any(map(gathers, hooks.values())):
                taken.append((hooks, dict(hooks)))
                kept = {key: hook for key, hook in hooks.items() if not gathers(hook)}
                hooks.clear()
                hooks.update(kept)
    try:
        yield
    finally:
        for hooks, before in taken:
            hooks.clear()
            hooks.update(before)


# ---- what came of it


@contextmanager
def _no_inference() -> Generator[None]:
    """Out of inference mode, whose end would enable gradients."""
    enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(enabled):
        yield


def _tape(recorder: CallRecorder, returned: Any, effects: Effects) -> Tape:
    outputs = map_tensors(recorder.output, returned)  # pyright: ignore[reportArgumentType]
    nodes, rename = hooked(recorder)
    outputs = map_refs(rename, outputs)
    effects = effects.renamed(rename)
    wanted = [*refs_of(outputs), *effects.refs()]
    nodes = _alive(by_row(from_zeros(nodes)), wanted)
    uses = Counter(ref.index for node in nodes for ref in node.operands if isinstance(ref, Value))
    uses.update(ref.index for ref in wanted if isinstance(ref, Value))
    return Tape(
        nodes,
        recorder.inputs,
        recorder.shapes,
        recorder.dtypes,
        outputs,
        uses,
        effects,
        recorder.statistics,
        recorder.twice,
        frozenset(name for name, passes in recorder.passes.items() if len(passes) > 1),
    )


def _alive(nodes: Sequence[Node], wanted: Sequence[Ref]) -> list[Node]:
    """Without nodes of which nobody reads a result, and which do nothing else."""
    read = {ref.index for ref in wanted if isinstance(ref, Value)}
    kept: list[Node] = []
    for node in reversed(nodes):
        does = not node.outputs or isinstance(node.function, nn.Module) or node.name in _UPDATES
        if does or any(index in read for index in node.outputs):
            kept.append(node)
            read |= {ref.index for ref in node.operands if isinstance(ref, Value)}
    return kept[::-1]


_UPDATES = frozenset({"batch_norm", "instance_norm"})


def _check_same(first: list[tuple[str, str]], again: list[tuple[str, str]]) -> None:
    for (one, where), (other, _) in itertools.zip_longest(first, again, fillvalue=("", "")):
        if one != other:
            raise UsageError(
                "a checkpoint with use_reentrant=True computes something else in backward, where gradients "
                f"flow, than in forward, where they do not: at {where or 'its end'}. Give it "
                "use_reentrant=False"
            )


_PATIENCE_S = (0.0, 0.001, 0.01, 0.1)
"""Another thread may look at frames, or collect, which makes `gc.collect` here do nothing."""


def _check_left(stand_ins: Sequence[weakref.ref[Tensor]]) -> None:
    """Refuse a forward that keeps tensors of the recording where they were not found."""
    if not _lives(stand_ins):
        return
    left = [tensor for tensor in (ref() for ref in stand_ins) if tensor is not None]
    # A result holds what it was computed from, which no Python object does.
    held = next((tensor for tensor in left if any(_holders(tensor, left))), left[0])
    kinds = sorted({type(holder).__name__ for holder in _holders(held, left)})
    told = (
        f"the net keeps a tensor of shape {tuple(held.shape)} outside of its modules (in a "
        f"{', '.join(kinds) or 'place that was not found'}), where a recording cannot follow it: keep it "
        "in an attribute of a module, or return it"
    )
    _taken_away(left)
    del left, held
    raise (LeftBehind if _lives(stand_ins) else UsageError)(told)


def _lives(stand_ins: Sequence[weakref.ref[Tensor]]) -> bool:
    """Whether somebody still holds a tensor of the recording."""
    for wait_s in _PATIENCE_S:
        if not any(ref() is not None for ref in stand_ins):
            return False
        time.sleep(wait_s)
        gc.collect()
    return any(ref() is not None for ref in stand_ins)


def _forget(problem: UsageError, stand_ins: Sequence[weakref.ref[Tensor]]) -> None:
    """Take stand-ins out of the caches that a forward has filled before it failed.

    Raises `LeftBehind` if somebody else holds one.
    """
    failed: list[BaseException] = [problem]
    for one in failed:  # frames hold them as well
        traceback.clear_frames(one.__traceback__)
        causes = (one.__cause__, one.__context__)
        failed += [cause for cause in causes if cause is not None and cause not in failed]
    if _lives(stand_ins):
        _taken_away([tensor for tensor in (ref() for ref in stand_ins) if tensor is not None])
        if _lives(stand_ins):
            raise LeftBehind(str(problem)) from problem


def _taken_away(stand_ins: list[Tensor]) -> None:
    """Take tensors out of dicts that a recording does not wind back: caches, which their owners fill anew."""
    for tensor in stand_ins:
        for holder in list(_holders(tensor, stand_ins)):
            if isinstance(holder, dict):
                _dropped(holder, tensor)  # pyright: ignore[reportUnknownArgumentType]


def _dropped(holder: dict[Any, Any], tensor: Tensor) -> None:
    for key in [key for key, value in dict.items(holder) if value is tensor]:
        dict.__delitem__(holder, key)


def _holders(tensor: Tensor, besides: list[Tensor]) -> Iterator[Any]:
    for holder in gc.get_referrers(tensor):
        frame = hasattr(holder, "f_code") or hasattr(holder, "gi_code")
        if not frame and holder is not besides and type(holder).__name__ != "list_iterator":
            yield holder


# ---- Calls that no mode of torch sees: autograd functions of the user's, checkpoints, scripted functions

_recording = threading.local()
_lock = threading.Lock()
_watchers = 0
_plain_checkpoint: Any = vars(torch_checkpoint)[CHECKPOINT]
_plain_scripts: dict[Any, Any] = {kind: kind.__call__ for kind in SCRIPTED}


def _watched_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    apply = apply_of(cls)
    recorder: CallRecorder | None = getattr(_recording, "recorder", None)
    if recorder is None or cls.__module__.startswith("fivefold."):
        return apply(*args, **kwargs)
    if cls is CheckpointFunction:  # (function, preserve_rng_state, *inputs)
        # As torch has it, gradients flow only if they flow into an input.
        grad = any(leaf.requires_grad for leaf in args[2:] if isinstance(leaf, Tensor))
        grad = grad and torch.is_grad_enabled()
        recorder.reentrant |= grad
        first = grad and not recorder.as_before
        with (
            torch.set_grad_enabled(grad), recorder.again(), recorder.own_pass(),
            torch.set_grad_enabled(first),
        ):  # fmt: skip
            return args[0](*args[2:])
    return recorder.opaque(apply, f"{cls.__name__}.apply", args)


def _watched_checkpoint(*args: Any, **kwargs: Any) -> Generator[None]:
    """What `checkpoint` does around a function: memory is the plan's business."""
    recorder: CallRecorder | None = getattr(_recording, "recorder", None)
    if recorder is None:
        return _plain_checkpoint(*args, **kwargs)
    given = inspect.signature(_plain_checkpoint).bind(*args, **kwargs)
    given.apply_defaults()
    chosen, early = given.arguments["context_fn"], early_stops(given.arguments["early_stop"])
    around = _noted(recorder.again(known=chosen is noop_context_fn, early_stop=early))
    _recording.checkpoints.append(around)
    return around


def _noted(again: AbstractContextManager[None]) -> Generator[None]:
    with again:
        yield


def _watched_script(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Stand-ins would end the process: TorchScript raises where C++ may not."""
    recorder: CallRecorder | None = getattr(_recording, "recorder", None)
    if recorder is not None:
        recorder.refuse(
            "calls a scripted function (torch.jit), inside which no call is seen: call the plain function"
        )
    return _plain_scripts[type(function)](function, *args, **kwargs)


@contextmanager
def unseen_calls_noted(recorder: CallRecorder) -> Generator[None]:
    """Within the block, what this thread calls without a mode's seeing it is noted whole, or refused."""
    global _watchers  # noqa: PLW0603 - torch has one class of functions
    with _lock:
        _watchers += 1
        FUNCTION.apply = classmethod(_watched_apply)
        setattr(torch_checkpoint, CHECKPOINT, _watched_checkpoint)
        for kind in SCRIPTED:
            kind.__call__ = _watched_script
    _recording.recorder, _recording.checkpoints = recorder, []
    try:
        yield
    finally:
        # Before 2.13, torch leaves its own side of a checkpoint suspended where the function raises.
        for around in reversed(_recording.checkpoints):
            around.close()
        _recording.recorder, _recording.checkpoints = None, []
        with _lock:
            _watchers -= 1
            if not _watchers:
                restore_apply()
                setattr(torch_checkpoint, CHECKPOINT, _plain_checkpoint)
                for kind, call in _plain_scripts.items():
                    kind.__call__ = call
