"""The helper process of a node: it encodes, flushes and rebuilds beside training, and serves its peers.

    first rank of the node                          agent (this module, started by `agent_client.Agent`)
      {"id": 7, "do": "protect", "with": {...}}  -->  stdin, a line each
      {"id": 7, "did": {...}}                    <--  stdout; or {"id": 7, "failed": "...", "kind": "..."}

It has no torch and a low priority. It ends with its standard input or its parent, whichever is first; where
`fivefold run` started the ranks it asks what follows, and copies the newest save if nothing does. The
signals that end a run are left to the ranks, which may still want to save.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from fivefold.arena import ArenaError, Connection, connect
from fivefold.checkpoint.encoding import Peers, protect, rebuild
from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.flush import copy_files, finish, items_of
from fivefold.checkpoint.inventory import look, stocktaking
from fivefold.checkpoint.last_flush import LastFlush
from fivefold.checkpoint.local_reader import LocalReader
from fivefold.checkpoint.manifest import Manifest
from fivefold.checkpoint.pieces import Address, Server
from fivefold.checkpoint.place import place_at
from fivefold.checkpoint.problems import described
from fivefold.checkpoint.rate import Rate
from fivefold.checkpoint.store import Generation, LocalStore, PersistentStore
from fivefold.errors import CheckpointError, FivefoldError
from fivefold.launch.checkpoint_agents import supervisor_address

__all__ = ["AgentCommands", "main", "serve_many"]

Given = Mapping[str, Any]
Answer = dict[str, Any]

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_S = 0.5
_ENDING_S = 3.0
_WORKERS = 4
_NICE = 10
"""how much less urgent than training"""


class AgentCommands:
    """The commands. Each takes the fields of a request and returns those of its answer."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._files = FileOps()
        self._server: Server | None = None
        self._addresses: dict[int, Address] = {}
        self._begun = time.monotonic()
        self._done: dict[str, dict[str, float]] = {}
        self._flushing: dict[int, tuple[int, float]] = {}
        """by thread that copies: its clock, and what that showed at the beginning"""
        self._flush_cpu_s = 0.0
        self._flush_rates: list[Rate] = []
        self._hurry = False
        self._at_end: Given = {}
        self.commands: dict[str, Callable[[Given], Answer]] = {
            "hello": self.hello,
            "peers": self.peers,
            "protect": self.protect,
            "flush": self.flush,
            "finish": self.finish,
            "hurry": self.hurry,
            "rebuild": self.rebuild,
            "inventory": self.inventory,
            "look": self.look,
            "verify": self.verify,
            "drop": self.drop,
            "figures": self.figures,
            "at_end": self.at_end,
        }

    def hello(self, given: Given) -> Answer:
        """Take the key, the place and the limits; begin to serve peers."""
        self._key = bytes.fromhex(given["key"])
        self._store = LocalStore(Path(given["root"]), given["run"], self._files)
        self._reader = LocalReader(self._store.root, self._files)
        self._rate = Rate(given["bytes_per_s"], self._stop)
        self._timeout_s, self._patience_s = given["timeout_s"], given["patience_s"]
        try:
            self._server = Server(given["host"], self._key, self._reader.answer)
        except OSError as problem:
            raise CheckpointError(
                f"the agent cannot serve other nodes at {given['host']}: {problem.strerror}; it has to "
                "be an address of this host"
            ) from None
        return {"host": self._server.address[0], "port": self._server.address[1]}

    def peers(self, given: Given) -> Answer:
        """Where the members of today's nodes are."""
        self._addresses = _addresses(given["addresses"])
        return {}

    def protect(self, given: Given) -> Answer:
        """Write this node's redundancy of a generation. What goes wrong is told, not raised."""
        generation = str(given["generation"])
        told = given["addresses"]
        addresses = self._addresses if told is None else _addresses(told)
        try:
            items = protect(self._reader, generation, self._reach(addresses), self._files)
        except (FivefoldError, OSError) as problem:
            why = described(problem)
            return {"redundancy": [], "problem": f"{generation} is not protected: {why}"}
        self._count("protect", sum(item.length for item in items))
        return {"redundancy": [asdict(item) for item in items], "problem": ""}

    def flush(self, given: Given) -> Answer:
        """Copy payload of this node, and the metadata if told, to the persistent level."""
        thread = threading.get_ident()
        clock = time.pthread_getcpuclockid(thread)
        self._flushing[thread] = clock, time.clock_gettime(clock)
        try:
            answer = self._flush(given)
        finally:
            begun = self._flushing.pop(thread)[1]
            cpu_s = time.clock_gettime(clock) - begun
            self._flush_cpu_s += cpu_s
        return {**answer, "cpu_s": cpu_s}

    def _flush(self, given: Given) -> Answer:
        manifest = self._reader.manifest(str(given["generation"]))
        copied = copy_files(
            self._reader.path(manifest.name),
            place_at(given["url"], self._files),
            manifest,
            items_of(manifest, given["members"], metadata=given["metadata"]),
            rate=self._flush_rate(given["bytes_per_s"]),
            files=self._files,
        )
        self._count("flush", copied.copied_bytes)
        return asdict(copied)

    def _flush_rate(self, bytes_per_s: float | None) -> Rate:
        rate = Rate(bytes_per_s, self._stop)
        self._flush_rates.append(rate)
        if self._hurry:  # asked once it is in the list: `hurry` runs in another thread
            rate.bytes_per_s = None
        return rate

    def hurry(self, given: Given) -> Answer:
        """Copy as fast as it goes from now on: there is no training any more that would feel it."""
        del given
        self._hurry = True
        for rate in [*self._flush_rates]:
            rate.bytes_per_s = None
        return {}

    def finish(self, given: Given) -> Answer:
        """Write the manifest of a flushed generation, when all nodes have copied."""
        manifest = self._reader.manifest(str(given["generation"]))
        finish(PersistentStore(given["url"], self._files), manifest)
        return {}

    def rebuild(self, given: Given) -> Answer:
        """Make the files of a member whole here."""
        addresses = _addresses(given["addresses"])
        manifest, member = Manifest.parse(given["manifest"]), int(given["member"])
        made = rebuild(
            self._reader,
            manifest,
            member,
            self._reach(addresses),
            self._files,
            lost=given["lost"],
            bare=given["bare"],
        )
        items = manifest.members[member].items
        self._count("rebuild", sum(item.length for item in items if item.name in made))
        return {"made": made}

    def inventory(self, given: Given) -> Answer:
        """What lies here."""
        elsewhere = [Manifest.parse(text) for text in given["elsewhere"]]
        taken = stocktaking(
            self._store, int(given["node"]), deep=bool(given["deep"]), elsewhere=elsewhere
        )
        return {"inventory": taken.to_json()}

    def look(self, given: Given) -> Answer:
        """Which files of one save are whole here."""
        manifest = Manifest.parse(given["manifest"])
        return {"holding": look(self._store, manifest, deep=bool(given["deep"])).to_dict()}

    def verify(self, given: Given) -> Answer:
        """What is wrong with the files of a generation."""
        found = self._store.verify(self._find(given), deep=bool(given["deep"]))
        return {"problems": [str(problem) for problem in found]}

    def drop(self, given: Given) -> Answer:
        """Remove a generation from this node."""
        self._store.drop(self._find(given))
        return {}

    def figures(self, given: Given) -> Answer:
        """What this process has done and used so far."""
        del given
        assert self._server is not None
        return {
            "cpu_s": time.process_time(),
            "flush_cpu_s": self._flush_cpu_s
            + sum(time.clock_gettime(clock) - begun for clock, begun in [*self._flushing.values()]),
            "flush_bytes": sum(rate.taken_bytes for rate in [*self._flush_rates]),
            "wall_s": time.monotonic() - self._begun,
            "sent_bytes": self._server.sent_bytes,
            "done": self._done,
        }

    def at_end(self, given: Given) -> Answer:
        """What to know for the time when the ranks are gone: see `flush_last`."""
        self._at_end = given
        return {}

    @property
    def flushes_last(self) -> bool:
        """Whether it knows enough for that."""
        return bool(self._at_end)

    def flush_last(self, limit_s: float) -> str:
        """Copy the newest save, for there will be no ranks to do so; what to tell people."""
        given, end = self._at_end, time.monotonic() + limit_s
        stop = threading.Timer(limit_s, self._stop.set)
        stop.daemon = True
        stop.start()
        self.hurry({})
        while self._flushing and time.monotonic() < end:
            time.sleep(_LOOK_S / 10)
        far = PersistentStore(given["url"], self._files)
        own = replace(self._reach(self._addresses), rate=Rate(None, self._stop))
        last = LastFlush(
            self._store, far, given["me"], given["epoch"], own, self._files, self._stop
        )
        try:
            return last.run(end)
        except (FivefoldError, OSError) as problem:
            return f"the last save was not copied to {given['url']}: {described(problem)}"

    def timed(self, name: str, given: Given) -> Answer:
        """Carry out a command, and keep how long it took. Raises `CheckpointError` if there is no such."""
        begun = time.monotonic()
        if name not in self.commands:
            raise CheckpointError(
                f"no such command: {name!r:.40}; valid: {', '.join(self.commands)}"
            )
        answer = self.commands[name](given)
        self._count(name, 0, time.monotonic() - begun)
        return answer

    def close(self) -> None:
        """Stop what is under way, and serving."""
        self._stop.set()
        if self._server is not None:
            self._server.close()

    def _reach(self, addresses: Mapping[int, Address]) -> Peers:
        own = self._server.address if self._server is not None else None
        return Peers(addresses, self._key, own, self._timeout_s, self._patience_s, self._rate)

    def _find(self, given: Given) -> Generation:
        found = self._store.find(str(given["generation"]))
        if found is None:
            raise CheckpointError(f"{given['generation']!r:.80} is no name of a generation")
        return found

    def _count(self, name: str, count: int, seconds: float = 0.0) -> None:
        done = self._done.setdefault(name, {"bytes": 0, "seconds": 0.0})
        done["bytes"] += count
        done["seconds"] += seconds


