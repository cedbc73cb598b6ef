"""A helper in a thread, trainers that call it over real links, and data sets to serve."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import torch

from fivefold.data.remote.serving import decode_boxes, identity_of
from fivefold.data.source import Samples, Source
from fivefold.helpers.decode import decode
from fivefold.helpers.handshake import connect, listen
from fivefold.helpers.link import Link
from fivefold.helpers.messages import Kind
from fivefold.helpers.serving_loop import ServingLoop
from fivefold.wire.frames import Message

__all__ = ["TIMEOUT_S", "Helper", "Numbers", "OnDisk", "Pictures", "Trainer", "source_of"]

KEY = bytes(range(32))
TIMEOUT_S = 20.0


class Numbers:
    """Samples that draw at random; some are slow, some cannot be made."""

    def __init__(self, length: int = 20, bad: int = -1, slow_s: float = 0.0) -> None:
        self.length, self.bad, self.slow_s = length, bad, slow_s

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.bad:
            raise ArithmeticError("no such number")
        time.sleep(self.slow_s)
        return torch.rand(3, 4) + index, index


class OnDisk:
    """Samples whose files are elsewhere; `raw` and `decode` are `__getitem__` in two steps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.decode(self.raw(index))

    def raw(self, index: int) -> bytes:
        return (self.folder / f"{index}.bin").read_bytes()

    def decode(self, raw: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(raw), dtype=torch.uint8) + torch.rand(4)


class Pictures:
    """Samples that are read by windows."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.arange(35.0).view(1, 7, 5) + 100 * index, index

    def sizes(self, index: int) -> Any:
        assert index < 6
        return (7, 5), None

    def window(self, index: int, boxes: Any) -> Any:
        image, label = self[index]
        return image[boxes[0].slices], label


def source_of(dataset: Samples, **how: Any) -> Source:
    settings: dict[str, Any] = {"batch_size": 4, "seed": 5, **how}
    return Source(dataset, **settings)


class Helper:
    """A helper in a thread, and trainers that call it."""

    def __init__(self, patience_s: float = TIMEOUT_S) -> None:
        self.listener = listen("127.0.0.1:0", KEY)
        self.loop = ServingLoop(self.listener, patience_s)
        self.fields: list[str] = []
        self.links: list[Link] = []
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with self.loop:
            self.fields.append(self.loop.run())

    def trainer(self, rank: int = 0) -> Trainer:
        about = {"rank": rank, "host": "here"}
        link = connect(self.listener.address, KEY, timeout_s=TIMEOUT_S, about=about)
        self.links.append(link)
        return Trainer(link)

    def end(self) -> str:
        """All trainers say goodbye; what the helper says when it ends."""
        for link in self.links:
            with contextlib.suppress(Exception):
                link.send(Kind.BYE, {"why": "done"})
        return self.ended()

    def ended(self) -> str:
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive(), "the helper goes on"
        for link in self.links:
            link.close()
        self.listener.close()
        return self.fields[0]


class Trainer:
    def __init__(self, link: Link) -> None:
        self.link = link
        self.leases = 0

    def send(self, kind: Kind, parts: tuple[bytes, ...] = (), **fields: Any) -> None:
        self.link.send(kind, {"service": "loader", "number": 0, **fields}, parts)

    def receive(self, timeout_s: float = TIMEOUT_S) -> Message | None:
        end = time.monotonic() + timeout_s
        while (left_s := end - time.monotonic()) > 0:
            if (message := self.link.receive(left_s)) is not None:
                return message
        return None

    def answer(self, kind: Kind) -> Message:
        message = self.receive()
        assert message is not None, f"no {kind.name} came"
        assert message.kind is kind, message.fields
        return message

    def open(self, source: Source, **fields: Any) -> Message:
        self.send(Kind.OPEN, (), **{"identity": identity_of(source), "axes": {}, **fields})
        return self.answer(Kind.READY)

    def refused(self, **fields: Any) -> str:
        self.send(Kind.OPEN, **fields)
        return str(self.answer(Kind.REFUSED).fields["why"])

    def lease(self, batch: int = 0, start: int = 0, stop: int = 4, epoch: int = 0) -> int:
        self.leases += 1
        self.send(
            Kind.LEASE,
            lease=self.leases, epoch=epoch, batch=batch, start=start, stop=stop, buffer=-1, buffer_bytes=0,
        )  # fmt: skip
        return self.leases

    def batch(self, like: Any = None) -> Any:
        done = self.answer(Kind.DONE)
        made = decode(done.fields, done.payload)
        return (made, decode_boxes(done.fields["boxes"], like)) if like is not None else made
