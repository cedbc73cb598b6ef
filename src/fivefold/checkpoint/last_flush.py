"""The copy of the newest save that agents make when all ranks are gone and none will follow.

    newest save of this start that every node has, or can be rebuilt
      every agent    the files of its node, and of a lost one of its set     ──► DIR/step-.../
      the first      .metadata; manifest.json, once all files are there      ──► FLUSHED

Ranks may have been killed at any moment, and agents hear of it one after the other: each looks again until
the copy is complete, so that all come to the same save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from fivefold.checkpoint.encoding import Peers, rebuild
from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.flush import copy_files, finish, items_of
from fivefold.checkpoint.local_reader import LocalReader
from fivefold.checkpoint.manifest import MANIFEST, Manifest
from fivefold.checkpoint.pieces import NotHere, PeerError, PieceClient, Stretch
from fivefold.checkpoint.problems import described
from fivefold.checkpoint.store import LocalStore, PersistentStore
from fivefold.errors import FivefoldError, Unrecoverable

__all__ = ["LastFlush"]

_AGAIN_S = 0.1
_ANSWER_S = 2.0
"""a peer that does not answer in that time is lost: there is little left"""


@dataclass
class LastFlush:
    """One agent's part."""

    store: LocalStore
    far: PersistentStore
    me: int
    epoch: int
    """of the start whose ranks are gone; its members are the nodes of today"""
    peers: Peers
    files: FileOps
    stop: threading.Event = field(default_factory=threading.Event)
    """set when nobody waits for it any more"""
    _lost: set[int] = field(default_factory=set[int])
    _made: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """lost members whose files of a save this node has rebuilt"""
    _copied: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """names of saves and of their files"""
    _done: Manifest | None = None
    """the save of which this node's part is copied"""
    _led: bool = False
    """whether its part included the manifest"""

    def run(self, end: float) -> str:
        """Copy until `end` (monotonic). What people should know; empty if there was nothing to do."""
        why = "other nodes have not copied their parts"
        while not self._complete(self._done):
            if self._followed() or (manifest := self._newest()) is None:
                return ""
            if self._done is None and self._complete(manifest):
                return ""  # it was copied before
            try:
                self._copy(manifest, first=self._alive(manifest)[0] == self.me)
            except (FivefoldError, OSError) as problem:
                why = described(problem)
            if (time.monotonic() >= end or self.stop.is_set()) and not self._complete(self._done):
                return (
                    f"{manifest.name} is on the nodes alone, and was not copied to {self.far.place.where()}: "
                    f"{why}. The next start goes on from it, or `fivefold checkpoint flush` copies it"
                )
            self.stop.wait(_AGAIN_S)
        assert self._done is not None
        return f"{self._done.name} was copied to {self.far.place.where()}" if self._led else ""

    def _followed(self) -> bool:
        """Whether a later start has saved, and copies this one's, or the directory is another run's."""
        run = self.far.read_run()
        return run is None or run.run != self.store.run or run.epoch > self.epoch

    def _alive(self, manifest: Manifest) -> list[int]:
        return [member.number for member in manifest.members if member.number not in self._lost]

    def _complete(self, manifest: Manifest | None) -> bool:
        if manifest is None:
            return False
        found = self.far.find(manifest.name)
        there = None if found is None else found.manifest
        return there is not None and there.same_save(manifest)

    def _newest(self) -> Manifest | None:
        """The same on all nodes, as soon as nothing changes on any."""
        for generation in reversed(self.store.generations()):
            manifest = generation.manifest
            if manifest is None or manifest.epoch != self.epoch:
                continue
            told = [manifest.state, *(self._state(n, manifest) for n in self._alive(manifest))]
            # Without redundancy nobody can make what a lost node had.
            if None not in told and (
                "local" not in told or len(self._alive(manifest)) == len(manifest.members)
            ):
                return manifest
        return None

    def _state(self, member: int, manifest: Manifest) -> str | None:
        """Of a save at another node; None if it does not have it."""
        if member == self.me:
            return manifest.state
        wanted = Stretch(manifest.name, manifest.save, "file", 0, MANIFEST)
        try:
            with PieceClient(
                self.peers.addresses[member], self.peers.key, timeout_s=_ANSWER_S
            ) as client:
                return Manifest.parse(b"".join(map(bytes, client.blocks(wanted)))).state
        except NotHere:
            return None
        except PeerError:
            self._lost.add(member)
            return manifest.state

    def _copy(self, manifest: Manifest, *, first: bool) -> None:
        reader = LocalReader(self.store.root, self.files)
        members = [self.me, *self._rebuilt(reader, manifest)]
        items = [
            item
            for item in items_of(manifest, members, metadata=first)
            if (manifest.name, item.name) not in self._copied
        ]
        if items:
            source, rate = reader.path(manifest.name), self.peers.rate
            copy_files(source, self.far.place, manifest, items, rate=rate, files=self.files)
            self._copied |= {(manifest.name, item.name) for item in items}
        if first:
            finish(self.far, manifest)
        self._done, self._led = manifest, first

    def _rebuilt(self, reader: LocalReader, manifest: Manifest) -> Collection[int]:
        """Lost members whose files this node makes anew: the first that is left of their set does."""
        made: list[int] = []
        for number in sorted(self._lost):
            group = manifest.set_of(number)
            left = [other for other in group if other not in self._lost]
            if not left:
                raise Unrecoverable(f"node {manifest.members[number].host} is lost, with its part")
            if left[0] == self.me:
                near = {n: a for n, a in self.peers.addresses.items() if n not in self._lost}
                gone = [other for other in group if other in self._lost]
                peers = replace(self.peers, addresses=near)
                if (manifest.name, number) not in self._made:
                    rebuild(reader, manifest, number, peers, self.files, lost=gone)
                    self._made.add((manifest.name, number))
                made.append(number)
        return made
