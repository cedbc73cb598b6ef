"""What ranks train in tests of one copy of the weights: by the name of a case, in the group that there is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.arena.budget import available_bytes
from fivefold.errors import FivefoldError, UsageError
from fivefold.parallel import pieces
from fivefold.plan import Layout, Parallel, Plan
from fivefold.sections import Instances, Memory, Pipeline

__all__ = ["CASES", "OPTIMIZERS", "accumulated", "mapped", "refused", "resumed", "trained"]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "ASGD": {"lr": 0.1, "t0": 2}, "Adadelta": {}, "Adafactor": {}, "Adagrad": {}, "Adam": {"amsgrad": True},
    "AdamW": {"fused": True}, "Adamax": {"foreach": True}, "Muon": {}, "NAdam": {}, "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True}, "Rprop": {}, "SGD": {"lr": 0.1, "momentum": 0.9},
}  # fmt: skip
N = 9


class Net(nn.Module):
    """Layers of several kinds, one in another memory format, one used twice, one of no elements."""

    sparse = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.twice = nn.Conv2d(8, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.head = nn.Linear(8, 4)
        self.words = nn.Embedding(20, 8, sparse=True) if Net.sparse else None
        self.unused = nn.Parameter(torch.ones(3))
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, x: Tensor) -> Tensor:
        made = self.norm(self.first(x)).relu()
        found = self.twice(self.twice(made)).mean((2, 3))
        if self.words is not None:
            found = found + self.words((10 * x.mean((1, 2, 3)).abs()).long().clamp(max=19))
        return self.head(found)


def _plan(weights: str, layout: Layout, per_device: int, **sections: Any) -> Plan:
    return Plan(
        layout=layout,
        instances=Instances(per_device=per_device, weights=weights),  # pyright: ignore[reportArgumentType]
        **sections,
    )


def _batches(steps: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    made = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(N, 3, 8, 8, generator=made, dtype=dtype),
            torch.randint(4, (N,), generator=made),
        )
        for _ in range(steps)
    ]


def _net(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def _optimizer(name: str, net: nn.Module) -> torch.optim.Optimizer:
    held = [p for p in net.parameters() if p.dim() == 2 or name != "Muon"]
    return getattr(torch.optim, name)(held, **OPTIMIZERS[name])


# ---- what a script may do besides its steps


class _Averaged(torch.optim.Optimizer):
    """An optimiser around another one, with slow weights that it writes back (Zhang et al. 2019)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.count = inner, 0
        super().__init__([p for g in inner.param_groups for p in g["params"]], {})
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] # noqa: ARG002
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.add_(p.data - slow, alpha=0.5)
                p.data.copy_(slow)


def _written(net: Net, *_: Any) -> None:
    for p in net.parameters():
        p.data.mul_(0.9)


def _averages_for_a_while(net: Net, *_: Any) -> None:
    kept = [p.detach().clone() for p in net.parameters()]
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
    assert not any(p.any() for p in net.parameters())
    for p, value in zip(net.parameters(), kept, strict=True):
        p.data.copy_(value)


