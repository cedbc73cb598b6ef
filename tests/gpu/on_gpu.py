"""What the ranks of test_gpu.py run: on_gpu.py CASE FILE [DEVICE]; the first rank writes what it found."""

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fivefold as ff
from fivefold.mesh import Mesh
from fivefold.plan import Provenance
from fivefold.recipes.models import build
from fivefold.train.verify import verify
from fivefold.train.verify.report import Report

CRITERION = nn.CrossEntropyLoss(label_smoothing=0.1)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3),
        nn.Conv2d(8, 16, 3, 2, bias=False), nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def random_batch(samples: int, step: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    images = torch.randn(samples, 3, 16, 16, generator=draw, dtype=torch.float64)
    return images, torch.randint(10, (samples,), generator=draw)


def compared(
    mesh: Mesh, net: nn.Module, samples: int, dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        return random_batch(samples, step)

    report: Report = verify(
        lambda: copy.deepcopy(net), mesh, loss=CRITERION, batch=batch, steps=2, dtype=dtype
    )
    return {"passed": report.passed, "said": report.verdict()}


def mixed_precision(mesh: Mesh) -> dict[str, Any]:
    """Autocast, channels_last and a scaler: two steps against one process that does the same."""
    kind = mesh.device.type
    half = torch.float16 if kind == "cuda" else torch.bfloat16
    net = build("resnet20").to(mesh.device, memory_format=torch.channels_last)
    plain = copy.deepcopy(net)
    model = ff.parallelize(net, mesh, loss=CRITERION)
    images, labels = random_batch(16)
    x = images.to(mesh.device, torch.float32).contiguous(memory_format=torch.channels_last)
    y = labels.to(mesh.device)

    def train(own: nn.Module, backward: Callable[[torch.amp.GradScaler], Tensor]) -> list[float]:
        optimiser, losses = torch.optim.SGD(own.parameters(), lr=0.05), []
        scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
        for _ in range(2):
            optimiser.zero_grad()
            losses.append(backward(scaler).item())
            scaler.step(optimiser)
            scaler.update()
        return losses

    def parallel_step(scaler: torch.amp.GradScaler) -> Tensor:
        with torch.autocast(kind, half):
            return model.step(*model.shard(x, y), scaler=scaler)

    def plain_step(scaler: torch.amp.GradScaler) -> Tensor:
        with torch.autocast(kind, half):
            loss = CRITERION(plain(x), y)
        scaler.scale(loss).backward()
        return loss.detach()

    ours, theirs = train(model, parallel_step), train(plain, plain_step)
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return {"passed": apart < 0.02, "said": f"{ours} and {theirs}"}


def under_budgets(mesh: Mesh) -> dict[str, Any]:
    """Steps under budgets have the bits of those that keep everything, and hold no more once measured."""
    torch.backends.cudnn.deterministic = True
    net = build("resnet50")
    x = torch.randn(32, 3, 160, 160, device=mesh.device)
    y = torch.randint(10, (32,), device=mesh.device)

    def trained(budget: int) -> tuple[list[Tensor], int]:
        plan = ff.Plan().replace({"memory.budget": f"{budget}B"}, Provenance("user", "test"))
        others = torch.cuda.memory_allocated() - x.nbytes - y.nbytes  # of libraries, and of before
        own = copy.deepcopy(net).to(mesh.device)
        model = ff.parallelize(own, ff.start(plan, device=mesh.device), loss=CRITERION)
        optimiser = torch.optim.SGD(own.parameters(), lr=0.01, momentum=0.9)
        for step in range(8):
            if step == 5:
                torch.cuda.reset_peak_memory_stats()
            optimiser.zero_grad()
            model.step(x, y)
            optimiser.step()
        state = [t.detach().cpu() for t in (*own.parameters(), *own.buffers())]
        return state, torch.cuda.max_memory_allocated() - others

    kept, most = trained(1 << 40)
    wrong: list[str] = []
    for part in (0.7, 0.5, 0.35):
        found, peak = trained(int(part * most))
        if peak > part * most or not all(map(torch.equal, found, kept)):
            wrong.append(f"{part}: {peak} of {part * most:.0f} bytes")
    return {"passed": not wrong, "said": wrong}


def trained(mesh: Mesh) -> dict[str, Any]:
    """Some steps, for their trace."""
    net = build("resnet20")
    model = ff.parallelize(net, mesh, loss=CRITERION)
    optim = torch.optim.SGD(net.parameters(), lr=0.01)
    images, labels = random_batch(8)
    loss = torch.zeros(())
    for _ in range(6):
        loss = model.step(*model.shard(images.float().to(mesh.device), labels.to(mesh.device)))
        optim.step()
        optim.zero_grad()
    return {"passed": bool(loss.isfinite()), "said": f"loss {loss.item()}"}


def staged(mesh: Mesh) -> dict[str, Any]:
    """A save is of the state when it began, though steps change that before it is complete."""
    folder = Path(sys.argv[2]).parent
    net = build("resnet20")
    model = ff.parallelize(net, mesh, loss=CRITERION)
    optim = torch.optim.Adam(net.parameters())

    def step(number: int) -> None:
        images, labels = random_batch(8, number)
        model.step(*model.shard(images.float().to(mesh.device), labels.to(mesh.device)))
        optim.step()
        optim.zero_grad()

    def state() -> list[Tensor]:
        moments = [t for own in optim.state.values() for t in own.values()]
        return [t.detach().cpu().clone() for t in (*net.parameters(), *net.buffers(), *moments)]

    step(0)
    far, near = folder / "far", folder / "near"
    with ff.Checkpointer(far, mesh, local=near, model=model, optim=optim) as saves:
        kept = state()
        saves.save(1)
        for number in range(1, 4):
            step(number)
        moved = state()
        saves.wait()
        found = saves.load()
        back = state()
    changed = not torch.equal(kept[0], moved[0])
    same = len(kept) == len(back) and all(map(torch.equal, kept, back))
    passed = found == 1 and changed and same
    return {"passed": passed, "said": f"step {found}, changed {changed}, came back {same}"}


def operations(mesh: Mesh) -> dict[str, Any]:
    """Every operation of a group gives the bits on tensors of a GPU that it gives on the host's."""
    sys.path.append(str(Path(__file__).parents[1]))
    import comm_checks

    wrong: list[str] = []
    for count, later in ((5, False), (30_001, True)):
        here = comm_checks.every_operation("float32", count, later)
        torch.set_default_device(mesh.device)
        there = comm_checks.every_operation("float32", count, later)
        torch.set_default_device("cpu")
        wrong += [f"{name}: {there[name]!s:.200}" for name in here if here[name] != there[name]]
    return {"passed": not wrong, "said": "; ".join(wrong)}


def where_they_lie(mesh: Mesh) -> dict[str, Any]:
    """Sums in memory that ranks of a GPU share, while the GPU is busy, have the bits of the host's."""
    sys.path.append(str(Path(__file__).parents[1]))
    import comm_checks

    group: Any = torch.distributed.group.WORLD
    busy = torch.randn(4096, 4096, device=mesh.device)
    wrong: list[str] = []
    for number, count in enumerate((5, 70_000, 25 << 20)):
        flat = group.shared_zeros(count, torch.float32, mesh.device)
        for turn in range(5):
            seed = 10 * number + turn
            drawn = [comm_checks.draw(seed, q, count, torch.float32) for q in range(mesh.size)]
            flat.copy_(drawn[mesh.rank])
            if (turn + mesh.rank) % 2:  # one stream is behind the other
                busy = (busy @ busy).clamp(-1, 1)
            torch.distributed.all_reduce(flat)
            if comm_checks.raw(flat) != comm_checks.raw(comm_checks.reference("sum", drawn)):
                wrong.append(f"{count} elements, turn {turn}")
    return {"passed": not wrong, "said": "; ".join(wrong)}


CASES: dict[str, Callable[[Mesh], dict[str, Any]]] = {
    "conv_net": lambda mesh: compared(mesh, conv_net(), 7),
    "no_affine": lambda mesh: compared(
        mesh, nn.Sequential(conv_net()[0], nn.BatchNorm2d(8, affine=False), *conv_net()[2:]), 7
    ),
    "resnet20": lambda mesh: compared(mesh, build("resnet20"), 5),
    "float32": lambda mesh: compared(mesh, conv_net(), 8, torch.float32),
    # The second of two stages has no parameters.
    "bare_stage": lambda mesh: compared(
        mesh,
        nn.Sequential(nn.Conv2d(3, 10, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Tanh()),
        6,
    ),
    # One sample for two ranks: the first computes a stand-in. More than one pixel, so batch norm is defined.
    "empty_share": lambda mesh: compared(mesh, conv_net(), 1),
    "mixed_precision": mixed_precision,
    "under_budgets": under_budgets,
    "operations": operations,
    "staged": staged,
    "trained": trained,
    "where_they_lie": where_they_lie,
}


def main() -> None:
    case, file, *device = sys.argv[1:]
    torch.manual_seed(0)
    with ff.start(device=device[0] if device else None) as mesh:
        found = CASES[case](mesh) | {"device": mesh.device.type, "ranks": mesh.size}
        if mesh.rank == 0:
            Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
