"""Making redundancy out of what other nodes have, and lost data out of redundancy.

Both pull: a node reads from its peers, block after block, and writes to its own storage only.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from fivefold.checkpoint.files import Bytes, FileOps, Stream, Written, crash_at, is_temporary
from fivefold.checkpoint.local_reader import LocalReader
from fivefold.checkpoint.manifest import MANIFEST, Item, Manifest, redundancy_name
from fivefold.checkpoint.pieces import Address, NotHere, PeerError, PieceClient, Stretch
from fivefold.checkpoint.rate import Rate
from fivefold.checkpoint.schemes import CodedPiece, Term, carry_out, clip, reads, scheme_named
from fivefold.closing import Closing
from fivefold.errors import CheckpointError, Damaged

__all__ = ["Peers", "protect", "rebuild", "repair_manifest"]

BLOCK_BYTES = 1 << 20
"""what a request to a peer asks for"""


@dataclass(frozen=True)
class Peers:
    """Where the members' data and redundancy can be read, and how."""

    addresses: Mapping[int, Address]
    """by member"""
    key: bytes
    own: Address | None = None
    """members with this address are read from the own storage"""
    timeout_s: float = 30.0
    patience_s: float = 30.0
    """how long a peer may be behind with its own part of the generation"""
    rate: Rate = field(default_factory=Rate)


@dataclass(frozen=True)
class _Encoding:
    """What the functions below share."""

    reader: LocalReader
    manifest: Manifest
    peers: Peers
    files: FileOps

    @property
    def folder(self) -> Path:
        return self.reader.path(self.manifest.name)

    def request(self, member: int, term: Term, length: int) -> Stretch:
        return Stretch(
            self.manifest.name, self.manifest.save, term.of, member, "", term.start, length
        )


def protect(reader: LocalReader, generation: str, peers: Peers, files: FileOps) -> tuple[Item, ...]:
    """Write what this node keeps for the others of its set. Doing it again makes the same bytes.

    Returns the files that were written: none with scheme single.

    Raises:
        CheckpointError: there is no such generation here; `PeerError`: a peer is gone or too slow.
        OSError: writing failed, the disk being full for example. Nothing is left behind.
    """
    manifest = reader.manifest(generation)
    if manifest.me is None:
        raise CheckpointError(
            f"{reader.path(generation)} belongs to no node: nothing to protect there"
        )
    scheme = scheme_named(manifest.scheme)
    if scheme.least == 1:
        return ()
    group = manifest.set_of(manifest.me)
    recipe = scheme.recipe(_lengths(manifest, group), group.index(manifest.me))
    work = _Encoding(reader, manifest, peers, files)
    name = redundancy_name(manifest.me)
    _sweep(work, name)
    with files.create(work.folder / name) as stream:
        crash_at("encoding")
        _carry_out(work, group, recipe, stream, "encoding")
        written = stream.commit()
    return (Item(name, written.length, written.digest),)


def rebuild(
    reader: LocalReader,
    manifest: Manifest,
    member: int,
    peers: Peers,
    files: FileOps,
    *,
    lost: Collection[int],
    bare: Collection[int] | None = None,
) -> list[str]:
    """Make the files of a member whole here: what is missing or damaged comes from redundancy.

    What is whole stays as it is, so doing it again does nothing. With the payload come DCP's metadata
    and, where there is none, a manifest.

    Args:
        reader: where the files shall lie.
        manifest: of the generation; whose does not matter.
        member: whose data is wanted.
        peers: where the others of its set can be read.
        files: how files are touched.
        lost: members whose data cannot be read, `member` among them or not.
        bare: members whose redundancy cannot be read; those of `lost` unless told.

    Returns:
        Names of the files that were made.

    Raises:
        Unrecoverable: too much is lost.
        Damaged: what came out is not what was saved: a source is damaged. The file is not there.
        CheckpointError: another save has the directory; `PeerError`: a peer is gone or too slow.
        OSError: writing failed.
    """
    work = _Encoding(reader, manifest, peers, files)
    files.make_dir(work.folder)
    _refuse_another_save(reader, manifest)
    made = _rebuild_payload(work, member, {*lost, member}, bare)
    if not _whole(work, manifest.metadata):
        _fetch(work, manifest.metadata)
        made.append(manifest.metadata.name)
    if repair_manifest(reader, manifest, member, files):
        made.append(MANIFEST)
    return made


