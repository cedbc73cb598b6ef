"""Links between processes: one conformance test for all of them, and the faults of sockets."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import link_checks
import nodes
from fivefold.arena.native import problem
from fivefold.errors import OffloadWarning, UsageError
from fivefold.helpers.handshake import (
    Address,
    HandshakeError,
    Unreachable,
    connect,
    listen,
    parse_key,
)
from fivefold.helpers.messages import Kind
from fivefold.helpers.receive_buffers import BufferPool
from fivefold.helpers.stream_link import StreamLink
from fivefold.wire.frames import LinkClosed
from fivefold.wire.reader import no_place
from helping import Nursery, is_running, signalled
from link_checks import CHECKS, LIMIT_S, Ends, made
from strangers import crowd
from waiting import awaited

pytestmark = pytest.mark.skipif(bool(problem()), reason="installed without the C core")

KEY = bytes(range(32))
SCRIPT = str(Path(link_checks.__file__).with_name("link_ends.py"))


class Helper:
    """A process that listens and answers."""

    def __init__(self, nursery: Nursery, kind: str, folder: Path) -> None:
        address = f"unix:{folder}/h.sock" if kind == "arena" else "127.0.0.1:0"
        fields = folder / "address"
        self.pid = nursery.start(
            "link_ends:listening", {}, address=address, key=KEY.hex(), file=str(fields)
        )
        awaited(fields.exists, "a helper's start")
        self.address = fields.read_text()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        signalled(self.pid, signal.SIGKILL)
        awaited(lambda: not is_running(self.pid), "a helper's end")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made_nursery = Nursery("link_ends")
    yield made_nursery
    made_nursery.close()


@pytest.fixture(scope="module", params=["arena", "tcp"])
def helper(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Helper]:
    made_helper = Helper(nursery, request.param, tmp_path_factory.mktemp("helper"))
    yield made_helper
    made_helper.end()


@pytest.fixture(params=["arena", "tcp"])
def own_helper(
    request: pytest.FixtureRequest, nursery: Nursery, tmp_path: Path
) -> Iterator[Helper]:
    """One that a test may stop and kill."""
    made_helper = Helper(nursery, request.param, tmp_path)
    yield made_helper
    made_helper.end()


@pytest.fixture(scope="module")
def pool() -> Iterator[BufferPool]:
    with BufferPool(64 << 20, 3) as made_trays:
        yield made_trays


@pytest.fixture
def ends(helper: Helper, pool: BufferPool) -> Iterator[Ends]:
    with connect(helper.address, KEY, name="helper 1") as link:
        link.share(pool)
        yield Ends(link, pool)
        link.place = no_place
        with contextlib.suppress(LinkClosed):
            link.send(Kind.BYE, {})


@pytest.mark.long(every=8)
@pytest.mark.parametrize("check", CHECKS)
def test_every_socket_does_what_a_link_does(ends: Ends, check: str) -> None:
    CHECKS[check](ends)


def test_a_helper_that_is_killed_is_noticed_at_once(own_helper: Helper, pool: BufferPool) -> None:
    with connect(own_helper.address, KEY, name="helper 1") as link:
        ends = Ends(link, pool)
        link.share(pool)
        buffer = ends.buffer()
        ends.ask(do="sleep", s=60)
        ends.ask(do="make", size=100, seed=1, buffer=buffer.number)
        assert link.receive(0.2) is None
        own_helper.signal(signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(LinkClosed, match="lost helper 1"):
            link.receive(LIMIT_S)
        assert time.monotonic() - begun < 10.0
        del buffer
        link.place = no_place
        assert pool.free == pool.count
        with pytest.raises(Unreachable, match="does not answer"):
            connect(own_helper.address, KEY, timeout_s=1.0)


def test_a_helper_killed_within_a_payload_is_noticed(own_helper: Helper, pool: BufferPool) -> None:
    with connect(own_helper.address, KEY, name="helper 1") as link:
        Ends(link, pool).ask(do="make", size=64 << 20, seed=1)  # no buffer: through the socket
        select.select([link], [], [], LIMIT_S)  # more than sockets hold: it is in the middle
        own_helper.signal(signal.SIGKILL)
        with pytest.raises(LinkClosed, match=r"in the middle of a message|reset"):
            link.receive(LIMIT_S)


def test_a_helper_that_stands_still_holds_up_nobody(own_helper: Helper, pool: BufferPool) -> None:
    with connect(own_helper.address, KEY, name="helper 1") as link:
        ends = Ends(link, pool)
        own_helper.signal(signal.SIGSTOP)
        weights = made(16 << 20, 1)
        begun = time.monotonic()
        link.send(Kind.WEIGHTS, {"do": "digest", "lease": 1}, [weights])
        assert link.receive(0.2) is None
        assert time.monotonic() - begun < 5.0
        own_helper.signal(signal.SIGCONT)
        assert ends.answer().fields["lease"] == 1


def test_a_helper_that_reads_nothing_for_too_long_is_lost(own_helper: Helper) -> None:
    with connect(own_helper.address, KEY, name="helper 1", silent_s=1.0) as link:
        own_helper.signal(signal.SIGSTOP)
        link.send(Kind.WEIGHTS, {"do": "digest"}, [bytes(16 << 20)])
        with pytest.raises(LinkClosed, match=r"read nothing for 1 s|timed out"):
            link.receive(LIMIT_S)


@pytest.mark.parametrize("own_helper", ["arena"], indirect=True)
def test_a_stopped_helper_does_not_write_into_a_tray_that_became_anothers(
    own_helper: Helper, pool: BufferPool
) -> None:
    with connect(own_helper.address, KEY) as link:
        ends = Ends(link, pool)
        link.share(pool)
        buffer = ends.buffer()
        ends.ask(do="make", size=1 << 20, seed=1, pause_s=0.2, buffer=buffer.number)
        own_helper.signal(signal.SIGSTOP)
        link.close()  # it was given up
        link.place = no_place
        del buffer
        others = [pool.take() for _ in range(pool.count)]
        for other in others:
            assert other is not None
            other.memory[: 1 << 20] = b"n" * (1 << 20)
        own_helper.signal(signal.SIGCONT)
        with connect(own_helper.address, KEY, timeout_s=LIMIT_S) as again:
            ends = Ends(again, pool)
            ends.ask(do="make", size=1, seed=1)  # it has dealt with the old lease by now
            assert len(ends.answer().payload) == 1
            again.send(Kind.BYE, {})
        for other in others:
            assert other is not None
            assert bytes(other.memory[: 1 << 20]) == b"n" * (1 << 20)


# ---- handshake


def test_a_wrong_key_is_refused_on_both_sides(tmp_path: Path) -> None:
    for address in (f"unix:{tmp_path}/h.sock", "127.0.0.1:0"):
        with listen(address, KEY) as listener:
            with pytest.raises(
                HandshakeError, match="knows another key: it belongs to another job"
            ):
                connect(listener.address, secrets.token_bytes(32), name="helper 1")
            assert listener.accept(0.2) is None


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (b"fivefold help002" + bytes(32), "speaks protocol 002.*install the same version"),
        (b"SSH-2.0-OpenSSH_9.6\r\n" + bytes(60), "no helper of fivefold"),
        (b"fivefold help004" + bytes(64), "another key"),
    ],
)
def test_who_answers_otherwise_is_told_apart(head: bytes, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:

        def answer() -> None:
            with door.accept()[0] as line, contextlib.suppress(ConnectionResetError):
                line.sendall(head)
                line.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(HandshakeError, match=why):
            connect(f"127.0.0.1:{door.getsockname()[1]}", KEY)
        thread.join()


def test_who_says_nothing_is_given_up_and_holds_up_nobody() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        begun = time.monotonic()
        with pytest.raises(Unreachable):
            connect(f"127.0.0.1:{door.getsockname()[1]}", KEY, timeout_s=0.3)
        assert time.monotonic() - begun < 5.0
    with listen("127.0.0.1:0", KEY) as listener:
        place = Address.parse(listener.address)
        with socket.create_connection((place.host, place.port)), connect(listener.address, KEY):
            link = listener.accept(LIMIT_S)
            assert link is not None
            link.close()


def test_a_crowd_of_silent_callers_keeps_no_trainer_out() -> None:
    with listen("127.0.0.1:0", KEY) as listener:
        place = Address.parse(listener.address)
        threads = threading.active_count()
        with crowd((place.host, place.port), 100), connect(listener.address, KEY):
            # The thread of a caller that was hung up ends a moment later.
            awaited(lambda: threading.active_count() <= threads + 70, "hanging up", 10)
            link = listener.accept(LIMIT_S)
            assert link is not None
            link.close()


def test_nobody_there_is_unreachable(tmp_path: Path) -> None:
    for address in (f"unix:{tmp_path}/none.sock", "127.0.0.1:1", "no-such-host.invalid:21001"):
        with pytest.raises(Unreachable, match="does not answer"):
            connect(address, KEY, timeout_s=2.0)


def test_a_port_or_path_in_use_is_told(tmp_path: Path) -> None:
    for address in ("127.0.0.1:0", f"unix:{tmp_path}/h.sock"):
        with listen(address, KEY) as listener:
            with pytest.raises(UsageError, match=r"in use|another process does"):
                listen(listener.address, KEY)
            link = connect(listener.address, KEY)  # the first is unharmed
            link.close()
    assert not (tmp_path / "h.sock").exists()


def test_the_socket_of_a_helper_that_was_killed_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "h.sock"))
    with listen(f"unix:{tmp_path}/h.sock", KEY):
        assert (tmp_path / "h.sock").stat().st_mode & 0o777 == 0o600
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="there is a file"):
        listen(f"unix:{tmp_path}/file", KEY)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("dpu01", "no address of a helper; valid: unix:/path"),
        ("dpu01:", "no address"),
        (":21001", "no address"),
        ("dpu01:70000", "no address"),
        ("unix:a.sock", "no absolute path"),
        ("unix:/tmp/" + "x" * 103, "107 is the most"),
        ("unix:/no/such/folder/a.sock", "cannot listen.*directory that exists"),
        ("192.0.2.1:21001", "no address of this host"),
        ("no-such-host.invalid:21001", "no address of this host"),
    ],
)
def test_a_wrong_address_is_told_with_the_remedy(address: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        listen(address, KEY)


def test_addresses_are_written_as_they_are_read() -> None:
    for text in ("unix:/tmp/" + "x" * 102, "dpu01:21001", "[fd00::7]:21001", "10.0.0.1:0"):
        assert str(Address.parse(text)) == text


def test_keys_are_64_hexadecimal_digits() -> None:
    assert parse_key(KEY.hex()) == KEY
    for text in ("", "00", "x" * 64, KEY.hex() + "00"):
        with pytest.raises(UsageError, match="64 hexadecimal digits"):
            parse_key(text)


def test_several_trainers_are_greeted_and_named(tmp_path: Path) -> None:
    with listen(f"unix:{tmp_path}/h.sock", KEY, about={"number": 3}) as listener:
        links: list[StreamLink] = []
        for rank in range(3):
            link = connect(listener.address, KEY, about={"rank": rank, "host": "here"})
            assert link.hello["about"] == {"number": 3}
            accepted = listener.accept(LIMIT_S)
            assert accepted is not None
            assert accepted.peer == f"trainer {rank} (here)"
            links += [link, accepted]
        assert listener.accept(0.0) is None
    for link in links:
        link.close()


def test_a_helper_that_counts_processes_otherwise_is_sent_to_and_a_warning_says_so(
    pool: BufferPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container: its process number here is another than the one it knows."""
    with listen(f"unix:{tmp_path}/h.sock", KEY) as listener:
        monkeypatch.setattr("fivefold.helpers.handshake.os.getpid", lambda: 1)
        with pytest.warns(OffloadWarning, match="another PID namespace"):
            link = connect(listener.address, KEY, name="helper 1")
        monkeypatch.undo()
        with link:
            assert not link.passes_memory
            link.share(pool)
            accepted = listener.accept(LIMIT_S)
            assert accepted is not None
            thread = threading.Thread(target=link_checks.serve, args=(accepted,))
            thread.start()
            ends = Ends(link, pool)
            ends.ask(do="make", size=100, seed=1, buffer=ends.buffer().number)
            assert bytes(ends.answer().payload) == made(100, 1)
            link.place = no_place
            link.send(Kind.BYE, {})
            thread.join()
            accepted.close()


# ---- two hosts


@pytest.mark.long
@pytest.mark.skipif(bool(nodes.refusal()), reason=nodes.refusal() or "nodes can be made")
def test_two_hosts_do_what_a_link_does_and_a_cut_cable_is_noticed() -> None:
    with nodes.Nodes(2) as two:
        address = f"{two.address(1)}:21001"
        helper = two.start(1, [sys.executable, SCRIPT, "listen", address, KEY.hex()])
        file = two.shared / "results.json"
        command = [sys.executable, SCRIPT, "connect", address, KEY.hex()]
        trainer = two.start(0, [*command, str(file)])
        assert trainer.wait(60) == 0, trainer.text + helper.text
        assert {
            name: fields for name, fields in json.loads(file.read_text()).items() if fields
        } == {}
        trainer = two.start(0, [*command, ""])
        end = time.monotonic() + LIMIT_S
        while "connected" not in trainer.text and time.monotonic() < end:
            time.sleep(0.05)
        two.cut(1)
        assert trainer.wait(LIMIT_S) == 0
        assert "LinkClosed: lost the helper at" in trainer.text
