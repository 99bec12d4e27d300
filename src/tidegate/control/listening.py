"""The addresses at which the coordinator and the slots listen, and the names by which others find them.

Both listen on loopback by default. The address of the coordinator is set by the user (`Tuning`), or follows from Spark's
settings of the driver (`spark.deploy`). A slot connects to the coordinator first, and listens at its own end of that
connection: on loopback if the coordinator is on loopback, and otherwise at its host's address in the network that leads to
the coordinator. Settings that differ from host to host are variables of the host's environment.

Whoever connects has to prove that it knows the job's secret, on loopback and elsewhere (channels/handshake.py).
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tidegate.errors import JobError

LOOPBACK = "127.0.0.1"
ANY_PORT = range(1)  # port 0: the system picks one that is free
EVERY_ADDRESS = ("0.0.0.0", "::")
SLOT_BIND_HOST_VARIABLE = "TIDEGATE_SLOT_BIND_HOST"
SLOT_HOST_VARIABLE = "TIDEGATE_SLOT_HOST"

_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_MAX_PORT = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where to listen: at `bind_host`, an address of this host, and the first free port of `ports`. Others connect to
    `host`, or to the bound address if that is None."""

    who: str
    bind_host: str
    ports: range = ANY_PORT
    host: str | None = None
    bind_setting: str
    host_setting: str
    ports_setting: str

    def __post_init__(self) -> None:
        if self.host is None and self.bind_host in EVERY_ADDRESS:
            raise JobError(
                f"{self.who} is to listen at {self.bind_host}, which stands for every address of its host, so that "
                f"others can't connect to it: give {self.host_setting}, too"
            )

    def found_at(self, bound: tuple[str, int]) -> tuple[str, int]:
        """Return the address that others connect to, for this bound address."""
        return (self.host or bound[0], bound[1])

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn an `OSError` of what listens within it into a `JobError` that says what to do."""
        try:
            yield
        except OSError as error:
            what = f"{self.who} can't listen at {self.bind_host}, {self._shown_ports()}"
            raise JobError(f"{what}: {self._advice(error)}") from error

    def _shown_ports(self) -> str:
        if len(self.ports) > 1:
            return f"ports {self.ports[0]}-{self.ports[-1]}"
        return f"port {self.ports[0]}" if self.ports[0] else "any port"

    def _advice(self, error: OSError) -> str:
        if error.errno == errno.EADDRINUSE:
            return (
                f"{'none of them is free' if len(self.ports) > 1 else 'it is taken'}. Give another port, or more of "
                f"them, of which the first free one is used: {self.ports_setting}"
            )
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            return (
                f"its host has no such address. Give one that it has as {self.bind_setting}, and the one under which "
                f"others find it as {self.host_setting}"
            )
        if error.errno == errno.EACCES:
            return f"that isn't allowed to this user. Give ports of 1024 and above: {self.ports_setting}"
        return str(error)


def parse_ports(ports: int | str | None, *, setting: str) -> range:
    """Return the ports of a setting: one, or a range with both ends such as "40000-40019". None and 0 mean any free port."""
    found = _PORTS.fullmatch("0" if ports is None else str(ports).replace(" ", ""))
    first, last = (0, -1) if found is None else (int(found[1]), int(found[2] or found[1]))
    if not first <= last <= _MAX_PORT or (first == 0 and last > 0):
        raise JobError(
            f'{setting}={ports!r}: give a port (1 to {_MAX_PORT}), a range of them such as "40000-40019", or 0 '
            f"for any that is free"
        )
    return range(first, last + 1)


def slot_listening(index: int, *, ports: range, own_end: str, environment: Mapping[str, str]) -> Listening:
    """Return where a slot listens. `own_end` is its address on its connection to the coordinator."""
    bind_host = environment.get(SLOT_BIND_HOST_VARIABLE) or own_end
    host = environment.get(SLOT_HOST_VARIABLE) or (own_end if bind_host in EVERY_ADDRESS else None)
    return Listening(
        who=f"slot {index}",
        bind_host=bind_host,
        ports=ports,
        host=host,
        bind_setting=f"the variable {SLOT_BIND_HOST_VARIABLE} of its environment",
        host_setting=f"the variable {SLOT_HOST_VARIABLE}",
        ports_setting='tg.Tuning(slot_ports="40100-40199")',
    )
