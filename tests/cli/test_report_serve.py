"""A live report over HTTP, by a process of its own: who may ask, what is answered, how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import python
from fivefold.introspect.run import TracedRun
from fivefold.introspect.serve import LiveReport, stamp
from fivefold.trace.file import TraceFile, name_of
from fivefold.trace.schema import LIVE, ProcessState
from strangers import crowd, is_hung_up_while_it_dribbles
from traces import Story

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    token: str
    said: str

    def get(
        self, target: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers and body; `target` is sent as it is, dots and all."""
        asked = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            asked.request(
                method, target, headers={k.replace("_", "-"): v for k, v in headers.items()}
            )
            answer = asked.getresponse()
            told = {k.lower(): v for k, v in answer.getheaders()}
            return answer.status, told, answer.read().decode()
        finally:
            asked.close()

    @property
    def bearer(self) -> str:
        return f"Bearer {self.token}"


def start(run: Path, port: int = 0) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python(), "-m", "fivefold", "report", str(run), "--serve", "--port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Story(ranks=3, steps=20).write(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Server]:
    process = start(run)
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", said)
        assert found, said
        yield Server(process, int(found[1]), found[2], said + process.stdout.readline())
    finally:
        process.kill()
        process.communicate(timeout=20)


def test_it_says_where_and_how_to_come_from_afar(server: Server) -> None:
    assert f"ssh -N -L {server.port}:127.0.0.1:{server.port} " in server.said
    assert len(server.token) == 32


@pytest.mark.parametrize("target", ["/", "/document.json", "/events", "/metrics", "/?token=wrong"])
def test_without_the_token_nothing_is_told(server: Server, target: str) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer no"},
        {"Cookie": f"fivefold_token_{server.port}=ü"},
    ):
        status, _, body = server.get(
            target, **{k: v.encode("utf-8").decode("latin1") for k, v in headers.items()}
        )
        assert status == 403
        assert "the address that `fivefold report --serve` printed" in body
        assert "rank" not in body and server.token not in body


def test_the_address_with_the_token_becomes_a_cookie(server: Server) -> None:
    status, headers, body = server.get(f"/?token={server.token}")
    assert (status, headers["location"], body) == (303, "/", "")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    status, headers, body = server.get("/", Cookie=cookie.partition(";")[0])
    assert status == 200 and body.startswith("<!doctype html>")
    assert server.token not in body
    rules = headers["content-security-policy"]
    assert "default-src 'none'" in rules and "connect-src 'self'" in rules
    assert "frame-ancestors 'none'" in rules
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert "server" not in headers


def test_the_report_as_data(server: Server, run: Path) -> None:
    status, _, body = server.get("/document.json", Authorization=server.bearer)
    found = json.loads(body)
    assert status == 200 and found["kind"] == "run" and found["run"]["path"] == str(run)
    assert found["run"]["read"] == 3


def test_metrics_for_prometheus(server: Server) -> None:
    status, headers, body = server.get("/metrics", Authorization=server.bearer)
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'fivefold_steps_total{rank="2"} 20' in body


@pytest.mark.parametrize(
    "target",
    [
        "/../../../../etc/passwd", "/..%2f..%2f..%2fetc%2fpasswd", "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/trace/rank-00000.trace", "/static/page.js", "/document.json/../../etc/passwd", "/metrics/..",
        "/?file=/etc/passwd", "/events?path=/etc/passwd&since=-1",
    ],
)  # fmt: skip
def test_there_are_no_files_behind_it(server: Server, target: str) -> None:
    if target.startswith("/events"):
        assert server.get(target)[0] == 403
        return
    status, _, body = server.get(target, Authorization=server.bearer)
    assert status == (200 if target.startswith("/?") else 404)
    assert "root:" not in body and "fivefold trace" not in body[:64]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_sent_to_it(server: Server, method: str) -> None:
    assert server.get("/", method, Authorization=server.bearer)[0] == 405


