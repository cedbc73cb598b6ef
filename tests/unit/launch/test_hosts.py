"""Where helpers run, as people write it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fivefold.errors import UsageError
from fivefold.launch.hosts import LOCAL, HelperHost, Hosts, parse_helpers, read_hostfile


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("", ()),
        (" , ", ()),
        ("local", (HelperHost(LOCAL, 1),)),
        ("local:2, dpu01:4", (HelperHost(LOCAL, 2), HelperHost("dpu01", 4))),
        ("localhost:1,10.0.0.7:2", (HelperHost(LOCAL, 1), HelperHost("10.0.0.7", 2))),
        ("me@dpu01.site.org:3", (HelperHost("me@dpu01.site.org", 3),)),
    ],
)
def test_helpers(text: str, places: tuple[HelperHost, ...]) -> None:
    assert parse_helpers(text) == places


def test_this_node_has_other_names() -> None:
    assert parse_helpers(socket.gethostname()) == (HelperHost(LOCAL, 1),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("local:", "'nothing' is no number of processes from 1 to 1024; write local:2 for two"),
        ("local:0", "'0' is no number of processes"),
        ("local:two", "'two' is no number of processes"),
        ("local:1025", "'1025' is no number"),
        (":2", "expected HOST:PROCESSES, such as local:2"),
        ("-n:2", "expected HOST:PROCESSES"),
        ("a b:2", "expected HOST:PROCESSES"),
        ("dpu01:2:3", "'2:3' is no number"),
        ("local:1,dpu 1", "--helpers dpu 1: expected"),
    ],
)
def test_what_names_no_helpers_is_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_helpers(text)
    assert says in str(refused.value)


def test_a_host_file(tmp_path: Path) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text(
        "# the trainers\n"
        "localhost slots=2   # two of them\n"
        "\n"
        "\tdpu01 slots=4 role=helper cores=0-2,5 port=21001\n"
        "dpu02 role=helper python=/usr/local/bin/python\n"
        "localhost role=helper slots=1\n"
    )
    assert read_hostfile(file) == Hosts(
        2,
        (
            HelperHost("dpu01", 4, (0, 1, 2, 5), 21001),
            HelperHost("dpu02", 1, python="/usr/local/bin/python"),
            HelperHost(LOCAL, 1),
        ),
    )


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("dpu01 slot=4", "'slot=4' is not NAME=VALUE; did you mean 'slots'?"),
        ("dpu01 slots", "'slots' is not NAME=VALUE"),
        ("dpu01 slots=", "'slots=' is not NAME=VALUE"),
        ("dpu01 slots=0 role=helper", "slots=0: expected a number from 1 to 1024"),
        ("dpu01 slots=many role=helper", "slots=many: expected a number"),
        ("dpu01 slots=2 slots=3 role=helper", "slots is given twice"),
        ("dpu01 role=helpers", "there is no role 'helpers'; did you mean 'helper'? Valid: trainer"),
        ("dpu01 role=helper port=70000", "port=70000: expected a number from 1 to 65535"),
        ("dpu01 role=helper port=65535 slots=2", "2 helpers need ports 65535 to 65536"),
        ("dpu01 role=helper cores=3-1", "cores=3-1: 3-1 is no range"),
        ("dpu01 role=helper cores=a", "cores=a: expected numbers such as 0-3,8"),
        ("dpu/01 role=helper", "'dpu/01' is no host name"),
        (
            "dpu01 slots=4",
            "dpu01 is another host, and fivefold run starts trainers on this node only",
        ),
        ("dpu01", "start the script there with srun or mpirun, or add role=helper"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, line: str, says: str) -> None:
    file = tmp_path / "hosts.txt"
    file.write_text(f"localhost slots=1\n{line}\n")
    with pytest.raises(UsageError) as refused:
        read_hostfile(file)
    assert str(refused.value).startswith(f"{file}, line 2: ")
    assert says in str(refused.value)


def test_a_host_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the host file .*: No such file"):
        read_hostfile(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"cannot read the host file .*: it is no text"):
        read_hostfile(tmp_path / "binary")
