"""A reserved port is refused to those who ask for a free one, and left to the ranks."""

from __future__ import annotations

import socket

import pytest

from fivefold.errors import UsageError
from fivefold.launch.port import reserved_port


def listener(port: int = 0) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(("", port))
    made.listen()
    return made


def talk_to(server: socket.socket) -> None:
    address = ("127.0.0.1", server.getsockname()[1])
    with socket.create_connection(address, timeout=5):
        server.accept()[0].close()  # the server closes first: its end stays in TIME_WAIT


def test_a_rank_can_listen_on_the_reserved_port() -> None:
    with reserved_port(None) as port, listener(port) as server:
        talk_to(server)


def test_free_ports_differ_while_they_are_reserved() -> None:
    with reserved_port(None) as first, reserved_port(None) as second:
        assert first != second


def test_a_port_in_use_is_a_mistake_of_the_user() -> None:
    with listener() as server:
        port = server.getsockname()[1]
        with (
            pytest.raises(UsageError, match=f"port {port} is in use; choose another one"),
            reserved_port(port),
        ):
            pass


def test_a_port_can_be_asked_for_again_at_once() -> None:
    with reserved_port(None) as port, listener(port) as server:
        talk_to(server)
    with reserved_port(port) as again:
        assert again == port
