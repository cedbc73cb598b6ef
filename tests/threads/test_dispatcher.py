"""The dispatcher against a helper that the test plays itself, over a real socket."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import OffloadWarning
from fivefold.helpers.dispatcher import Dispatcher
from fivefold.helpers.handshake import TrainerListener, listen
from fivefold.helpers.messages import Kind
from fivefold.wire.frames import Message
from waiting import awaited

KEY = bytes(range(32))


class Client:
    """Grants leases as long as it has some; says what happened."""

    def __init__(
        self, dispatcher: Dispatcher, service: str = "loader", *, urgent: bool = True
    ) -> None:
        self.service, self.number = service, dispatcher.number(service)
        self.urgent, self.left, self.log = urgent, 100, list[Any]()
        self._dispatcher = dispatcher
        dispatcher.join(self)

    def opening(self) -> dict[str, Any]:
        return {"identity": {"of": self.number}, "axes": {}}

    def ready(self, helper: int, _: dict[str, Any]) -> None:
        self.log.append(("ready", helper))

    def refused(self, helper: int, why: str) -> None:
        self.log.append(("refused", helper, why))

    def grant(self, _: int, link: Any) -> int | None:
        if self.left == 0:
            return None
        self.left -= 1
        lease = self._dispatcher.lease()
        fields = {"service": self.service, "number": self.number, "lease": lease}
        link.send(Kind.LEASE, fields)
        return lease

    def place(self, *_: Any) -> memoryview | None:
        return None

    def answered(self, helper: int, message: Message) -> bool:
        self.log.append((message.kind.name, helper))
        return True

    def damaged(self, helper: int, _: int) -> bool:
        self.log.append(("damaged", helper))
        return True

    def lost(self, helper: int, _: str) -> None:
        self.log.append(("lost", helper))


class Helper:
    """The other end of one line."""

    def __init__(self, listener: TrainerListener) -> None:
        self._listener = listener
        self.link: Any = None

    def meet(self) -> None:
        self.link = self._listener.accept(20.0)
        assert self.link is not None

    def next(self, kind: Kind) -> dict[str, Any]:
        message = self.link.receive(20.0)
        assert message is not None and message.kind == kind, message
        return message.fields

    def nothing_comes(self) -> bool:
        return self.link.receive(0.1) is None

    def opens(self, clients: int) -> None:
        for _ in range(clients):
            fields = self.next(Kind.OPEN)
            self.link.send(Kind.READY, {name: fields[name] for name in ("service", "number")})

    def answers(self, lease: dict[str, Any]) -> None:
        self.link.send(Kind.DONE, {**lease, "busy_s": 0.5, "waited_s": 0.25}, [b"made"])


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[TrainerListener]:
    with listen(f"unix:{tmp_path}/helper.sock", KEY) as made:
        yield made


@pytest.fixture
def dispatcher(listener: TrainerListener) -> Iterator[Dispatcher]:
    with Dispatcher([listener.address], KEY) as made:
        yield made


def test_a_helper_holds_two_leases_and_its_figures_add_up(
    dispatcher: Dispatcher, listener: TrainerListener
) -> None:
    client, helper = Client(dispatcher), Helper(listener)
    helper.meet()
    helper.opens(1)
    first, second = helper.next(Kind.LEASE), helper.next(Kind.LEASE)
    assert helper.nothing_comes(), "one at work, one queued"
    helper.answers(first)
    third = helper.next(Kind.LEASE)
    assert len({lease["lease"] for lease in (first, second, third)}) == 3
    helper.link.send(Kind.FAILED, {**second, "kind": "LoadError", "message": "", "traceback": ""})
    helper.next(Kind.LEASE)
    helper.answers(first)  # a lease that is over
    helper.answers({**third, "busy_s": "long"})
    helper.next(Kind.LEASE)
    awaited(lambda: len(client.log) == 4, "three answers")
    assert client.log == [("ready", 0), ("DONE", 0), ("FAILED", 0), ("DONE", 0)]
    figures = dispatcher.helpers()[0]
    assert (figures.leases, figures.failed, figures.duplicates, figures.bytes) == (2, 1, 0, 8)
    assert (figures.busy_s, figures.waited_s, figures.state) == (1.0, 0.5, "serving")
    dispatcher.close()
    assert helper.next(Kind.BYE)["why"] == "the job has ended"
    assert dispatcher.helpers()[0].state == "ended"
    helper.link.close()


def test_urgent_loaders_come_first_then_validators_then_others(
    dispatcher: Dispatcher, listener: TrainerListener
) -> None:
    clients = [
        Client(dispatcher, "loader", urgent=False),
        Client(dispatcher, "validator"),
        Client(dispatcher, "loader"),
        Client(dispatcher, "loader"),
    ]
    for client in clients:
        client.left = 0
    helper = Helper(listener)
    helper.meet()
    helper.opens(4)
    awaited(lambda: all(client.log for client in clients), "four READY")
    for client in clients:
        client.left = 2
    dispatcher.feed()
    seen = []
    for _ in range(8):
        lease = helper.next(Kind.LEASE)
        seen.append((lease["service"], lease["number"]))
        helper.answers(lease)
    first, then = seen[:4], seen[4:]
    assert first in ([("loader", 1), ("loader", 2)] * 2, [("loader", 2), ("loader", 1)] * 2)
    assert then == [("validator", 0)] * 2 + [("loader", 0)] * 2
    helper.link.close()


@pytest.mark.filterwarnings("ignore::fivefold.errors.OffloadWarning")
def test_a_helper_that_comes_back_is_asked_again(
    dispatcher: Dispatcher, listener: TrainerListener
) -> None:
    client, helper = Client(dispatcher), Helper(listener)
    for _ in range(3):
        helper.meet()
        helper.opens(1)
        helper.next(Kind.LEASE)
        helper.link.close()
    awaited(lambda: len(client.log) == 6, "three visits")
    assert client.log == [("ready", 0), ("lost", 0)] * 3
    assert 3 <= dispatcher.helpers()[0].lost <= 6, "the second lease may not have been on its way"
    helper.meet()
    helper.opens(1)
    helper.next(Kind.LEASE)
    helper.next(Kind.LEASE)
    helper.link.send(Kind.BYE, {"why": "no time"})
    helper.link.close()
    helper.meet()
    helper.link.close()
    with pytest.warns(OffloadWarning, match="helper 0 .*is lost: no time; others do its work"):
        dispatcher.tell()


def test_a_client_that_nobody_holds_gets_no_more_answers(
    dispatcher: Dispatcher, listener: TrainerListener
) -> None:
    client, helper = Client(dispatcher), Helper(listener)
    helper.meet()
    helper.opens(1)
    lease = helper.next(Kind.LEASE)
    helper.next(Kind.LEASE)
    del client
    gc.collect()
    helper.answers(lease)
    assert helper.nothing_comes()
    assert dispatcher.helpers()[0].duplicates == 1
    helper.link.close()


def test_one_may_be_refused_and_another_served(
    dispatcher: Dispatcher, listener: TrainerListener
) -> None:
    """A helper without the data set of the loader can still evaluate, say."""
    loads, evaluates, helper = Client(dispatcher), Client(dispatcher, "validator"), Helper(listener)
    helper.meet()
    fields = helper.next(Kind.OPEN)
    helper.link.send(Kind.REFUSED, {**fields, "why": "no such file"})
    awaited(lambda: dispatcher.helpers()[0].state == "refused", "the refusal")
    helper.opens(1)
    assert helper.next(Kind.LEASE)["service"] == "validator"
    assert (loads.log, evaluates.log) == ([("refused", 0, "no such file")], [("ready", 0)])
    assert dispatcher.helpers()[0].state == "serving"
    with pytest.warns(OffloadWarning, match=r"cannot help: loader 0: no such file"):
        dispatcher.tell()
    helper.link.close()


def test_nonsense_of_a_helper_hurts_nobody(
    dispatcher: Dispatcher, listener: TrainerListener
) -> None:
    client, helper = Client(dispatcher), Helper(listener)
    client.left = 1
    helper.meet()
    helper.opens(1)
    lease = helper.next(Kind.LEASE)
    for fields in ({}, {"service": 3, "number": []}, {"lease": {}}, {"lease": [1]}, {"number": -1}):
        for kind in Kind:
            if kind not in (Kind.BYE, Kind.POOL):
                helper.link.send(kind, fields)
    client.left = 1
    helper.answers(lease)
    helper.next(Kind.LEASE)
    awaited(lambda: client.log == [("ready", 0), ("DONE", 0)], "the one answer that makes sense")
    helper.link.close()