def events(connection: http.client.HTTPConnection, token: str) -> Iterator[tuple[str, Any]]:
    connection.request("GET", "/events", headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    assert answer.status == 200
    kind = ""
    while line := answer.readline().decode().rstrip("\n"):
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: "):
            yield kind, json.loads(line[6:])
            answer.readline()
        elif line.startswith(("retry:", ":")):
            answer.readline()


def write_live(run: Path, field: str, value: int) -> None:
    """As rank 0 does it: a few bytes of the mapped file."""
    path = run / "trace" / name_of(0)
    section = TraceFile.open(path).sections["live"]
    fields: Any = LIVE.fields
    kind, offset = fields[field][:2]
    with path.open("r+b") as file:
        file.seek(section["offset"] + offset)
        file.write(np.array(value, kind).tobytes())


def change(run: Path, step: int) -> None:
    write_live(run, "step", step)


def test_news_are_the_parts_that_have_changed(server: Server, run: Path) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        news = events(connection, server.token)
        kind, first = next(news)
        assert kind == "parts" and {"run", "timeline", "verdict", "ranks"} <= first.keys()
        change(run, 77)
        kind, later = next(news)
        assert kind == "parts" and "timeline" not in later
        assert later["ranks"]["step"][0] == 77
    finally:
        connection.close()


def test_a_port_in_use_is_said_in_a_line(server: Server, run: Path) -> None:
    second = start(run, server.port)
    told, _ = second.communicate(timeout=30)
    assert second.returncode == 2
    assert told == (
        f"error: port {server.port} is in use; take another, --port {server.port + 1}, "
        "or any free one, --port 0\n"
    )


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--serve", "--port", "70000"], "there is no port 70000; valid: 0 to 65535"),
        (["--serve", "--host", "192.0.2.1"], "--host takes an address of this machine"),
        (["--serve", "--json"], "--serve and --json exclude each other"),
        (["--out", "x"], "name a format with --export"),
        (["--export", "csw"], "unknown export 'csw'; did you mean 'csv'? Valid: perfetto,"),
        (["RUN", "--serve"], "--serve takes one run, not two"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_a_line(run: Path, words: list[str], told: str) -> None:
    done = report(run, *[str(run) if word == "RUN" else word for word in words])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert told in done.stderr


def report(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python(), "-m", "fivefold", "report", str(run), *words],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_exports_from_the_command_line(run: Path, tmp_path: Path) -> None:
    done = report(run, "--export", "csv", "--out", str(tmp_path / "tables"))
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in (tmp_path / "tables").iterdir()) == [
        "events.csv", "notes.csv", "operations.csv", "steps.csv",
    ]  # fmt: skip
    done = report(run, "--export", "perfetto")
    assert done.returncode == 0 and (run / "perfetto" / "trace.json").exists()


def test_ctrl_c_ends_it_cleanly_while_somebody_watches(run: Path) -> None:
    process = start(run)
    assert process.stdout is not None
    try:
        found = re.search(r":(\d+)/\?token=(\S+)", process.stdout.readline())
        assert found
        connection = http.client.HTTPConnection("127.0.0.1", int(found[1]), timeout=20)
        next(events(connection, found[2]))
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        told, _ = process.communicate(timeout=20)
        connection.close()
        assert time.monotonic() - begin < 10
        assert process.returncode == 0
        assert (
            told.splitlines()[-1] == "stopped" and "Traceback" not in told and "ERROR" not in told
        )
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", int(found[1])))
    finally:
        process.kill()
        process.communicate()


def eventually(report: LiveReport, done: Callable[[], bool]) -> None:
    """It rests four times as long as making took before it looks again."""
    until = time.monotonic() + 20
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)
        report.refresh()


