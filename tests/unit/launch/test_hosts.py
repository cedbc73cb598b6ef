"""Where processes run, as people and programs write it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UsageError
from fivefold.launch.hosts import (
    LOCAL,
    Host,
    Hosts,
    gathered,
    parse_helpers,
    parse_hosts,
    reachable,
    read_hostfile,
    spread,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "hosts.txt"


@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("", ()),
        (" , ", ()),
        ("local", (Host(LOCAL, 1),)),
        ("local:2, dpu01:4", (Host(LOCAL, 2), Host("dpu01", 4))),
        ("localhost:1,10.0.0.7:2", (Host(LOCAL, 1), Host("10.0.0.7", 2))),
        ("me@dpu01.site.org:3", (Host("me@dpu01.site.org", 3),)),
        ("dpu01:1,dpu01:2", (Host("dpu01", 1), Host("dpu01", 2))),
    ],
)
def test_helpers(text: str, places: tuple[Host, ...]) -> None:
    assert parse_helpers(text) == places


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:2,c", (Host("a", 2), Host("b", 2), Host("c", 1))),
        ("b,a,b:3\n,\ta", (Host("b", 4), Host("a", 2))),
        ("localhost:2,127.0.0.1,local", (Host(LOCAL, 4),)),
        ("me@a.site.org:3,", (Host("me@a.site.org", 3),)),
    ],
)
def test_hosts(text: str, hosts: tuple[Host, ...]) -> None:
    assert parse_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", " ", ",", "\n,\t"])
def test_hosts_that_are_none_are_refused(text: str) -> None:
    # -H "$HOSTS" of a variable that is not set would run everything here
    with pytest.raises(
        UsageError, match=r"^-H: no host is named; expected such as node1:4,node2:4$"
    ):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("own", "told", "here"),
    [
        ("node1", "node1", True),
        ("node1", "node1.site.org", True),
        ("node1.site.org", "node1", True),
        ("node1.site.org", "node1.site.org", True),
        ("node1.site.org", "node1.other.org", False),
        ("node1", "node11", False),
        ("node1", "node1-dpu.site.org", False),
        ("node1", "me@node1", False),
        ("10", "1.0.0.1", False),
    ],
)
def test_this_node_has_other_names(
    monkeypatch: pytest.MonkeyPatch, own: str, told: str, here: bool
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: own)
    (host,) = parse_hosts(told)
    assert host == Host(LOCAL if here else told)
    assert parse_helpers(told) == (host,)
    # Slurm and PBS know it by the name that they told
    assert reachable(host) == told


def test_others_know_this_node_by_its_name() -> None:
    assert {reachable(host) for host in parse_helpers("localhost,local,127.0.0.1")} == {
        socket.gethostname()
    }
    here = socket.gethostname()
    assert gathered([("localhost", 1), ("a", 1), (here, 2)]) == (Host(LOCAL, 3), Host("a", 1))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("local:", "'nothing' is no number of processes from 1 to 1024; write local:2 for two"),
        ("local:0", "'0' is no number of processes"),
        ("local:-1", "'-1' is no number of processes"),
        ("local:two", "'two' is no number of processes"),
        ("local:1025", "'1025' is no number"),
        ("local:" + "9" * 5000, "is no number"),
        ("local:٣", "'٣' is no number"),
        ("local:²", "'²' is no number"),
        ("local :2", "expected HOST:PROCESSES"),
        (":2", "expected HOST:PROCESSES, such as local:2"),
        ("-n:2", "expected HOST:PROCESSES"),
        ("-oProxyCommand", "expected HOST:PROCESSES"),
        ("a b:2", "expected HOST:PROCESSES"),
        ("a\nb:2", "a b:2: expected HOST:PROCESSES"),
        ("node1;reboot", "'node1;reboot' is no host name"),
        ("nodé", "'nodé' is no host name"),
        ("dpu01:2:3", "'2:3' is no number"),
        ("local:1,dpu 1", " dpu 1: expected"),
        ("[fe80::1]:2", "[fe80::1]:2: IPv6 addresses cannot be given; write the name of the host"),
        ("fe80::1", "IPv6 addresses cannot be given"),
    ],
)
def test_what_names_no_hosts_is_refused(text: str, says: str) -> None:
    for parse, where in ((parse_helpers, "--helpers"), (parse_hosts, "-H")):
        with pytest.raises(UsageError) as refused:
            parse(text)
        assert str(refused.value).startswith(f"{where} ") and says in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_host_file(file: Path) -> None:
    file.write_text(
        "# the trainers\n"
        "localhost slots=2   # two of them\n"
        "\n"
        "\tdpu01 slots=4 role=helper cores=0-2,5 port=21001\n"
        "dpu02 role=helper python=/usr/local/bin/python\n"
        "localhost role=helper slots=1\n"
        "dpu01 role=helper cores=6\n"
        "node1 slots=4 cores=0-3 python=arm/python role=trainer\n"
    )
    assert read_hostfile(file) == Hosts(
        (Host(LOCAL, 2), Host("node1", 4, (0, 1, 2, 3), python="arm/python")),
        (
            Host("dpu01", 4, (0, 1, 2, 5), 21001),
            Host("dpu02", 1, python="/usr/local/bin/python"),
            Host(LOCAL, 1),
            Host("dpu01", 1, (6,)),
        ),
    )


@pytest.mark.parametrize(
    ("text", "trainers"),
    [
        ("a\nb\n", [("a", 1), ("b", 1)]),
        ("a slots=2\nb slots=3", [("a", 2), ("b", 3)]),
        ("a slots = 2 max_slots = 4\nb max-slots=8\n", [("a", 2), ("b", 1)]),
        ("a:2\nb:3\nc\n", [("a", 2), ("b", 3), ("c", 1)]),
        ("b\nb\na\nb\na\n", [("b", 3), ("a", 2)]),
        ("a slots=2\na:3\na\n", [("a", 6)]),
        ("a\r\na\r\n\r\n# b\r\nc:2\r\n", [("a", 2), ("c", 2)]),
        ("a\ra\r", [("a", 2)]),
        ("\ufeffa\tslots=2\n", [("a", 2)]),
        ("\t a:2 \t# 10.0.0.1\n10.0.0.2 slots=2#c", [("a", 2), ("10.0.0.2", 2)]),
        ("a # \u2028b \x0bc \x85d\n", [("a", 1)]),
        ("#\n#\n  \n a.site.org", [("a.site.org", 1)]),
        ("a cores=0-1\na\na cores=0,1\n", [("a", 3)]),
    ],
)
def test_every_dialect(file: Path, text: str, trainers: list[tuple[str, int]]) -> None:
    file.write_bytes(text.encode())
    told = read_hostfile(file)
    assert [(host.host, host.slots) for host in told.trainers] == trainers
    assert not told.helpers


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("dpu01 slot=4", "'slot=4' is not NAME=VALUE; did you mean 'slots'?"),
        ("dpu01 slots", "'slots' is not NAME=VALUE"),
        ("dpu01 slots=", "'slots=' is not NAME=VALUE"),
        ("dpu01 4", "'4' is not NAME=VALUE"),
        ("dpu01 :2", "':2' is not NAME=VALUE"),
        ("dpu01 max_slots", "'max_slots' is not NAME=VALUE"),
        ("dpu01 max_slots=many", "max_slots=many: expected a number"),
        ("dpu01 slots=0 role=helper", "slots=0: expected a number from 1 to 1024"),
        ("dpu01 slots=many role=helper", "slots=many: expected a number"),
        ("dpu01 slots=" + "9" * 5000, ": expected a number from 1 to 1024"),
        ("dpu01 slots=٣", "slots=٣: expected a number"),
        ("dpu01 slots=2 slots=3 role=helper", "slots is given twice"),
        ("dpu01:2 slots=2", "slots is given twice"),
        ("dpu01:0", "'0' is no number of processes from 1 to 1024"),
        ("dpu01:", "'nothing' is no number of processes"),
        ("dpu01:2:mlx5_0", "'2:mlx5_0' is no number of processes"),
        ("[fe80::1]:2", "IPv6 addresses cannot be given; write the name of the host"),
        ("fe80::1 slots=2", "IPv6 addresses cannot be given"),
        ("dpu01 role=helpers", "there is no role 'helpers'; did you mean 'helper'? Valid: trainer"),
        ("dpu01 role=helper port=70000", "port=70000: expected a number from 1 to 65535"),
        ("dpu01 role=helper port=65535 slots=2", "2 helpers need ports 65535 to 65536"),
        ("dpu01 port=2000", "port= is for helpers (role=helper)"),
        ("dpu01 role=helper cores=3-1", "cores=3-1: 3-1 is no range"),
        ("dpu01 role=helper cores=0-999999999", "0-999999999 is no range"),
        ("dpu01 role=helper cores=a", "cores=a: expected numbers such as 0-3,8"),
        ("dpu01 cores=,", "cores=,: expected numbers such as 0-3,8"),
        ("dpu/01 role=helper", "'dpu/01' is no host name"),
        ("^dpu01", "'^dpu01' is no host name"),
        ("-p22", "'-p22' is no host name"),
        ("nœud1 slots=2", "'nœud1' is no host name"),
        ("gpu[1-2]", "'gpu[1-2]' is no host name"),
        (
            "first slots=1 cores=4-7",
            "cores=4-7, but an earlier line of this host says cores=0-3; give one of them",
        ),
        ("first python=b", "python=b, but an earlier line of this host says python=a"),
    ],
)
def test_a_line_that_is_wrong_is_named(file: Path, line: str, says: str) -> None:
    file.write_text(f"first slots=1 cores=0-3 python=a\n{line}\n")
    with pytest.raises(UsageError) as refused:
        read_hostfile(file)
    assert str(refused.value).startswith(f"{file}, line 2: ")
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_host_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the host file .*: No such file"):
        read_hostfile(tmp_path / "none")
    with pytest.raises(UsageError, match=r"cannot read the host file .*: Is a directory"):
        read_hostfile(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match=r"cannot read the host file .*: it is no text"):
        read_hostfile(tmp_path / "binary")
    for text in ("", "\n\n", "# node1 slots=2\n"):
        (tmp_path / "empty").write_text(text)
        with pytest.raises(UsageError, match=r"^the host file .* names no host$"):
            read_hostfile(tmp_path / "empty")


@pytest.mark.parametrize(
    ("hosts", "ranks", "per_node", "counts"),
    [
        ("a:4,b:4", None, None, (4, 4)),
        ("a:4,b:4", 8, None, (4, 4)),
        ("a:4,b:4", 5, None, (4, 1)),
        ("a:4,b:4", 4, None, (4, 0)),
        ("a:4,b:4", 1, None, (1, 0)),
        ("a:1,b:3,c:2", 5, None, (1, 3, 1)),
        ("a:4,b", None, 2, (2, 2)),
        ("a:4,b,c", 3, 2, (2, 1, 0)),
    ],
)
def test_hosts_are_filled_in_their_order(
    hosts: str, ranks: int | None, per_node: int | None, counts: tuple[int, ...]
) -> None:
    assert spread(parse_hosts(hosts), ranks, per_node) == counts


@pytest.mark.parametrize(
    ("hosts", "ranks", "per_node", "says"),
    [
        ("a:2,b:2", 5, None, "5 processes are asked for, and there are 4 slots on 2 hosts: name"),
        ("a:2,b:2", 5, None, r"slots=N in the host file, .* or start 3 on each: --ppn 3$"),
        ("a", 2, None, "there is 1 slot on 1 host: "),
        ("a:8,b:8", 5, 2, "--ppn 2 on 2 hosts makes 4 processes, and 5 are needed: name more"),
        ("a:8,b:8", 5, 2, "or start more on each: --ppn 3$"),
    ],
)
def test_too_few_slots(hosts: str, ranks: int, per_node: int | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        spread(parse_hosts(hosts), ranks, per_node)


NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True), min_size=1, unique=True)


@given(NAMES, st.data())
def test_any_hosts_are_filled_in_their_order(names: list[str], data: st.DataObject) -> None:
    hosts = gathered((name, data.draw(st.integers(1, 9))) for name in names)
    per_node = data.draw(st.none() | st.integers(1, 9))
    room = [per_node or host.slots for host in hosts]
    ranks = data.draw(st.none() | st.integers(1, sum(room)))
    counts = spread(hosts, ranks, per_node)
    assert sum(counts) == (sum(room) if ranks is None else ranks)
    assert all(count <= most for count, most in zip(counts, room, strict=True))
    used = [count for count in counts if count]
    assert tuple(used) == counts[: len(used)] and used[:-1] == room[: len(used) - 1]