def _state_loaded(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net.load_state_dict({name: value * 0.5 for name, value in net.state_dict().items()})
    optimizer.load_state_dict(optimizer.state_dict())


def _state_written(_: Net, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


def _state_cleared(_: Net, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def _moved(net: Net, *_: Any) -> None:
    net.first.weight.data = net.first.weight.data.clone() * 0.5


def _own_update(net: Net, *_: Any) -> None:
    with torch.no_grad():
        for p in net.parameters():
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.01)


def _by_vector(net: Net, *_: Any) -> None:
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, net.parameters())


def _frozen(net: Net, *_: Any) -> None:
    net.twice.requires_grad_(not net.twice.weight.requires_grad)


def _failing(_: Net, optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    rate, group["betas"] = group["betas"], None
    try:
        optimizer.step()
    except TypeError:
        pass
    else:
        raise AssertionError("a step with impossible settings")
    group["betas"] = rate


def _clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.1)


CASES: dict[str, Callable[[Net, torch.optim.Optimizer], None] | None] = {
    "written": _written, "for a while": _averages_for_a_while, "loaded": _state_loaded,
    "state written": _state_written, "state cleared": _state_cleared, "moved": _moved,
    "own update": _own_update, "by vector": _by_vector, "frozen": _frozen, "failing": _failing,
    "averaged": None, "closure": None, "LBFGS": None, "two models": None, "hooked": None, "scaled": None,
    "groups": None, "aliased": None, "sparse": None, "stopped": None,
}  # fmt: skip


def trained(  # noqa: PLR0917 - a pool passes them by position
    weights: str,
    optimizer: str = "Adam",
    case: str = "",
    layout: Layout | None = None,
    per_device: int = 4,
    divided: bool = False,
) -> tuple[dict[str, Any], dict[Any, Any], bool]:
    """Six steps: the weights and buffers, what the optimiser keeps, and whether anything lies once."""
    layout = layout or Layout(data=4)
    Net.sparse = case == "sparse"
    pieces.LEAST_BYTES, pieces.UNIT = (200, 16) if divided else (1 << 20, 1024)
    net, others = _net(), _net()
    if case == "aliased":
        net.first.copy = net.first.weight.data  # pyright: ignore[reportArgumentType]
    if case in ("LBFGS", "by vector"):
        net.twice.to(memory_format=torch.contiguous_format)  # flattened by `view`
    stages = {"pipeline": Pipeline(micro_batches=2)} if layout.pipe > 1 else {}
    mesh = ff.start(_plan(weights, layout, per_device, **stages), device="cpu")
    example = torch.empty(N, 3, 8, 8, dtype=torch.float64)
    model = ff.parallelize(net, mesh, loss=nn.CrossEntropyLoss(), example=example)
    second = ff.parallelize(others, mesh, loss=nn.CrossEntropyLoss(), example=example)
    inner, made = _optimizers(case, optimizer, net, model, second)
    _train(case, net, model, second, inner, made)
    if case == "stopped":
        _go_on_alone(net, made)
    if case == "aliased":
        assert torch.equal(net.first.copy, net.first.weight)  # pyright: ignore[reportArgumentType]
    once = any(
        begin <= p.data_ptr() < end for p in net.parameters() for begin, end, _ in _private()
    )
    told = {
        f"{n}.{name}": v
        for n, one in enumerate((model, second))
        for name, v in one.state_dict().items()
    }
    return _plain(told), _plain(inner.state_dict()["state"]), once


def _train(  # noqa: PLR0917 - what a case may look at
    case: str, net: Net, model: Any, second: Any, inner: torch.optim.Optimizer, made: Any
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0) if case == "scaled" else None
    act = CASES.get(case)
    for step, batch in enumerate(_batches(6)):
        if case == "stopped" and step == 4:
            torch.distributed.destroy_process_group()
            break
        part = model.shard(*batch)
        if case in ("closure", "LBFGS"):
            made.step(lambda part=part: _again(model, made, part))
        else:
            model.step(*part, scaler)
            second.step(*part)
            if case == "groups" and step == 2:
                made.add_param_group({"params": [*net.twice.parameters()], "lr": 0.1})
            if case != "sparse":
                ff.clip_grad_norm_(model, 1.0)
            _stepped(made, scaler)
        if act is not None and step % 2:
            act(net, inner)
        model.zero_grad()
        second.zero_grad()


def _optimizers(
    case: str, name: str, net: Net, model: nn.Module, second: nn.Module
) -> tuple[torch.optim.Optimizer, Any]:
    """The one whose state is looked at, and the one that is called."""
    if case == "LBFGS":
        inner = torch.optim.LBFGS(
            [p for p in model.parameters() if p is not net.unused], max_iter=3
        )
    elif case == "two models":
        inner = torch.optim.AdamW([*model.parameters(), *second.parameters()], amsgrad=True)
    elif case == "groups":
        inner = torch.optim.Adam(net.head.parameters())
    else:
        inner = _optimizer(name, model)
    if case == "hooked":
        inner.register_step_pre_hook(_clip)
    return inner, _Averaged(inner) if case == "averaged" else inner


def _go_on_alone(net: Net, optimizer: Any) -> None:
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def _stepped(optimizer: Any, scaler: Any) -> None:
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()


def _again(model: Any, optimizer: Any, part: Any) -> Tensor:
    optimizer.zero_grad()
    return model.step(*part)


def _plain(tree: Any) -> Any:
    """Tensors as lists: what is compared has to come from other processes."""
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_plain(value) for value in tree]
    if isinstance(tree, Tensor):
        return (tree.to_dense() if tree.is_sparse else tree).tolist()
    return tree


# ---- against one process