def test_a_report_is_made_again_only_when_the_run_went_on(tmp_path: Path) -> None:
    run = Story(ranks=2, steps=5).write(tmp_path / "run")
    made: list[int] = []

    def make(found: TracedRun) -> dict[str, Any]:
        made.append(len(found.ranks))
        return {"size": len(found.ranks), "number": len(made)}

    report = LiveReport(run, every_s=0.0, make=make)
    assert report.since(0) == (1, '{"size":2,"number":1}')
    report.refresh()
    assert made == [2] and report.since(1) == (1, "")
    before = stamp(run)
    change(run, 9)
    assert stamp(run) != before
    eventually(report, lambda: len(made) == 2)
    assert made == [2, 2] and report.since(1) == (2, '{"number":2}')


def test_a_rank_that_was_killed_is_noticed_although_its_file_stays(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as rank:
        meta = {"pid": rank.pid, "host": socket.gethostname()}
        story = Story(ranks=1, steps=5, state=ProcessState.RUNNING, meta=meta)
        run = story.write(tmp_path / "run")
        write_live(run, "pid", rank.pid)
        report = LiveReport(run, every_s=0.0)
        before = report.document["run"]["state"]
        rank.kill()
        rank.wait()
        eventually(report, lambda: report.document["run"]["state"] == "killed")
        assert before == "running"


def test_the_end_of_a_run_is_told_although_the_report_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fivefold.introspect.serve._REST", 1e9)
    meta = {"host": socket.gethostname()}
    run = Story(ranks=1, steps=5, state=ProcessState.RUNNING, meta=meta).write(tmp_path / "run")
    write_live(run, "pid", os.getpid())
    report = LiveReport(run, every_s=0.0)
    report.refresh()
    assert report.document["run"]["state"] == "running"
    write_live(run, "state", ProcessState.ENDED)
    report.refresh()
    assert report.document["run"]["state"] == "ended"


def test_a_run_that_is_taken_away_is_a_problem_and_no_end(tmp_path: Path) -> None:
    run = Story(ranks=1, steps=5).write(tmp_path / "run")
    report = LiveReport(run, every_s=0.0)
    run.rename(tmp_path / "moved")
    eventually(report, lambda: bool(report.problem))
    assert "there is no directory" in report.problem
    assert report.since(0)[1]
    (tmp_path / "moved").rename(run)
    eventually(report, lambda: not report.problem)


@pytest.mark.long
def test_silent_and_slow_callers_are_given_up_and_keep_nobody_out(server: Server) -> None:
    address = ("127.0.0.1", server.port)
    with crowd(address, 100) as lines:
        status, _, _ = server.get("/document.json", Authorization=server.bearer)
        assert status == 200
        lines[0].settimeout(20)
        with contextlib.suppress(ConnectionResetError):
            assert lines[0].recv(10) == b""  # the first of too many
    assert is_hung_up_while_it_dribbles(address, pieces=40, pause_s=0.5)


@pytest.mark.long
def test_who_has_shown_the_token_is_not_given_up(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 20) as line:
        asked = f"GET /events HTTP/1.1\r\nHost: a\r\nAuthorization: {server.bearer}\r\n\r\n"
        line.sendall(asked.encode())
        assert line.recv(1 << 16)  # the token has been read
        with crowd(("127.0.0.1", server.port), 100):
            until = time.monotonic() + 11
            while time.monotonic() < until:
                with contextlib.suppress(TimeoutError):
                    line.settimeout(1)
                    assert line.recv(1 << 16)


def test_what_callers_do_wrong_is_no_traceback(run: Path) -> None:
    process = start(run)
    assert process.stdout is not None
    found = re.search(r":(\d+)/\?token", process.stdout.readline())
    assert found is not None
    host = b"GET / HTTP/1.1\r\nHost: a\r\n"
    for nonsense in (
        b"\x16\x03\x01 nonsense\r\n\r\n",
        host + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        host + b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\n",
        host + b"X: " + bytes(100_000) + b"\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", int(found[1])), 20) as line:
            line.sendall(nonsense)
            with contextlib.suppress(ConnectionResetError):
                line.recv(1000)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=30)
    assert [text for text in said.splitlines() if "from your own machine" not in text] == [
        "stopped"
    ]
