"""The hosts of an allocation, from what Slurm, PBS, LSF and flux tell."""

from __future__ import annotations

import os
import socket
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import UsageError
from fivefold.launch.allocation import allocated
from fivefold.launch.hosts import LOCAL, Host, reachable
from fivefold.launch.slurm import counts, expanded

RECORDED = Path(__file__).parent / "recorded"


def slurm(nodes: str, **variables: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": nodes, **variables}


def told(hosts: tuple[Host, ...]) -> str:
    return " ".join(f"{host.host}:{host.slots}" for host in hosts)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node0", "node0"),
        ("node[0-1]", "node0 node1"),
        ("gpu[003-005,010],login1", "gpu003 gpu004 gpu005 gpu010 login1"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[08-11]", "n08 n09 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[7]", "n7"),
        ("n[2,1,2]", "n2 n1 n2"),
        ("a[1-2]b[01-02]", "a1b01 a1b02 a2b01 a2b02"),
        ("r[1-2][3-4]", "r13 r14 r23 r24"),
        ("rack[1-2]node[07-08].site.org,x", " ".join(
            f"rack{rack}node0{node}.site.org" for rack in (1, 2) for node in (7, 8)) + " x"),
        ("[1-2]a", "1a 2a"),
        ("b,a,b", "b a b"),
    ],
)  # fmt: skip
def test_a_list_of_hosts(text: str, hosts: str) -> None:
    assert " ".join(expanded(text, "LIST")) == hosts


@pytest.mark.parametrize(
    "text",
    [
        "", ",", "a,", ",a", "a,,b", "a[]", "a[1", "a1]", "a[[1]]", "a[1]]", "a][1", "a[1-]", "a[-1]",
        "a[1,]", "a[,1]", "a[1-2-3]", "a[x-y]", "a[1 - 2]", "a[٣]", "a[1²]", "a b", "a\nb", "a:2",
        "-oProxyCommand[1-2]", "nœud[1-2]", "a[1-2]-", "a;b", "[fe80::1]", "a[1-" + "9" * 5000 + "]",
    ],
)  # fmt: skip
def test_what_is_no_list_of_hosts(text: str) -> None:
    with pytest.raises(
        UsageError, match=r"expected such as gpu\[003-005,010\],login1; name"
    ) as why:
        expanded(text, "LIST")
    assert str(why.value).startswith("cannot read LIST=")


def test_a_range_goes_forward() -> None:
    with pytest.raises(UsageError, match=r"cannot read LIST=a\[1,5-3\]: 5-3 goes backwards; name"):
        expanded("a[1,5-3]", "LIST")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "a[0-65536]",
        "a[0-999999999]",
        "a[0-255]b[0-255],c",
        "a[0-99][0-99][0-99][0-99][0-99][0-99]",
        "a[" + ",".join(["0-9999"] * 7) + "]",
        ",".join(["a[0-9999]"] * 7),
        "a," * 65_536 + "a",
    ],
    ids=lambda text: text[:20],
)
def test_lists_without_end(text: str) -> None:
    with pytest.raises(UsageError, match="LIST names more than 65,536 hosts; name"):
        expanded(text, "LIST")


def test_the_longest_list() -> None:
    assert len(expanded("a[0-255]b[0-255]", "LIST")) == 65_536
    assert len(expanded("a[0-65535]", "LIST")) == 65_536


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.integers(0, 999), st.integers(0, 30), st.integers(1, 4)
        ),
        min_size=1,
    )
)
def test_lists_are_expanded_in_their_order(parts: list[tuple[str, int, int, int]]) -> None:
    text = ",".join(f"{p}[{low:0{w}}-{low + more:0{w}}]" for p, low, more, w in parts)
    hosts = [f"{p}{n:0{w}}" for p, low, more, w in parts for n in range(low, low + more + 1)]
    assert list(expanded(text, "LIST")) == hosts


@given(st.lists(st.integers(1, 5), min_size=1, max_size=30))
def test_tasks_of_nodes(tasks: list[int]) -> None:
    runs = [(count, len(list(run))) for count, run in groupby(tasks)]
    text = ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in runs)
    assert list(counts(text, "TASKS")) == tasks


@pytest.mark.parametrize(
    "text",
    ["", ",", "4,", "4(y2)", "4(x)", "4(x0)", "0", "0(x2)", "-1", "4(x99999)", "٣", "4(x2", "x"],
)
def test_what_is_no_number_of_tasks(text: str) -> None:
    with pytest.raises(UsageError, match=r"cannot read TASKS=.*: expected such as 4\(x2\),3"):
        counts(text, "TASKS")


@pytest.mark.parametrize(
    ("nodes", "variables", "hosts"),
    [
        ("n[0-2]", {"SLURM_TASKS_PER_NODE": "4(x2),3"}, "n0:4 n1:4 n2:3"),
        ("n[0-1]", {"SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_NTASKS_PER_NODE": "9"}, "n0:2 n1:2"),
        ("n[0-1]", {"SLURM_NTASKS_PER_NODE": "3"}, "n0:3 n1:3"),
        ("n[0-1]", {"SLURM_TASKS_PER_NODE": "", "SLURM_NTASKS_PER_NODE": ""}, "n0:1 n1:1"),
        ("n1,n0,n1", {"SLURM_TASKS_PER_NODE": "1,2,3"}, "n1:4 n0:2"),
        ("n0", {"PBS_NODEFILE": "/none"}, "n0:1"),
    ],
)
def test_slurm(nodes: str, variables: dict[str, str], hosts: str) -> None:
    assert told(allocated(slurm(nodes, **variables))) == hosts


