"""Other loaders whose workers may be on other hosts, each in an environment of its own that is made here.

All decode the same photographs on core 1 and hand batches to a consumer on core 0, which does nothing with
them: samples per second, and seconds of processors per sample, of all processes together.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from augmentation import settle
from contender import BenchmarkError, Contender, Kind
from counted import Account
from figures import environment
from places import HELPERS, HERE, TRAINERS
from rounds import take_turns
from workload import make_photos

INSTALL_LIMIT_S = 540.0


@dataclass(frozen=True)
class Peer:
    """One of them."""

    title: str
    script: str
    packages: tuple[str, ...] = ()
    """for an environment of its own; none: this one"""
    launcher: tuple[str, ...] = ()


PEERS = {
    "local": Peer("fivefold, helper of the same node", "reading.py", launcher=("local",)),
    "remote": Peer("fivefold, helper on another node, TCP", "reading.py", launcher=("remote",)),
    "torch": Peer("DataLoader(num_workers=1)", "reading.py"),
    "tf": Peer("tf.data service", "peer_tf.py", ("tensorflow-cpu", "pillow", "numpy")),
    "ray": Peer("Ray Data", "peer_ray.py", ("ray[data]==2.60.*", "imagecodecs", "pillow", "numpy")),
}


def installed(peer: Peer, home: Path) -> Path | str:
    """The Python of an environment with its packages, or why there is none. Kept in `home`."""
    folder = home / peer.script.removesuffix(".py")
    python = folder / "bin" / "python"
    if (folder / "complete").exists():
        return python
    try:
        venv.create(folder, with_pip=True, clear=True)
        words = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        done = subprocess.run(
            [*words, *peer.packages],
            capture_output=True,
            text=True,
            timeout=INSTALL_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as problem:
        return f"its environment could not be made: {problem}"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"pip install {' '.join(peer.packages)} failed: {last}"
    (folder / "complete").touch()
    return python


def launcher(name: str, python: Path | None) -> tuple[str, ...]:
    """What stands before the script of a peer."""
    peer = PEERS[name]
    if peer.launcher:
        return (str(HERE / "places.py"), *peer.launcher)
    if python is None:
        return (str(HERE / "placed.py"), str(TRAINERS))
    # Services are started on core 1; the consumer then moves to core 0.
    return (str(HERE / "placed.py"), str(HELPERS), "--python", str(python))


def measured(asked: argparse.Namespace) -> dict[str, Any]:
    """Rounds of all that could be installed."""
    import torch

    before = environment()
    absent: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="fivefold-bench-") as temporary,
        contextlib.ExitStack() as stack,
    ):
        folder = Path(temporary)
        (folder / "photos").mkdir()
        make_photos(folder / "photos", asked.photos)
        running: list[Contender] = []
        accounts: dict[str, Account] = {}
        for name in asked.peers:
            accounts[name] = stack.enter_context(Account())
            try:
                running.append(begun(asked, name, folder, accounts[name].path, stack))
            except BenchmarkError as problem:
                absent[name] = str(problem).splitlines()[0]
                print(f"without {PEERS[name].title}: {problem}", flush=True)
        blocks, others = take_turns(
            running, asked.rounds, lambda c: block(c, accounts[c.kind.name], asked.seconds), latest
        )
        versions = {c.kind.name: c.greeting.get("versions", "") for c in running}
    return {
        "part": "peers", "rounds": asked.rounds, "block_s": asked.seconds, "absent": absent,
        "versions": versions, "blocks": blocks,
        "environment": {**before, "torch": torch.__version__, **others.told()},
    }  # fmt: skip


def begun(
    asked: argparse.Namespace, name: str, folder: Path, group: Path, stack: contextlib.ExitStack
) -> Contender:
    """One of them, waiting. Raises `BenchmarkError` if it cannot be had."""
    peer, python, started = PEERS[name], None, time.monotonic()
    if peer.packages:
        found = installed(peer, asked.peers_at or folder)
        if isinstance(found, str):
            raise BenchmarkError(found)
        python = found
    counted = (str(HERE / "counted.py"), str(group), *launcher(name, python))
    kind = Kind(name, peer.title, counted, 1, 1, {"TF_CPP_MIN_LOG_LEVEL": "3"})
    told = ["--photos", str(folder / "photos")]
    with contextlib.ExitStack() as own:
        contender = own.enter_context(Contender(kind, HERE / peer.script, told, folder))
        contender.wait_until_ready()
        stack.push(own.pop_all())
    settle(contender)
    print(f"{name} is ready after {time.monotonic() - started:.0f} s", flush=True)
    return contender


def block(contender: Contender, account: Account, seconds: float) -> dict[str, Any]:
    """Samples and seconds of a block, and what all its processes used until they rest again."""
    before = account.used_s()
    told = contender.ask(round(1000 * seconds))[0]
    settle(contender)
    return {**told, "cpu_s": account.used_s() - before}


def latest(done: int, blocks: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A line after each round."""
    each = (f"{name} {b[-1]['samples'] / b[-1]['wall_s']:.0f}" for name, b in blocks.items())
    return f"round {done}, samples/s: {'  '.join(each)}"
