"""A live report over HTTP: the page, and what has changed every second or so.

    GET /?token=...      303 to /, with the token as a cookie
    GET /                the page
    GET /document.json   the report as data
    GET /events          server-sent events: parts of the report that have changed
    GET /metrics         Prometheus's text format

Every request needs the token, of the address, the cookie or a header `Authorization: Bearer ...`; others get
403. There are no other routes, and no name of a file ever comes from a request. Needs the extra `serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.errors import FivefoldError, UsageError
from fivefold.introspect.document import document
from fivefold.introspect.exports import prometheus
from fivefold.introspect.page import html, policy
from fivefold.introspect.run import TracedRun, trace_files
from fivefold.trace.file import TraceFile
from fivefold.trace.schema import ProcessState
from fivefold.wire import Callers

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["PORT", "LiveReport", "application", "listening", "serve", "stamp"]

PORT = 8765
"""unless asked for another"""
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_POLL_S = 0.25
_ALIVE_S = 10.0
"""without news, a line goes to the browser so often: whoever has left is noticed"""
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_MISSING = (
    "--serve needs starlette and uvicorn: pip install 'fivefold[serve]'; "
    "`fivefold report RUN` needs neither"
)
_REFUSED = "open the address that `fivefold report --serve` printed: its token is missing here\n"


def serve(
    path: Path, *, host: str = "127.0.0.1", port: int = PORT, say: Callable[[str], None] = print
) -> None:
    """Show the run at `path` until Ctrl-C. Port 0 takes a free one.

    Raises `UsageError` if there is nothing to read, the port is in use, or a package is missing.
    """
    try:
        import uvicorn
    except ImportError:
        raise UsageError(_MISSING) from None
    report = LiveReport(path)
    token = secrets.token_hex(16)
    connections = ServerConnections()
    with listening(host, port) as listener:
        port = int(listener.getsockname()[1])
        app = application(
            report, token, port, ending=lambda: server.should_exit, shown=connections.known
        )
        server = uvicorn.Server(
            uvicorn.Config(
                app, http=connections.protocol, ws="none", log_level="error", lifespan="off",
                proxy_headers=False, server_header=False, timeout_graceful_shutdown=2,
            )
        )  # fmt: skip
        keep_callers_faults_quiet()
        say(f"serving {path} at http://{_shown(host)}:{port}/?token={token}")
        say(_how_to_reach(host, port))
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn has ended by then
            server.run(sockets=[listener])
        say("stopped")


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises `UsageError` with a remedy if it cannot."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as problem:
        number = getattr(problem, "errno", None)
        if number == errno.EADDRINUSE:
            why = (
                f"port {port} is in use; take another, --port {port % 65535 + 1}, "
                "or any free one, --port 0"
            )
        elif number == errno.EACCES:
            why = f"port {port} is not allowed here; take one above 1023"
        elif isinstance(problem, OverflowError):
            why = f"there is no port {port}; valid: 0 to 65535"
        else:
            why = f"cannot listen at {host}: {problem}; --host takes an address of this machine"
        raise UsageError(why) from None


def application(
    report: LiveReport,
    token: str,
    port: int,
    ending: Callable[[], bool] = lambda: False,
    shown: Callable[[object], None] = lambda _: None,
) -> Starlette:
    """The routes, behind the token; streams of events stop when `ending`.

    `shown` is told the host and port of whoever has shown the token.

    Raises `UsageError` without Starlette.
    """
    try:
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ImportError:
        raise UsageError(_MISSING) from None
    routes = _Routes(report, token, f"fivefold_token_{port}", ending, shown)
    return Starlette(
        routes=[
            Route("/", routes.page),
            Route("/document.json", routes.document),
            Route("/events", routes.events),
            Route("/metrics", routes.metrics),
        ]
    )


class _Routes:
    """What each address answers."""

    def __init__(
        self,
        report: LiveReport,
        token: str,
        cookie: str,
        ending: Callable[[], bool],
        shown: Callable[[object], None],
    ) -> None:
        self.shown = shown
        self.report = report
        self.token = token
        self.cookie = cookie
        self.ending = ending

    async def page(self, request: Request) -> Response:
        """The page, or, where the token stands in the address, the way to it without."""
        from starlette.responses import HTMLResponse, RedirectResponse

        if not self._allowed(request):
            return self._refusal()
        if "token" in request.query_params:
            answer = RedirectResponse("/", status_code=303, headers=_HEADERS)
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
            return answer
        await asyncio.to_thread(self.report.refresh)
        told = await asyncio.to_thread(html, self.report.document, live=True)
        # The same rules as in the page, and no frame of another page around it.
        rules = f"{policy(live=True)}; frame-ancestors 'none'"
        return HTMLResponse(told, headers=_HEADERS | {"Content-Security-Policy": rules})

    async def document(self, request: Request) -> Response:
        from starlette.responses import Response as Plain

        if not self._allowed(request):
            return self._refusal()
        await asyncio.to_thread(self.report.refresh)
        _, told = self.report.since(0)
        return Plain(told, media_type="application/json", headers=_HEADERS)

    async def metrics(self, request: Request) -> Response:
        from starlette.responses import PlainTextResponse

        if not self._allowed(request):
            return self._refusal()
        told = await asyncio.to_thread(self.report.metrics)
        return PlainTextResponse(told, media_type="text/plain; version=0.0.4", headers=_HEADERS)

    async def events(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        if not self._allowed(request):
            return self._refusal()
        return StreamingResponse(self._news(), media_type="text/event-stream", headers=_HEADERS)

    async def _news(self) -> AsyncIterator[str]:
        """All parts at first, for the page may be older, then those that have changed."""
        version, said, quiet_s = 0, "", 0.0
        yield "retry: 2000\n\n"
        while not self.ending():
            await asyncio.to_thread(self.report.refresh)
            version, parts = await asyncio.to_thread(self.report.since, version)
            problem = self.report.problem
            if parts:
                yield f"event: parts\ndata: {parts}\n\n"
            if problem != said and problem:
                yield f"event: problem\ndata: {json.dumps(problem)}\n\n"
            quiet_s = 0.0 if parts or problem != said else quiet_s + _POLL_S
            said = problem
            if quiet_s >= _ALIVE_S:
                yield ": still here\n\n"
                quiet_s = 0.0
            await asyncio.sleep(_POLL_S)

    def _allowed(self, request: Request) -> bool:
        kind, _, word = request.headers.get("authorization", "").partition(" ")
        offered = (
            request.query_params.get("token", ""),
            request.cookies.get(self.cookie, ""),
            word.strip() if kind.lower() == "bearer" else "",
        )
        if not any(secrets.compare_digest(o.encode(), self.token.encode()) for o in offered):
            return False
        self.shown(request.scope.get("client"))
        return True

    def _refusal(self) -> Response:
        from starlette.responses import PlainTextResponse

        return PlainTextResponse(
            _REFUSED, status_code=403, headers=_HEADERS | {"Connection": "close"}
        )


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _how_to_reach(host: str, port: int) -> str:
    if host in _LOOPBACK:
        return (
            f"from your own machine: ssh -N -L {port}:{_shown(host)}:{port} {socket.gethostname()}, "
            "then open that address there; Ctrl-C ends it"
        )
    return (
        f"warning: whoever can listen to {host} sees this traffic, the token included: it is not "
        "encrypted; without --host only this machine can connect, and ssh -L leads there"
    )


# ---- A report that is made again while its run goes on, in parts that have changed
#
#     trace files --stamps differ--> document --> {part: JSON} --> those whose text differs get a new version
#
# Nothing is read while nobody asks. What takes long is done seldom: making reports takes a fifth of one core
# at most while the run goes on. An end that its ranks tell is shown at once; that of a run killed with all
# its ranks, which tells nothing, with the next report.

EVERY_S = 1.0
"""a fresh report at most so often"""
_LOOK_S = 5.0
"""whether silent ranks live is looked at so often"""
_REST = 4.0
"""times as long as a report took, until the next begins"""


def stamp(path: Path) -> tuple[Any, ...]:
    """What changes when a run does: what every rank says that it is doing.

    A rank that was killed says nothing: while one claims to run, the stamp changes every few seconds too.
    """
    found = list(_said(path))
    running = any(state == ProcessState.RUNNING for _, state, _ in found)
    return (*found, int(time.monotonic() / _LOOK_S) if running else 0)


def _said(path: Path) -> Iterator[tuple[str, int, bytes | str]]:
    """Of every rank: its file, its state and all that it says; -1 and why, where that cannot be read."""
    for file in trace_files(path):
        try:
            live = TraceFile.open(file).live[0]
            yield file.name, int(live["state"]), live.tobytes()
        except FivefoldError as problem:
            yield file.name, -1, str(problem)


class LiveReport:
    """The latest report of the run at `path`, by parts. Any thread may ask; one at a time works.

    Raises `UsageError` if there is nothing to read at first; later that is a `problem`.
    """

    def __init__(
        self,
        path: Path,
        every_s: float = EVERY_S,
        make: Callable[[TracedRun], Mapping[str, Any]] = document,
    ) -> None:
        self.path = path
        self.every_s = every_s
        self.version = 0
        self.problem = ""
        """why the latest attempt failed, in a line; empty if it did not"""
        self.document: Mapping[str, Any] = {}
        self._make = make
        self._parts: dict[str, tuple[int, str]] = {}
        self._metrics = ""
        self._stamp: tuple[Any, ...] = ()
        self._next_s = self._look_s = 0.0
        self._running = False
        self._lock = threading.Lock()
        self._renew()

    def refresh(self) -> None:
        """Make the report again if its time has come and its run has gone on."""
        with self._lock:
            if time.monotonic() < self._next_s and not self._over():
                return
            begin = time.monotonic()
            try:
                self._renew()
                self.problem = ""
            except FivefoldError as problem:  # files were moved away, or are written anew
                self.problem = str(problem)
            took = time.monotonic() - begin
            self._next_s = time.monotonic() + max(self.every_s, _REST * took)

    def metrics(self) -> str:
        """For Prometheus, of the same moment."""
        self.refresh()
        return self._metrics

    def since(self, version: int) -> tuple[int, str]:
        """The version now, and a JSON object of the parts that have changed after `version`; "" if none."""
        with self._lock:
            changed = [
                f"{json.dumps(part)}:{told}"
                for part, (changed_at, told) in self._parts.items()
                if changed_at > version
            ]
            return self.version, "{" + ",".join(changed) + "}" if changed else ""

    def _over(self) -> bool:
        """Whether the run has ended since the latest report: nobody is disturbed by making another."""
        begin = time.monotonic()
        if not self._running or begin < self._look_s:
            return False
        try:
            over = all(state != ProcessState.RUNNING for _, state, _ in _said(self.path))
        except FivefoldError:  # files were moved away; the next attempt tells
            over = False
        self._look_s = time.monotonic() + max(self.every_s, _REST * (time.monotonic() - begin))
        return over

    def _renew(self) -> None:
        now = stamp(self.path)
        if now == self._stamp:
            return
        run = TracedRun.load(self.path)
        self._running = run.state == "running"
        self.document = made = self._make(run)
        self._metrics = prometheus.text(run.ranks)
        self._stamp = now
        version = self.version + 1
        for part, value in made.items():
            told = json.dumps(value, allow_nan=False, separators=(",", ":"))
            if self._parts.get(part, (0, ""))[1] != told:
                self._parts[part] = (version, told)
        self.version = version


# ---- Connections to a live report: until they show the token, few at a time and none for long

_GREETING_S = 10.0
"""from the connection to the token"""
_MOST, _OF_ONE = 64, 32
"""of those who have not shown it: a browser opens six"""


class ServerConnections:
    """Those of one server, in its thread. `protocol` is what uvicorn's `http` takes."""

    def __init__(self) -> None:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        connections = self
        self._callers = Callers(_MOST, _OF_ONE)
        self._waiting: dict[Any, tuple[int, asyncio.TimerHandle]] = {}

        class Bounded(H11Protocol):
            """HTTP, hung up on whoever does not show the token in time."""

            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                connections.began(self.client, transport, self.loop)

            def connection_lost(self, exc: Exception | None) -> None:
                connections.known(self.client)
                super().connection_lost(exc)

        self.protocol: type[asyncio.Protocol] = Bounded

    def began(
        self, client: Any, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Somebody has connected, from a host and port."""
        number = self._callers.add(str(client[0]) if client else "", transport.abort)
        self._waiting[client] = number, loop.call_later(_GREETING_S, transport.abort)

    def known(self, client: Any) -> None:
        """The one at a host and port has shown the token, or is gone."""
        number, late = self._waiting.pop(client, (-1, None))
        self._callers.left(number)
        if late is not None:
            late.cancel()


def keep_callers_faults_quiet() -> None:
    """Let uvicorn say nothing of what callers do wrong, a traceback each; it tells faults of the server."""
    import h11

    def is_ours(record: logging.LogRecord) -> bool:
        problem = record.exc_info[1] if record.exc_info else None
        return not isinstance(problem, h11.ProtocolError)

    logging.getLogger("uvicorn.error").addFilter(is_ours)
