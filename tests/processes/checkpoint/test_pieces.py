"""The server of pieces: what it gives, to whom, and that nothing it receives brings it down."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest

from fivefold.checkpoint.local_reader import LocalReader
from fivefold.checkpoint.pieces import (
    MOST_BYTES,
    NotHere,
    PeerError,
    PieceClient,
    Server,
    Stretch,
)
from fivefold.wire import new_key
from generations import saved_state
from strangers import crowd, is_hung_up_while_it_dribbles

STATE = saved_state([[100, 50], [70]])
KEY = new_key()
NAME = STATE.manifest.name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    STATE.put(tmp_path, 0)
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    with Server("127.0.0.1", KEY, LocalReader(folder).answer) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[PieceClient]:
    with PieceClient(server.address, KEY, timeout_s=5) as client:
        yield client


def data(start: int, length: int, member: int = 0, save: str = "s") -> Stretch:
    return Stretch(NAME, save, "data", member, start=start, length=length)


def file(name: str, length: int = 1000, generation: str = NAME) -> Stretch:
    return Stretch(generation, "", "file", 0, name, length=length)


def test_data_is_one_stretch_over_the_files_of_a_member(client: PieceClient) -> None:
    whole = STATE.data(0)
    for start, length in ((0, 150), (90, 20), (100, 1), (149, 9), (150, 5), (0, 0), (999, 3)):
        assert client.read(data(start, length)) == whole[start : start + length]


def test_a_file_comes_in_blocks(client: PieceClient) -> None:
    for size in (7, 50, 100, 101):
        blocks = [bytes(b) for b in client.blocks(file("__0_0.distcp"), size)]
        assert b"".join(blocks) == STATE.payload["__0_0.distcp"]
        assert max(map(len, blocks)) <= size


def test_bytes_arrive_where_they_shall(client: PieceClient) -> None:
    room = memoryview(bytearray(64))
    got = client.read(data(10, 30), room)
    assert bytes(room[:30]) == got == STATE.data(0)[10:40]


def test_what_is_not_there_is_told_and_the_connection_goes_on(client: PieceClient) -> None:
    for absent in (
        data(0, 5, member=1),
        data(0, 5, save="another"),
        file("__7_0.distcp"),
        file(".metadata", generation="step-00000999-epoch-1"),
        Stretch(NAME, "s", "redundancy", 0, length=5),
    ):
        with pytest.raises(NotHere):
            client.read(absent)
    assert client.read(data(0, 3)) == STATE.data(0)[:3]


def test_patience_waits_for_a_node_that_is_not_so_far(folder: Path, client: PieceClient) -> None:
    other = saved_state([[10], [10]], step=130)
    late = threading.Timer(0.3, other.put, (folder, 0))
    late.start()
    request = Stretch(other.manifest.name, "s", "data", 0, length=10)
    assert client.read(request, patience_s=10) == other.data(0)
    late.join()


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "..", "", ".", "a\0b", "__0_0.distcp/../../secret", "x" * 200],
)
def test_no_name_leads_out_of_the_store(folder: Path, client: PieceClient, name: str) -> None:
    (folder.parent / "secret").write_text("secret")
    with pytest.raises(PeerError, match="no file of a checkpoint"):
        client.read(file(name))
    with pytest.raises(PeerError, match="no name of a generation"):
        client.read(file(".metadata", generation=name))


def test_a_shortened_file_is_damage(folder: Path, client: PieceClient) -> None:
    (folder / NAME / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(PeerError, match=r"__0_0.distcp is damaged: it is shorter"):
        client.read(data(0, 100))


def test_another_key_is_refused_on_either_side(server: Server) -> None:
    stranger = PieceClient(server.address, new_key(), timeout_s=5)
    with pytest.raises(PeerError, match="another key: it belongs to another run"):
        stranger.read(data(0, 5))
    with PieceClient(server.address, KEY, timeout_s=5) as friend:
        assert friend.read(data(0, 5)) == STATE.data(0)[:5]


def test_a_server_that_does_not_know_the_key_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:

        def pretend() -> None:
            line, _ = impostor.accept()
            with line:
                line.sendall(b"fivefold file002" + b"n" * 32)
                line.recv(64, socket.MSG_WAITALL)
                line.sendall(b"p" * 32)

        with ThreadPoolExecutor(1) as pool, PieceClient(impostor.getsockname(), KEY) as client:
            pool.submit(pretend)
            with pytest.raises(PeerError, match="another key"):
                client.read(data(0, 5))


def test_a_silent_peer_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = PieceClient(mute.getsockname(), KEY, timeout_s=0.2)
        with pytest.raises(PeerError, match="does not answer: timed out"):
            client.read(data(0, 5))


def test_a_peer_that_dies_in_the_middle_is_told(folder: Path) -> None:
    server = Server("127.0.0.1", KEY, LocalReader(folder).answer)
    with PieceClient(server.address, KEY, timeout_s=5) as client:
        client.read(data(0, 5))
        server.close()
        with pytest.raises(PeerError, match="does not answer"):
            client.read(data(0, 5))


def test_bytes_that_change_on_the_way_are_noticed(server: Server) -> None:
    with Relay(server.address, flip_at=16 + 32 + 32 + 25 + 40) as relay:
        client = PieceClient(relay.address, KEY, timeout_s=5)
        with pytest.raises(PeerError, match="damaged on the way"):
            client.read(data(0, 100))


def test_several_clients_at_once(server: Server, folder: Path) -> None:
    def read_all(_: int) -> bytes:
        with PieceClient(server.address, KEY) as client:
            return b"".join(bytes(client.read(data(at, 1))) for at in range(150))

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read_all, range(8))) == {STATE.data(0)}


def test_garbage_never_ends_the_server(server: Server, client: PieceClient) -> None:
    draw = random.Random(1)
    requests = [
        b"",
        b"{}",
        b"[" * 4000,
        b'{"generation": 1}',
        data(0, 5).to_json()[:-1],
        replace(data(0, 5), length=MOST_BYTES + 1).to_json(),
        data(0, 5).to_json().replace(b'"member": 0', b'"member": "0"'),
        data(0, 5).to_json().replace(b'"member": 0', b'"member": -1'),
        data(0, 5).to_json().replace(b'"start": 0', b'"start": 1e99'),
        data(0, 5, member=10**6).to_json(),
        data(2**61, 5).to_json(),
    ]
    frames = [struct.pack("!I", len(r)) + r for r in requests]
    frames += [draw.randbytes(draw.randrange(1, 300)) for _ in range(60)]
    frames += [b"\xff" * 300, struct.pack("!I", 4096)]
    for frame in frames:
        for greeted in (True, False):
            send_garbage(server, frame, greeted=greeted)
    for _ in range(100):  # single bits of a request
        good = bytearray(data(0, 5).to_json())
        good[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        send_garbage(server, struct.pack("!I", len(good)) + bytes(good), greeted=True)
    assert client.read(data(0, 150)) == STATE.data(0)


def test_callers_that_say_nothing_do_not_keep_others_out(
    server: Server, client: PieceClient
) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(20):
            silent.enter_context(socket.create_connection(server.address))
        assert client.read(data(0, 5)) == STATE.data(0)[:5]


def test_callers_wait_where_there_are_too_many(folder: Path) -> None:
    with (
        Server("127.0.0.1", KEY, LocalReader(folder).answer, most=1) as server,
        PieceClient(server.address, KEY) as first,
        PieceClient(server.address, KEY) as second,
        ThreadPoolExecutor(1) as pool,
    ):
        first.read(data(0, 5))
        waiting = pool.submit(second.read, data(0, 5))
        for _ in range(20):
            assert first.read(data(5, 5)) == STATE.data(0)[5:10] and not waiting.done()
            time.sleep(0.01)
        first.close()
        assert waiting.result(10) == STATE.data(0)[:5]


def test_closing_ends_all_threads(folder: Path) -> None:
    before = threading.active_count()
    server = Server("127.0.0.1", KEY, LocalReader(folder).answer)
    with PieceClient(server.address, KEY) as client:
        client.read(data(0, 5))
        server.close()
        server.close()
    end = time.monotonic() + 5
    while threading.active_count() > before:
        assert time.monotonic() < end
        time.sleep(0.01)


# --- helpers --------------------------------------------------------------------------------------


def send_garbage(server: Server, frame: bytes, *, greeted: bool) -> None:
    with socket.create_connection(server.address, 5) as line:
        hello = line.recv(48, socket.MSG_WAITALL)
        if greeted:
            code = hmac.new(KEY, b"client" + hello[16:] + b"c" * 32, hashlib.sha256).digest()
            line.sendall(b"c" * 32 + code)
            assert len(line.recv(32, socket.MSG_WAITALL)) == 32
        with contextlib.suppress(OSError):
            line.sendall(frame)
            line.shutdown(socket.SHUT_WR)
            while line.recv(65536):
                pass


class Relay:
    """Passes one connection on, with one bit of what comes from the server flipped."""

    def __init__(self, target: tuple[str, int], flip_at: int) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = self._door.getsockname()
        self._target, self._flip_at = target, flip_at
        self._threads = [threading.Thread(target=self._run)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(5)
        self._door.close()

    def _run(self) -> None:
        line, _ = self._door.accept()
        onward = socket.create_connection(self._target)
        self._threads.append(threading.Thread(target=self._pump, args=(line, onward, -1)))
        self._threads[-1].start()
        self._pump(onward, line, self._flip_at)

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, flip_at: int) -> None:
        at = 0
        with contextlib.suppress(OSError):
            while chunk := bytearray(source.recv(65536)):
                if 0 <= flip_at - at < len(chunk):
                    chunk[flip_at - at] ^= 1
                at += len(chunk)
                sink.sendall(chunk)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if flip_at < 0:
            source.close()
            sink.close()


def test_a_crowd_of_silent_callers_keeps_nobody_out(server: Server, client: PieceClient) -> None:
    threads = threading.active_count()
    with crowd(server.address, 300):
        assert client.read(data(0, 3)) == STATE.data(0)[:3]
        end = time.monotonic() + 5  # the threads of those who were hung up on take a moment to end
        while threading.active_count() > threads + 260:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_silent_callers_take_no_place_of_those_who_know_the_key(folder: Path) -> None:
    reader = LocalReader(folder)
    with (
        Server("127.0.0.1", KEY, reader.answer, most=2) as server,
        crowd(server.address, 5),
        PieceClient(server.address, KEY, timeout_s=5) as client,
    ):
        assert client.read(data(0, 3)) == STATE.data(0)[:3]


def test_a_caller_that_sends_a_byte_now_and_then_is_given_up(
    server: Server, client: PieceClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fivefold.wire.listener._HANDSHAKE_S", 1.0)
    assert is_hung_up_while_it_dribbles(server.address, pieces=60, pause_s=0.1)
    assert client.read(data(0, 3)) == STATE.data(0)[:3]


def test_a_server_that_sends_a_byte_now_and_then_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:

        def dribble() -> None:
            with door.accept()[0] as line, contextlib.suppress(OSError):
                for _ in range(45):
                    line.sendall(b"f")
                    time.sleep(0.1)

        thread = threading.Thread(target=dribble)
        thread.start()
        address = ("127.0.0.1", int(door.getsockname()[1]))
        with (
            PieceClient(address, KEY, timeout_s=0.5) as client,
            pytest.raises(PeerError, match="does not answer: timed out"),
        ):
            client.read(data(0, 3))
        thread.join()