def repair_manifest(reader: LocalReader, manifest: Manifest, member: int, files: FileOps) -> bool:
    """Write the manifest of `member` where the directory has none that can be read."""
    try:
        reader.manifest(manifest.name)
    except (NotHere, Damaged):
        own = replace(manifest, me=member, redundancy=(), state="local")
        files.write(reader.path(manifest.name) / MANIFEST, [own.to_json().encode("ascii")])
        return True
    return False


def _rebuild_payload(
    work: _Encoding, member: int, lost: Collection[int], bare: Collection[int] | None
) -> list[str]:
    manifest = work.manifest
    group = manifest.set_of(member)
    place = {number: position for position, number in enumerate(group)}
    made: list[str] = []
    pieces: list[CodedPiece] | None = None
    start = 0
    for item in manifest.members[member].items:
        if not _whole(work, item):
            crash_at("rebuilding")
            pieces = pieces or scheme_named(manifest.scheme).rebuild(
                _lengths(manifest, group),
                [place[number] for number in lost if number in place],
                place[member],
                None if bare is None else [place[number] for number in bare if number in place],
            )
            _make(work, group, item, clip(pieces, start, start + item.length))
            made.append(item.name)
        start += item.length
    return made


def _make(work: _Encoding, group: Sequence[int], item: Item, pieces: list[CodedPiece]) -> None:
    _sweep(work, item.name)
    with work.files.create(work.folder / item.name) as stream:
        _carry_out(work, group, pieces, stream, "rebuilding")
        if not _is(stream, item):
            raise Damaged(
                "what was rebuilt of a file", work.folder / item.name,
                "a member of the set, or its redundancy, has changed since the save",
            )  # fmt: skip
        stream.commit()


def _fetch(work: _Encoding, item: Item) -> None:
    """Copy a file from the first peer that has it whole."""
    told: list[str] = []
    for address in dict.fromkeys(work.peers.addresses.values()):
        if address == work.peers.own:
            continue
        request = Stretch(work.manifest.name, work.manifest.save, "file", 0, item.name)
        with (
            PieceClient(address, work.peers.key, timeout_s=work.peers.timeout_s) as client,
            work.files.create(work.folder / item.name) as stream,
        ):
            try:
                for block in client.blocks(request, BLOCK_BYTES):
                    work.peers.rate.take(len(block))
                    stream.write(block)
            except (PeerError, NotHere) as problem:
                told.append(str(problem))
                continue
            if _is(stream, item):
                stream.commit()
                return
            told.append(f"{address[0]}:{address[1]} has {item.name} damaged")
    raise PeerError(
        f"no node gives {work.manifest.name}/{item.name}: " + ("; ".join(told) or "no peers")
    )


def _is(stream: Stream, item: Item) -> bool:
    return (stream.tell(), stream.digest()) == (item.length, item.digest)


def _carry_out(
    work: _Encoding, group: Sequence[int], pieces: Sequence[CodedPiece], stream: Stream, point: str
) -> None:
    """`schemes.carry_out` over the network; positions in pieces are those in `group`."""

    def write(block: Bytes) -> None:
        stream.write(block)
        crash_at(point)

    positions = {term.member for piece in pieces for term in piece.terms}
    with ExitStack() as stack:
        readers = {at: _reader(work, group[at], stack) for at in positions}
        ahead = Ahead(pieces, readers, BLOCK_BYTES, timeout_s=_block_s(work.peers, len(readers)))
        stack.callback(ahead.close)  # before the clients hang up, after which its threads end
        try:
            carry_out(pieces, ahead.read, write, BLOCK_BYTES)
        finally:
            stack.close()
            ahead.join()


def _block_s(peers: Peers, readers: int) -> float:
    """How long a block may take that all readers fill their buffers before."""
    limit = peers.rate.bytes_per_s
    queued_s = readers * (DEPTH + 2) * BLOCK_BYTES / limit if limit else 0.0
    return peers.timeout_s + peers.patience_s + queued_s + 1.0


def _reader(work: _Encoding, member: int, stack: ExitStack) -> Reader:
    """Reads what a member has, from here or over the network, within the rate."""
    address, rate = work.peers.addresses.get(member), work.peers.rate
    if address is None:
        raise PeerError(f"nobody said where member {member} of {work.manifest.name} is")
    if address == work.peers.own:
        return _limited(
            rate, lambda t, n, room: work.reader.answer(work.request(member, t, n), room)
        )
    client = stack.enter_context(
        PieceClient(address, work.peers.key, timeout_s=work.peers.timeout_s)
    )
    patience_s = work.peers.patience_s
    return _limited(
        rate,
        lambda t, n, room: client.read(work.request(member, t, n), room, patience_s=patience_s),
    )


