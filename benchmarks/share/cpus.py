"""Several processes on the cores of one node, beside one process of all of them, in alternating blocks.

    python benchmarks/share/cpus.py

measures one copy of the weights and training steps of small nets, prints the tables, keeps the results and
renews README.md. `--parts copy` takes one copy alone.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from contender import Contender, Kind
from figures import environment, ratio, table
from publishing import Page, conditions
from rounds import take_turns
from worker import COUNT_MEMORY, UPDATES

HERE = Path(__file__).resolve().parent


LOGS = ["--log-dir", "{logs}"]
TWO = ["-m", "fivefold", "run", "--instances", "2", *LOGS]
KINDS = {
    "one": Kind("one", "one process of two threads", [], 1, 2),
    "shared": Kind("shared", "two of one thread, one copy", TWO, 2, 1),
    "own": Kind("own", "two of one thread, copies of their own", TWO, 2, 1),
    "apart": Kind("apart", "two that exchange nothing", TWO, 2, 1),
}
STEPPED = tuple(KINDS)
KINDS["shared-4"] = Kind(
    "shared-4", "four, one copy", ["-m", "fivefold", "run", "-n", "4", *LOGS], 4, 1, way="shared"
)  # fmt: skip
NETS = ("resnet20", "shufflenet_v2_x1_0", "mobilenet_v2")
BATCH = {32: 64, 224: 8}
NORMS = ("global", "replica")
SETTINGS = [f"{net}-{pixels}-{norm}" for net in NETS for pixels in BATCH for norm in NORMS]
NEAR = "resnet18-32-replica"  # with not many more weights than from where on they are shared
PARTS = ["copy", NEAR, *SETTINGS]


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS, metavar="PART")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--tiny", action="store_true", help="small nets, to see that it runs")
    return parser.parse_args()


def _started(
    stack: contextlib.ExitStack, names: Sequence[str], words: Sequence[str]
) -> list[Contender]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fivefold-bench-")))
    running: list[Contender] = []
    for name in names:
        contender = Contender(KINDS[name], HERE / "worker.py", words, folder)
        running.append(stack.enter_context(contender))
        contender.wait_until_ready()  # one after the other: never do two compute at once
    return running


def steps(asked: argparse.Namespace, part: str) -> dict[str, Any]:
    """Seconds of training steps of a net, by round."""
    net, pixels, norm = part.rsplit("-", 2)
    batch = 4 if asked.tiny else BATCH[int(pixels)]
    words = ["--model", net, "--pixels", pixels, "--batch", str(batch), "--batch-norm", norm]
    before = environment()
    with contextlib.ExitStack() as stack:
        running = _started(stack, STEPPED, words)
        fast = min(running[0].block(1))
        number = 1 if asked.tiny else max(2, round(0.8 / fast))

        def told(done: int, answers: Mapping[str, Sequence[list[float]]]) -> str:
            last = {name: statistics.median(own[-1]) for name, own in answers.items()}
            return f"{part} {done}: " + "  ".join(f"{n} {1e3 * s:.0f} ms" for n, s in last.items())

        found, others = take_turns(running, asked.rounds, lambda c: c.block(number), told)
    return {
        "part": part, "batch": batch, "rounds": asked.rounds,
        "environment": {**before, **running[0].greeting, **others.told()},
        "step_s": {name: [round(statistics.median(b), 5) for b in own] for name, own in found.items()},
    }  # fmt: skip


def copy(asked: argparse.Namespace) -> dict[str, Any]:
    """Bytes of weights and of Adam's state, and seconds of an update, of VGG-16."""
    net = "resnet20" if asked.tiny else "vgg16_bn"
    words = ["--model", net, "--pixels", "32", "--batch", "4", "--optimizer", "Adam"]
    before = environment()
    with contextlib.ExitStack() as stack:
        running = _started(stack, ["one", "own", "shared"], words)
        held = {c.kind.name: sum(a["held_bytes"] for a in c.ask(COUNT_MEMORY)) for c in running}

        def update(contender: Contender) -> list[float]:
            return [statistics.median(a["update_s"]) for a in contender.ask(UPDATES)]

        def told(done: int, answers: Mapping[str, Sequence[list[float]]]) -> str:
            return f"copy {done}: " + "  ".join(
                f"{n} {max(a[-1]):.4f} s" for n, a in answers.items()
            )

        found, others = take_turns(running, asked.rounds, update, told)
        stepped, _ = take_turns(
            running,
            asked.rounds,
            lambda c: statistics.median(c.block(2)),
            lambda done, _: f"steps {done}",
        )
    with contextlib.ExitStack() as stack:
        (four,) = _started(stack, ["shared-4"], [*words, "--per-device", "4"])
        held["shared-4"] = sum(a["held_bytes"] for a in four.ask(COUNT_MEMORY))
    return {
        "part": "copy", "net": net, "rounds": asked.rounds,
        "environment": {**before, **running[0].greeting, **others.told()},
        "held_bytes": held, "step_s": stepped,
        "update_s": {name: [max(of) for of in own] for name, own in found.items()},
    }  # fmt: skip


