"""Which interface leads to another machine; on Linux, where every machine has a loopback one."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from ppocli.parallel.interfaces import interface_towards, let_gloo_use

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for addresses")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.7", "localhost"])
def test_this_machine_for_itself_is_at_loopback(host):
    assert interface_towards(host) == "lo"


def test_an_address_elsewhere_is_not_reached_through_loopback():
    """192.0.2.0/24 is kept for documentation; choosing a route sends nothing."""
    name = interface_towards("192.0.2.1")
    assert name != "lo"
    assert name is None or name in {known for _, known in socket.if_nameindex()}


def test_what_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    let_gloo_use("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    let_gloo_use("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