def _limited(rate: Rate, reader: Reader) -> Reader:
    def read(term: Term, length: int, room: memoryview) -> memoryview:
        rate.take(length)
        return reader(term, length, room)

    return read


def _sweep(work: _Encoding, name: str) -> None:
    """Remove what an agent that was killed has begun to write under this name."""
    for left in work.files.list(work.folder):
        if is_temporary(left) and left.startswith(f"{name}."):
            work.files.remove(work.folder / left)


def _whole(work: _Encoding, item: Item) -> bool:
    path = work.folder / item.name
    try:
        return work.files.size(path) == item.length and (
            work.files.digest(path) == Written(item.length, item.digest)
        )
    except OSError:  # missing, or on a part of the disk that cannot be read any more
        return False


def _refuse_another_save(reader: LocalReader, manifest: Manifest) -> None:
    try:
        there = reader.manifest(manifest.name)
    except (NotHere, Damaged):
        return
    if not there.same_save(manifest):
        raise CheckpointError(
            f"{reader.path(manifest.name)} holds another save of that step (run {there.run}, save "
            f"{there.save}); it is left alone: remove it if it is not needed"
        )


def _lengths(manifest: Manifest, group: Sequence[int]) -> list[int]:
    return [manifest.members[member].length for member in group]


# ---- Blocks of several members fetched at once, a few ahead of where they are needed
#
#     member 0   a thread that reads  ----> [block][block][block] --+
#     member 1   a thread that reads  ----> [block][block][block] --+--> read(term), in the order of carry_out
#     member 2   a thread that reads  ----> [block][block][block] --+
#
# A thread is at most `DEPTH` blocks ahead and uses its buffers again: memory is members x (DEPTH + 2) blocks.

DEPTH = 3
_LOOK_S = 0.05

Reader = Callable[[Term, int, memoryview], memoryview]
"""Reads `length` bytes of a term, or fewer where they end, into a buffer; returns what it filled."""


class Ahead(Closing):
    """What `carry_out(pieces, ahead.read, ..., block_bytes)` reads.

    Args:
        pieces: what will be carried out.
        readers: by member; each is called in one thread of its own.
        block_bytes: as given to `carry_out`.
        timeout_s: how long one block may take.
    """

    def __init__(
        self,
        pieces: Sequence[CodedPiece],
        readers: Mapping[int, Reader],
        block_bytes: int,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        self._pieces, self._block_bytes, self._timeout_s = pieces, block_bytes, timeout_s
        self._stop = threading.Event()
        self._lines: dict[int, queue.Queue[memoryview | Exception]] = {}
        self._threads: list[threading.Thread] = []
        for member in sorted({term.member for piece in pieces for term in piece.terms}):
            self._lines[member] = queue.Queue(DEPTH)
            thread = threading.Thread(
                target=self._fetch,
                args=(member, readers[member]),
                name=f"fivefold-fetch-{member}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def read(self, term: Term, length: int) -> memoryview:
        """The next block of the term's member; valid until the one after it is asked for.

        Raises what the reader raised, or `PeerError` when nothing comes in time.
        """
        try:
            block = self._lines[term.member].get(timeout=self._timeout_s)
        except queue.Empty:
            raise PeerError(
                f"member {term.member} gave nothing of its {term.of} within {self._timeout_s:g} s "
                f"({length} bytes from {term.start})"
            ) from None
        if isinstance(block, Exception):
            raise block
        return block

    def close(self) -> None:
        """Let the threads end; those that wait for bytes end when their reader does."""
        self._stop.set()

    def join(self) -> None:
        """Wait for the threads after `close`."""
        for thread in self._threads:
            thread.join(self._timeout_s)

    def _fetch(self, member: int, reader: Reader) -> None:
        rooms = [memoryview(bytearray(self._block_bytes)) for _ in range(DEPTH + 2)]
        wanted = ((t, n) for t, n in reads(self._pieces, self._block_bytes) if t.member == member)
        for number, (term, length) in enumerate(wanted):
            try:
                got: memoryview | Exception = reader(term, length, rooms[number % len(rooms)])
            except Exception as problem:  # noqa: BLE001 - raised where the block is read
                got = problem
            if not self._put(self._lines[member], got) or isinstance(got, Exception):
                return

    def _put(self, line: queue.Queue[memoryview | Exception], got: memoryview | Exception) -> bool:
        while not self._stop.is_set():
            try:
                line.put(got, timeout=_LOOK_S)
            except queue.Full:
                continue
            return True
        return False