def _addresses(given: Mapping[str, Any]) -> dict[int, Address]:
    return {int(member): (str(host), int(port)) for member, (host, port) in given.items()}


class _Line:
    """Answers, each in a line of its own, from any thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._lock = stream, threading.Lock()

    def send(self, answer: Answer) -> None:
        with self._lock:
            self._stream.write(json.dumps(answer) + "\n")
            self._stream.flush()


def _carry_out(commands: AgentCommands, line: _Line, request: Answer) -> None:
    number = request.get("id")
    try:
        line.send(
            {"id": number, "did": commands.timed(str(request.get("do")), request.get("with", {}))}
        )
    except BrokenPipeError:
        return  # nobody is left to be told
    except (FivefoldError, OSError) as problem:
        line.send({"id": number, "failed": described(problem), "kind": type(problem).__name__})
    except Exception as problem:  # noqa: BLE001 - our own mistake: told, and the next command is served
        traceback.print_exc()
        line.send({"id": number, "failed": repr(problem), "kind": "Mistake"})


def _end_with(parent: int, at_end: Callable[[], None]) -> None:
    """A forked child of the parent may hold the other end of our input: look whether the parent lives."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    at_end()


def _leave(commands: AgentCommands, pool: ThreadPoolExecutor) -> None:
    """End now, whatever is under way: it gets a moment to remove what it has not committed."""

    def close() -> None:
        commands.close()
        pool.shutdown(cancel_futures=True)

    ending = threading.Thread(target=close, daemon=True)
    ending.start()
    ending.join(_ENDING_S)
    os._exit(0)


