"""What the kernel says of connections: real sockets, and what is left out."""

from __future__ import annotations

import json
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fivefold.trace import connections
from fivefold.trace.connections import Connections, peers
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import ProcessState
from fivefold.trace.trace import Trace


@contextmanager
def connected() -> Generator[tuple[socket.socket, socket.socket]]:
    """Two ends whose addresses differ, as between nodes: 127.0.0.2 and 127.0.0.1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname(), 5, source_address=("127.0.0.2", 0))
        near, _ = server.accept()
        with far, near:
            yield near, far


def send(near: socket.socket, far: socket.socket, size: int) -> None:
    near.settimeout(5)
    for _ in range(size // 10_000):
        near.sendall(b"x" * 10_000)
        left = 10_000
        while left:
            left -= len(far.recv(left))


@pytest.fixture
def no_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback stands in for the network."""

    def is_within(here: str, there: str) -> bool:
        return here == there

    monkeypatch.setattr(connections, "_is_within", is_within)


@pytest.mark.usefixtures("no_loopback")
def test_bytes_that_have_arrived_are_counted_by_peer() -> None:
    with connected() as (near, far):
        before = {*Path("/proc/self/fd").iterdir()}
        send(near, far, 1_000_000)
        own, found = peers()
        assert own == ["127.0.0.1", "127.0.0.2"]
        (peer,) = found
        assert peer.to == "127.0.0.2", "the other end has sent nothing"
        assert peer.bytes == pytest.approx(1_000_000, rel=0.1)
        assert 0 <= peer.kept_s <= peer.busy_s < 60
        assert {*Path("/proc/self/fd").iterdir()} == before, "sockets stay open, and none is added"
        near.sendall(b"still there")
        assert far.recv(100) == b"still there"


def test_connections_within_a_node_and_other_descriptors_do_not_count() -> None:
    one, other = socket.socketpair()
    with connected() as (near, far), one, other, socket.socket(socket.AF_INET, socket.SOCK_DGRAM):
        send(near, far, 1_000_000)
        assert peers() == ([], [])


@pytest.mark.usefixtures("no_loopback")
def test_an_old_kernel_tells_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_BYTES", 4096)  # more than it can tell
    with connected() as (near, far):
        send(near, far, 1_000_000)
        assert peers()[1] == []


@pytest.mark.usefixtures("no_loopback")
def test_notes_after_one_two_four_steps_and_at_the_end(tmp_path: Path) -> None:
    trace = Trace.create(tmp_path, {"rank": 0, "size": 2})
    Connections(trace)
    with connected() as (near, far):
        for _ in range(9):
            send(near, far, 100_000)
            trace.step_ended()
    trace.close(ProcessState.ENDED)
    notes = [
        n for n in RankTrace.load(next(tmp_path.glob("*.trace"))).notes if n["kind"] == "links"
    ]
    assert [note["step"] for note in notes] == [1, 2, 4, 8]
    sent = [note["peers"][0]["bytes"] for note in notes]
    assert sent == sorted(sent) and sent[-1] > 6 * sent[0]
    assert len(json.dumps(notes[-1])) < 400
