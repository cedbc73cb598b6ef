"""Helpers for tests of offloading: real processes, forked from one that has imported torch already.

    test process ── a line of JSON ──> nursery ── fork ──> helper (or a second trainer)
                 <── its pid ─────────

A forked process sets its environment and then runs the same lines as a script would: `ff.start()`,
`ff.loader(...)`, and the first batch, at which a helper serves instead.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from waiting import awaited

KEY = "5f" * 32
NAMES = ("FIVEFOLD_HELPERS", "FIVEFOLD_HELPER_KEY", "FIVEFOLD_HELPER_LISTEN", "FIVEFOLD_ROLE")


class Nursery:
    """Starts processes quickly. `function` of `start` is "module:function", called with keywords.

    `modules` are imported beforehand, once.
    """

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(Path(__file__).parent),
                "CUDA_VISIBLE_DEVICES": "",  # what a helper computes is compared bit by bit
            },
        )
        self._pids: list[int] = []

    def start(self, function: str, environ: dict[str, str], **options: Any) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"function": function, "environ": environ, "options": options}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        self._pids.append(int(self._process.stdout.readline()))
        return self._pids[-1]

    def end_all(self) -> None:
        """Kill all that were started, and wait until they are gone."""
        for pid in self._pids:
            signalled(pid, signal.SIGKILL)
        for pid in self._pids:
            awaited(lambda pid=pid: not is_running(pid), f"the end of process {pid}")
        self._pids.clear()

    def close(self) -> None:
        self.end_all()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)


def signalled(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Helpers:
    """Helpers of one job at Unix sockets in `folder`, or at ports of the loopback."""

    def __init__(
        self,
        nursery: Nursery,
        addresses: Sequence[str],
        function: str,
        *,
        environ: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.addresses = list(addresses)
        self._environ = environ or {}
        self._nursery, self._function, self._options = nursery, function, options
        self.pids = [self._start(number) for number in range(len(self.addresses))]

    def _start(self, number: int) -> int:
        environ = {
            "FIVEFOLD_ROLE": "helper",
            "FIVEFOLD_HELPER_LISTEN": self.addresses[number],
            "FIVEFOLD_HELPER_NUMBER": str(number),
            "FIVEFOLD_HELPER_KEY": KEY,
            **self._environ,
        }
        return self._nursery.start(self._function, environ, **self._options)

    def restart(self, number: int) -> None:
        self.signal(number, signal.SIGKILL)
        awaited(lambda: not is_running(self.pids[number]), "the end of a helper")
        self.pids[number] = self._start(number)

    def signal(self, number: int, what: int) -> None:
        signalled(self.pids[number], what)

    @property
    def environ(self) -> dict[str, str]:
        """Of trainers."""
        return {"FIVEFOLD_HELPERS": ",".join(self.addresses), "FIVEFOLD_HELPER_KEY": KEY}


class Proxy:
    """Passes bytes on between trainers and a helper; now and then it flips a bit of what the helper sends."""

    def __init__(self, helper: tuple[str, int], every_bytes: int, seed: int) -> None:
        self._helper, self._every, self._chance = helper, every_bytes, random.Random(seed)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._door.getsockname()[1]}"
        self.flipped = 0
        self._lines: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = self._door.accept()
                try:
                    helper = socket.create_connection(self._helper, 5)
                except OSError:
                    caller.close()
                    continue
                helper.settimeout(None)
                self._lines += [caller, helper]
                for pair, bad in (((caller, helper), False), ((helper, caller), True)):
                    threading.Thread(target=self._pass, args=(*pair, bad), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, bad: bool) -> None:
        left = self._chance.randrange(self._every) + 4096  # the handshake passes
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                left -= len(data)
                if bad and left < 0:
                    data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
                    self.flipped += 1
                    left = self._chance.randrange(self._every)
                sink.sendall(data)
        for line in (source, sink):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for line in [self._door, *self._lines]:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def unix_addresses(folder: Path, count: int) -> list[str]:
    return [f"unix:{folder}/{number}.sock" for number in range(count)]


def iterate(options: dict[str, Any], **more: Any) -> None:
    """What a helper's script does: make its loaders, and ask for a batch."""
    import fivefold as ff

    mesh = ff.start()
    loaders = [loader_of(mesh, **one) for one in more.get("before", [])]
    loaders.append(loader_of(mesh, **options))
    for _ in loaders[-1]:
        pass


def iterate_elsewhere(options: dict[str, Any]) -> None:
    """A helper that says it has another torch and another processor."""
    from fivefold.helpers import versions

    fields = {**versions.versions(), "torch": "2.10.0", "cpu": "another"}
    with patch.object(versions, "_found", return_value=tuple(fields.items())):
        iterate(options)


def hash_stream(options: dict[str, Any], rank: int, ranks: int, epochs: int, path: str) -> None:
    """What a second trainer does: write the fingerprints of its batches to a file."""
    from fivefold.helpers.dispatcher import Dispatcher
    from streams import Seat, fingerprint

    seat = Seat(rank, ranks)
    data = loader_of(seat, **options)
    found = [fingerprint([batch]) for _ in range(epochs) for batch in data]
    dispatcher: Any = Dispatcher.of(seat)  # type: ignore[arg-type]
    leases = sum(helper.leases for helper in dispatcher.helpers())
    dispatcher.close()
    Path(path).write_text(json.dumps({"batches": found, "leases": leases}))


def loader_of(mesh: Any, dataset: str, arguments: Sequence[Any] = (), **options: Any) -> Any:
    """A loader over `dataset`, a class of a module of tests: "module:Class"."""
    import fivefold as ff

    return ff.loader(found(dataset)(*arguments), mesh, **options)


def found(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _serve_nursery() -> None:
    import streams  # noqa: F401 - brings torch

    for name in sys.argv[1:]:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    for line in _lines():
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(order)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


def _lines() -> Iterator[str]:
    while line := sys.stdin.readline():
        yield line


def _run(order: dict[str, Any]) -> None:
    """In the child; never returns."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDWR), 0)
        os.dup2(2, 1)
        os.environ.update(order["environ"])
        found(order["function"])(**order["options"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:  # noqa: BLE001
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve_nursery()
