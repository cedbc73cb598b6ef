"""The address of an interface of this machine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fivefold.cluster.network import address_of
from nodes import refusal


def test_an_interface_has_an_address_or_none() -> None:
    assert address_of("lo") == "127.0.0.1"
    assert address_of("ib7") == ""


@pytest.mark.skipif(bool(refusal()), reason=refusal() or "network namespaces can be made")
def test_it_may_be_one_of_ipv6() -> None:
    setting_up = (
        "ip link add six type veth peer name none && ip address add fd00::5/64 dev six nodad && "
        'ip link set six up && exec "$0" -c "$1"'
    )
    asking = "from fivefold.cluster.network import address_of; print(address_of('six'), address_of('none'))"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", setting_up, sys.executable, asking],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout == "fd00::5 \n", done.stderr
