"""Which errors of the operating system last."""

from __future__ import annotations

import errno
import socket
import ssl
from typing import Any

import pyarrow as pa
import pytest

from tidegate.channels import tcp
from tidegate.channels.tcp import ChannelLost, TcpNetwork
from tidegate.errors import StoreError
from tidegate.protocol.ids import ChannelId
from tidegate.runtime.failing import failed
from tidegate.system_errors import lasts


def caused_by(cause: OSError) -> StoreError:
    error = StoreError(f"create x: {cause}")
    error.__cause__ = cause
    return error


def test_a_read_only_disk_lasts_and_a_name_node_in_safe_mode_does_not() -> None:
    assert lasts(caused_by(OSError(errno.EROFS, "Read-only file system")))
    assert not lasts(caused_by(OSError(errno.EROFS, "HDFS CreateDirectory failed")))


@pytest.mark.parametrize("error", [
    ssl.SSLError(1, "[SSL: SSLV3_ALERT_BAD_RECORD_MAC]"), socket.herror(1, "Unknown host"), OSError(errno.EPERM, "sendto"),
], ids=["TLS", "a host's name", "a packet filter"])
def test_numbers_of_other_lists_are_not_those_of_files(error: OSError) -> None:
    assert error.errno == errno.EPERM
    assert not lasts(error)
    assert lasts(PermissionError(errno.EPERM, "no", "/a/file"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENETUNREACH])
def test_a_network_that_refuses_to_connect_does_not_last(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A route that is forbidden gives the number of a file that is."""
    def refuse(address: Any) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(tcp, "start_connecting", refuse)
    with pytest.raises(ChannelLost) as lost:
        TcpNetwork._start_connecting(object.__new__(TcpNetwork), ChannelId(0, 0, 0), ("host", 1), pa.schema([]))
    assert not failed(0, lost.value).permanent