class _Orphaned:
    """What follows when the ranks of this agent are gone; called once, by whoever notices first."""

    def __init__(self, commands: AgentCommands, end: Callable[[], None]) -> None:
        self._commands, self._end, self._once = commands, end, threading.Lock()
        address = supervisor_address()
        self._supervisor: Connection | None = None
        if address:
            with contextlib.suppress(ArenaError):  # the launcher is gone, and soon the ranks
                self._supervisor = connect(address, _ENDING_S)
                self._supervisor.line.settimeout(None)

    def __call__(self) -> None:
        with self._once:
            if self._supervisor is not None and self._commands.flushes_last:
                with contextlib.suppress(ArenaError):
                    self._obey(self._supervisor)
            self._end()

    def _obey(self, supervisor: Connection) -> None:
        word, _, limit = supervisor.receive()[0].decode().partition(" ")
        if word == "flush":
            threading.Thread(target=self._stop_without, args=(supervisor,), daemon=True).start()
        if word == "flush" and (told := self._commands.flush_last(float(limit))):
            supervisor.send(told.encode())

    def _stop_without(self, supervisor: Connection) -> None:
        """Copy no more when whoever asked is gone: a new start must find nobody that writes."""
        with contextlib.suppress(ArenaError):
            supervisor.receive()
        self._commands.close()


def serve_many() -> None:
    """Let this process have as many connections as it may: every rank of the run may call."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Serve until the input ends."""
    parser = argparse.ArgumentParser(prog="python -m fivefold.checkpoint.agent")
    parser.add_argument("--parent", type=int, required=True, help="process that this one ends with")
    parent = parser.parse_args().parent
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # What anything prints goes to the errors; the answers have a line of their own.
    line = _Line(os.fdopen(os.dup(1), "w", encoding="ascii"))
    os.dup2(2, 1)
    serve_many()
    os.nice(_NICE)
    commands = AgentCommands()
    pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="fivefold-agent")
    end = partial(_leave, commands, pool)
    orphaned = _Orphaned(commands, end)
    threading.Thread(target=_end_with, args=(parent, orphaned), daemon=True).start()
    for text in sys.stdin:
        request: Answer = json.loads(text)
        if request.get("do") == "end":
            end()
        elif request.get("do") in ("hello", "peers"):  # what follows builds on them
            _carry_out(commands, line, request)
        else:
            pool.submit(_carry_out, commands, line, request)
    orphaned()


if __name__ == "__main__":
    main()
