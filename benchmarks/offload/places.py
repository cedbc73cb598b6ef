"""Where trainers and helpers run: cores, a share of a core as weak as a DPU's, and nodes with a link between.

    python places.py [--helpers 1] [--group DIR] [--gbit 10] LAYOUT script.py words...

starts `script.py` as trainers on core 0 and as helpers on core 1:

    alone    one trainer                               local    a trainer and helpers of the same node
    remote   a trainer, and helpers on a node each     pair     two trainers on a node each, no helpers
    two      the same, and a helper for each           shared   the same, and one helper for both

Ends with the first trainer that does; helpers end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

HERE = Path(__file__).resolve().parent
TRAINERS, HELPERS = 0, 1
"""cores"""
PORT = 21001
LAYOUTS = ("alone", "local", "remote", "pair", "two", "shared")
END_LIMIT_S = 10.0
_BURST_BYTES = 4 << 20
"""of a shaped link: at 10 Gbit/s what passes in three milliseconds, some ticks of the kernel's timer"""


def enter(core: int, group: Path | None = None) -> None:
    """This process, and what it starts, computes on that core; and no more than its control group may."""
    os.sched_setaffinity(0, {core})
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))


class Share:
    """A control group with a share of a core, which may change. A context manager."""

    def __init__(self) -> None:
        from faults import Quota

        self._quota: Any = Quota()
        self.path: Path = Path()

    def __enter__(self) -> Self:
        self._quota.__enter__()
        self.path = self._quota._group  # noqa: SLF001 - tests/faults.py is ours
        return self

    def limit(self, percent: int) -> None:
        """From now on so much of a core; 100 is a whole one."""
        self._quota.limit(percent / 100)

    def __exit__(self, *what: object) -> None:
        self._quota.__exit__(*what)