def test_slurm_contradicts_itself() -> None:
    says = r"SLURM_JOB_NODELIST=n\[0-2\] and SLURM_TASKS_PER_NODE=4\(x2\) contradict each other: 3 and 2"
    with pytest.raises(UsageError, match=says):
        allocated(slurm("n[0-2]", SLURM_TASKS_PER_NODE="4(x2)"))
    with pytest.raises(UsageError, match=r"SLURM_NTASKS_PER_NODE=many: expected such as"):
        allocated(slurm("n[0-2]", SLURM_NTASKS_PER_NODE="many"))


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("salloc_shell", "node0:4"),
        ("salloc_shell_one", "node0:1"),
        ("salloc_shell_per_node", "node0:2 node1:2"),
        ("salloc_interactive_step", "node0:4"),
        ("sbatch_script", "node0:3 node1:1"),
        ("sbatch_srun", "node0:3 node1:1"),
        ("srun", "node0:2 node1:1"),
        ("srun_shell", "node1:4"),
        ("flux", ""),
        ("flux_in_slurm", ""),
        ("torchrun", ""),
    ],
)
def test_recorded_variables(name: str, hosts: str) -> None:
    lines = (RECORDED / f"{name}.env").read_text().splitlines()
    environ = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    assert told(allocated(environ)) == hosts


def test_no_allocation() -> None:
    assert allocated({}) == ()
    assert allocated({"SLURM_JOB_NODELIST": "n[0-1]"}) == ()  # left over in a shell
    assert allocated({"SLURM_JOB_ID": "12"}) == ()  # as a container may pass it on
    environ = slurm("n[0-1]", FLUX_URI="local:///tmp/flux/local-0", PBS_NODEFILE="/none")
    assert allocated(environ) == ()


def flux(folder: Path, says: str, **variables: str) -> dict[str, str]:
    """The environment of an instance, whose flux runs a line of shell when it is asked for its hosts."""
    (folder / "flux").write_text(f'#!/bin/sh\n[ "$*" = "getattr hostlist" ] && {says}\n')
    (folder / "flux").chmod(0o755)
    path = f"{folder}:{os.defpath}"
    return {"FLUX_URI": "local:///tmp/flux/local-0", "PATH": path, **variables}


def test_flux(tmp_path: Path) -> None:
    within = flux(
        tmp_path, "echo 'gpu[003-004],login1'", SLURM_JOB_ID="12", SLURM_JOB_NODELIST="n[0-7]"
    )
    assert told(allocated(within)) == "gpu003:1 gpu004:1 login1:1"
    assert allocated(within | {"FLUX_TASK_RANK": "0"}) == ()  # flux run fivefold run
    assert allocated(flux(tmp_path, "echo gpu003")) == ()
    assert allocated(flux(tmp_path, "echo gpu003,gpu003")) == ()  # brokers of a test instance


@pytest.mark.parametrize(
    ("does", "says"),
    [
        (
            "{ echo 'flux-getattr: no such attribute' >&2; false; }",
            "flux-getattr: no such attribute",
        ),
        ("exit 3", "exit code 3"),
    ],
)
def test_flux_that_does_not_tell(does: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=f"flux does not tell its hosts: {says}; name the hosts yourself"
    ):
        allocated(flux(tmp_path, does))
    with pytest.raises(UsageError, match=r"cannot read flux hostlist=gpu\[3: expected such as"):
        allocated(flux(tmp_path, "echo 'gpu[3'"))


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE"])
@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\na\nb\nb\n", "a:2 b:2"),
        ("b\na\nb\na\n", "b:2 a:2"),
        ("x1.hsn.site.org\r\nx2.hsn.site.org\r\n", "x1.hsn.site.org:1 x2.hsn.site.org:1"),
    ],
)
def test_a_file_of_slots(tmp_path: Path, variable: str, text: str, hosts: str) -> None:
    file = tmp_path / "nodes"
    file.write_bytes(text.encode())
    assert told(allocated({variable: str(file), "LSB_MCPU_HOSTS": "c 4"})) == hosts


@pytest.mark.parametrize("variable", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE"])
def test_a_file_of_slots_that_cannot_be_read(tmp_path: Path, variable: str) -> None:
    file = tmp_path / "nodes"
    for content, says in (
        (None, "cannot read the host file .*: No such file or directory; name the hosts yourself"),
        (b"", "the host file .* names no host; name the hosts yourself"),
        (b"\xff", "it is no text; name the hosts yourself"),
        (b"a\na b\n", "line 2: 'b' is not NAME=VALUE"),
    ):
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(UsageError, match=f"^{variable}: .*{says}"):
            allocated({variable: str(file), "LSB_MCPU_HOSTS": "c 4"})


def test_lsf_in_a_variable() -> None:
    assert told(allocated({"LSB_MCPU_HOSTS": "host1 4 host2 4  host1 1"})) == "host1:5 host2:4"


@pytest.mark.parametrize(
    "text", [" ", "host1", "host1 4 host2", "host1 x", "host1 0", "4 host1", "a,b 2"]
)
def test_lsf_in_a_variable_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="LSB_MCPU_HOSTS"):
        allocated({"LSB_MCPU_HOSTS": text})


def test_this_node_keeps_the_name_that_its_manager_knows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "n1.site.org")
    hosts = allocated(slurm("n[0-1]"))
    assert hosts == (Host("n0"), Host(LOCAL))
    assert [reachable(host) for host in hosts] == ["n0", "n1"]
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    (tmp_path / "nodes").write_text("n0.hsn\nn1.hsn\n")
    hosts = allocated({"PBS_NODEFILE": str(tmp_path / "nodes")})
    assert [host.host for host in hosts] == ["n0.hsn", LOCAL]
    assert [reachable(host) for host in hosts] == ["n0.hsn", "n1.hsn"]