def measured(asked: argparse.Namespace, part: str) -> dict[str, Any]:
    """The result of a part."""
    return copy(asked) if part == "copy" else steps(asked, part)


# ---- tables


def section(result: dict[str, Any]) -> str:
    """The figures of a part."""
    return {"copy": _copied, "choice": _chosen}.get(result["part"], _stepped)(result)


def _chosen(result: dict[str, Any]) -> str:
    rows = list[list[str]]()
    for setting, found in result["settings"].items():
        rates, net = found["rates"], setting.rsplit("-", 2)
        best = max(rates, key=lambda name: statistics.median(rates[name]))
        of_best = ratio(rates[found["chosen"]], rates[best])
        rows.append(
            [f"{net[0]}, {net[1]} pixels, {net[2]}", found["chosen"], best, str(of_best),
             f"{found['predicted']:.2f}", f"{found['checked']:.2f}", f"{found['took_s']:.0f} s"]
        )  # fmt: skip
    header = [
        "",
        "chosen",
        "fastest here",
        "speed, of the fastest",
        "gain predicted",
        "checked",
        "took",
    ]
    title = "### What `fivefold tune instances` chooses"
    goals = "Goal: the choice at most 5 % below the fastest, which is what looks fastest, noise included."
    return f"{title}\n\n{table(header, rows)}\n\n{goals}\n\n{conditions(result)}"


def _copied(result: dict[str, Any]) -> str:
    held, update, step = result["held_bytes"], result["update_s"], result["step_s"]
    rows = [
        [name, f"{size / 2**20:,.0f} MiB", f"{size / held['one']:.3f}",
         f"{1e3 * statistics.median(update[name]):.0f} ms" if name in update else "-",
         str(ratio(update[name], update["own"])) if name in update else "-",
         str(ratio(step[name], step["own"])) if name in step else "-"]
        for name, size in held.items()
    ]  # fmt: skip
    goals = (
        "Goals: memory at most 1.02 of one process's; update at most 0.65 of two copies' "
        f"({ratio(update['shared'], update['own']).at_most(0.65)}); steps never slower "
        f"({ratio(step['shared'], step['own']).at_most(1.0)})."
    )
    header = ["", "weights and state", "of one", "update", "of own copies'", "step, of own copies'"]
    return f"### One copy: {result['net']}, Adam\n\n{table(header, rows)}\n\n{goals}\n\n{conditions(result)}"


def _stepped(result: dict[str, Any]) -> str:
    net, pixels, norm = result["part"].rsplit("-", 2)
    taken = result["step_s"]
    rows = [
        [KINDS[name].title, f"{result['batch'] / statistics.median(own):,.1f}",
         str(ratio(taken["one"], own)), str(ratio(own, taken["own"]))]
        for name, own in taken.items()
    ]  # fmt: skip
    header = ["", "images/s", "speed, of one process", "time, of own copies'"]
    title = f"### {net}, {pixels} pixels, batch {result['batch']}, batch norm {norm}"
    return f"{title}\n\n{table(header, rows)}\n\n{conditions(result)}"


def page() -> Page:
    """The README, with all that is kept."""
    return Page(HERE, section, ["choice", *PARTS])


def main() -> int:
    """Measure what was asked for; the exit code."""
    asked = options()
    return page().publish(asked.parts, lambda part: measured(asked, part), asked.results)


if __name__ == "__main__":
    sys.exit(main())
