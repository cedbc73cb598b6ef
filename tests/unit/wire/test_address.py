"""Which addresses of a host others are told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fivefold.errors import LaunchError
from fivefold.wire import addresses_of
from nodes import refusal


def test_an_interface_has_its_address() -> None:
    assert addresses_of([]) == []
    assert addresses_of(["lo", "lo"]) == ["127.0.0.1"] * 2


def test_an_interface_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(LaunchError, match=r"has no interface ib7 \(comm.interfaces\); it has .*lo"):
        addresses_of(["lo", "ib7"])


@pytest.mark.skipif(bool(refusal()), reason=refusal() or "network namespaces can be made")
def test_an_interface_may_have_an_address_of_ipv6_alone_or_none() -> None:
    setting_up = (
        "ip link add six type veth peer name none && ip address add fd00::5/64 dev six nodad && "
        'ip link set six up && exec "$0" -c "$1"'
    )
    asking = (
        "from fivefold.wire import addresses_of\n"
        "print(addresses_of(['six']))\n"
        "addresses_of(['six', 'none'])"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", setting_up, sys.executable, asking],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "['fd00::5']\n", done.stderr
    assert "interface none of" in done.stderr and "has no address" in done.stderr