def accumulated(ranks: int) -> tuple[list[Any], list[Any]]:
    """Gradients and weights of every step in float32, here and by plain torch that accumulates on rank 0."""
    plan = _plan("shared", Layout(data=ranks), ranks, parallel=Parallel(batch_norm="replica"))
    net, plain = _net(torch.float32), _net(torch.float32)
    mesh = ff.start(plan, device="cpu")
    model = ff.parallelize(net, mesh, loss=nn.CrossEntropyLoss())
    ours, theirs = _optimizer("Adam", model), _optimizer("Adam", plain)
    told: tuple[list[Any], list[Any]] = ([], [])
    for x, y in _batches(5, torch.float32):
        model.step(*model.shard(x, y))
        running = [*plain.buffers()], [b.clone() for b in plain.buffers()]
        for r in range(ranks):
            mine = slice(r * N // ranks, (r + 1) * N // ranks)
            # Statistics of every micro-batch are those of a replica; running ones are the first's.
            nn.functional.cross_entropy(plain(x[mine]), y[mine], reduction="sum").div(N).backward()
            if r == 0:
                running = running[0], [b.clone() for b in plain.buffers()]
        for buffer, first in zip(*running, strict=True):
            buffer.copy_(first)
        for list_, of, optimizer in ((told[0], net, ours), (told[1], plain, theirs)):
            list_.append([_plain(p.grad) for p in of.parameters()])
            optimizer.step()
            list_.append([_plain(p) for p in of.parameters()])
            optimizer.zero_grad()
    return told


# ---- memory, checkpoints, mistakes


def mapped() -> tuple[int, int, int]:
    """Bytes of weights and state, of the files they lie in, and of those that lie elsewhere."""
    mesh = ff.start(_plan("shared", Layout(data=4), 4), device="cpu")
    model = ff.parallelize(nn.Linear(1000, 1000), mesh, loss=nn.MSELoss())
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model.step(*model.shard(torch.randn(4, 1000), torch.zeros(4, 1000)))
        optimizer.step()
    held = [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())]
    spans = _private()
    inside = [t for t in held if any(b <= t.data_ptr() < e for b, e, _ in spans)]
    files = {inode: end - begin for begin, end, inode in spans}
    changed = [run for memory in model._one_copy._memories() for run in memory.changed()]
    assert not changed, changed
    size = sum(t.nbytes for t in held)
    return size, sum(files.values()), size - sum(t.nbytes for t in inside)


def held_once(mib: float) -> bool:
    """Whether a net of so many MiB lies once where nobody has said."""
    mesh = ff.start(_plan("auto", Layout(data=2), 2), device="cpu")
    net = nn.Linear(1 << 10, int(mib * 256), bias=False)
    model = ff.parallelize(net, mesh)
    assert model.module is net
    return bool(_private())


def _private() -> list[tuple[int, int, str]]:
    """Where copies are mapped that keep a rank's changes to itself: from, to, and the file's number."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    return [
        (int(words[0].split("-")[0], 16), int(words[0].split("-")[1], 16), words[4])
        for words in lines
        if "fivefold-copies" in words[-2] + words[-1] and words[1][3] == "p"
    ]


def resumed(folder: str, ranks: int, weights: str, steps: int) -> tuple[Any, Any]:
    """Go on from the checkpoint in `folder` up to a step, and save there."""
    mesh = ff.start(_plan(weights, Layout(data=ranks), ranks), device="cpu")
    net = _net()
    model = ff.parallelize(net, mesh, loss=nn.CrossEntropyLoss())
    optimizer = _optimizer("Adam", model)
    kept = ff.Checkpointer(folder, mesh, model=model, optim=optimizer)
    begin = kept.load()
    for step in range(0 if begin is None else begin, steps):
        x, y = _batches(steps)[step]
        model.step(*model.shard(x, y))
        optimizer.step()
        optimizer.zero_grad()
        kept.save(step + 1)
    kept.close()
    return _plain(model.state_dict()), _plain(optimizer.state_dict()["state"])


def refused(what: str) -> str:
    """What is said of a plan or a script that cannot be."""
    sections: dict[str, Any] = {"memory": Memory(shard="optimizer")} if what == "shard" else {}
    ranks = torch.distributed.get_world_size()
    try:
        mesh = ff.start(_plan("shared", Layout(data=ranks), ranks, **sections), device="cpu")
        net = _net()
        if what == "room":  # which is asked for, and never touched
            net.head.bias = nn.Parameter(torch.empty(available_bytes() // 5))
        model = ff.parallelize(net, mesh, loss=nn.CrossEntropyLoss())
        optimizer = _optimizer("Adam", model)
        for step, batch in enumerate(_batches(3)):
            model.step(*model.shard(*batch))
            if what == "one" and mesh.rank == 1 and step == 1:
                net.head.bias.data.add_(1)
            if what == "moved" and mesh.rank == 1 and step == 1:
                net.head.bias.data = net.head.bias.data.clone()
            optimizer.step()
        if what == "forked":
            return _told_by_child(net)
    except FivefoldError as problem:
        return str(problem)
    return ""


def _told_by_child(net: Net) -> str:
    here, there = os.pipe()
    if not (child := os.fork()):
        told = ""
        for act in (lambda: net(torch.zeros(1, 3, 8, 8)), net.head.state_dict):
            try:
                act()
            except UsageError as problem:
                told += str(problem)
        os.write(there, told.encode())
        os._exit(0)
    os.close(there)
    os.waitpid(child, 0)
    with os.fdopen(here) as pipe:
        return pipe.read()