@contextlib.contextmanager
def surroundings(name: str) -> Generator[tuple[Path, Share, contextlib.ExitStack]]:
    """For contenders: a folder with an empty one called `name`, a share of a core, and what ends them."""
    with (
        tempfile.TemporaryDirectory(prefix="fivefold-bench-") as temporary,
        Share() as share,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(temporary)
        (folder / name).mkdir()
        yield folder, share, stack


def shape(nodes: Any, node: int, gbit: float) -> None:
    """What leaves a node does so at no more than so many Gbit/s."""
    from namespaces import call, entering

    up = nodes._up(node)  # noqa: SLF001 - tests/nodes.py is ours
    tbf = f"tbf rate {gbit:g}gbit burst {_BURST_BYTES} latency 50ms"
    call([*entering(up.init, "n"), "tc", "qdisc", "add", "dev", "eth0", "root", *tbf.split()])


@dataclass
class Job:
    """Processes of a layout."""

    trainers: list[Any] = field(default_factory=list[Any])
    helpers: list[Any] = field(default_factory=list[Any])

    def ended(self) -> int:
        """Wait for all trainers, or for one that fails; the exit code."""
        while True:
            codes = [process.poll() for process in self.trainers]
            if failed := next((code for code in codes if code), None):
                return abs(failed)
            if None not in codes:
                return 0
            time.sleep(0.05)

    def end(self) -> None:
        """End what still runs."""
        for process in (*self.trainers, *self.helpers):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in (*self.trainers, *self.helpers):
            try:
                process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()


class OnNode:
    """A process of `nodes.Nodes`, as `subprocess.Popen` would show it."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.poll = lambda: process.code
        self.wait = process.wait

    def terminate(self) -> None:
        """Ask it to end."""
        if self._process.code is None:
            self._process.send_signal(15)

    def kill(self) -> None:
        """End it."""
        if self._process.code is None:
            self._process.send_signal(9)

    @property
    def text(self) -> str:
        """What it printed."""
        return str(self._process.text)


@dataclass(frozen=True)
class Order:
    """What is to be started."""

    layout: str
    script: Sequence[str]
    helpers: int = 1
    group: Path | None = None
    """control group of helpers"""
    gbit: float = 10.0
    """of every link"""
    key: str = field(default_factory=lambda: secrets.token_hex(32))


def started(order: Order, stack: contextlib.ExitStack) -> Job:
    """The processes of a layout; `stack` ends them, and takes nodes away."""
    if order.layout not in ("alone", "local"):
        return on_nodes(order, stack)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fivefold-places-")))
    count = order.helpers if order.layout == "local" else 0
    addresses = [f"unix:{folder}/{number}.sock" for number in range(count)]
    job = Job()
    stack.callback(job.end)
    for number, address in enumerate(addresses):
        environ = helper_environ(addresses, order.key, number, address)
        job.helpers.append(popen(order.script, HELPERS, order.group, environ))
    job.trainers.append(popen(order.script, TRAINERS, None, trainer_environ(addresses, order.key)))
    return job


def on_nodes(order: Order, stack: contextlib.ExitStack) -> Job:
    """The same on nodes of their own, joined by links."""
    from nodes import Nodes, refusal

    if problem := refusal():
        sys.exit(f"error: this machine makes no nodes: {problem}")
    trainers = 1 if order.layout == "remote" else 2
    helpers = {"remote": order.helpers, "pair": 0, "two": 2, "shared": 1}[order.layout]
    nodes = stack.enter_context(Nodes(trainers + helpers, 64 << 20))
    for node in range(len(nodes)):
        shape(nodes, node, order.gbit)
    addresses = [f"{nodes.address(trainers + number)}:{PORT}" for number in range(helpers)]
    job = Job()
    stack.callback(job.end)
    for number, address in enumerate(addresses):
        environ = helper_environ(addresses, order.key, number, address)
        words = placed(order.script, HELPERS, order.group)
        job.helpers.append(OnNode(nodes.start(trainers + number, words, environ)))
    for number in range(trainers):
        # With a helper each, a trainer knows its own only.
        known = [addresses[number]] if order.layout == "two" else addresses
        environ = trainer_environ(known, order.key)
        words = placed(order.script, TRAINERS, None)
        job.trainers.append(OnNode(nodes.start(number, words, environ)))
    return job


def trainer_environ(addresses: Sequence[str], key: str) -> dict[str, str]:
    """Variables by which a trainer finds its helpers; none where there are none."""
    if not addresses:
        return {}
    return {"FIVEFOLD_HELPERS": ",".join(addresses), "FIVEFOLD_HELPER_KEY": key}


def helper_environ(addresses: Sequence[str], key: str, number: int, address: str) -> dict[str, str]:
    """Variables of a helper."""
    return {
        **trainer_environ(addresses, key), "FIVEFOLD_ROLE": "helper",
        "FIVEFOLD_HELPER_LISTEN": address, "FIVEFOLD_HELPER_NUMBER": str(number),
    }  # fmt: skip


def placed(script: Sequence[str], core: int, group: Path | None) -> list[str]:
    """The command that runs a script there."""
    where = ["--group", str(group)] if group is not None else []
    return [sys.executable, str(HERE / "placed.py"), str(core), *where, *script]


def popen(
    script: Sequence[str], core: int, group: Path | None, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a script on a core."""
    return subprocess.Popen(
        placed(script, core, group), env={**os.environ, **environ}, stdin=subprocess.DEVNULL
    )


def options() -> tuple[argparse.Namespace, list[str]]:
    """The command line; the second part is the script's."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--helpers", type=int, default=1)
    parser.add_argument("--group", type=Path)
    parser.add_argument("--gbit", type=float, default=10.0)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    asked = parser.parse_args()
    return asked, asked.script


def main() -> int:
    """Run the script in a layout; the exit code of its trainers."""
    from contender import leave_properly

    asked, script = options()
    with leave_properly(), contextlib.ExitStack() as stack:
        order = Order(asked.layout, script, asked.helpers, asked.group, asked.gbit)
        job = started(order, stack)
        code = job.ended()
        for process in (*job.trainers, *job.helpers) if code else ():
            print(getattr(process, "text", ""), file=sys.stderr)
        return code


if __name__ == "__main__":
    sys.exit(main())
