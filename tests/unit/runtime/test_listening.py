"""Where coordinator and slots listen: loopback unless told, ports out of a range, names that differ from what is bound."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import tidegate as tg
from tests.jobs import build_ledger, check_ledger
from tests.unit.runtime.conftest import Bench
from tidegate.errors import JobError, JobFailed
from tidegate.runtime.gathering import Gathering
from tidegate.runtime.listening import SLOT_BIND_HOST_VARIABLE, SLOT_HOST_VARIABLE, parse_ports, slot_listening
from tidegate.spark.deploy import placed_by

ROWS = 300


@contextmanager
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


@pytest.mark.parametrize(
    ("given", "ports"),
    [
        (None, range(1)),
        (0, range(1)),
        (40_000, range(40_000, 40_001)),
        ("40000", range(40_000, 40_001)),
        ("40000-40019", range(40_000, 40_020)),
        (" 40000 - 40019 ", range(40_000, 40_020)),
    ],
)
def test_a_port_a_range_or_any(given: Any, ports: range) -> None:
    assert parse_ports(given, setting="coordinator_ports") == ports


@pytest.mark.parametrize(
    "wrong", [-1, 65_536, "many", "40019-40000", "40000-70000", "0-10", "40000,40001", "1-2-3", 1.5, ""]
)
def test_ports_that_cant_be_are_refused(wrong: Any) -> None:
    with pytest.raises(JobError, match=r"slot_ports=.*40000-40019"):
        tg.Tuning(slot_ports=wrong)
    with pytest.raises(JobError, match="coordinator_ports="):
        tg.Tuning(coordinator_ports=wrong)


def test_all_is_on_loopback_unless_told() -> None:
    listening = tg.Tuning().coordinator_listening
    assert (listening.bind_host, listening.ports, listening.host) == ("127.0.0.1", range(1), None)
    assert slot_listening(0, ports=range(1), own_end="127.0.0.1", environment={}).bind_host == "127.0.0.1"


def test_every_address_of_a_host_is_none_to_connect_to() -> None:
    with pytest.raises(JobError, match=r"the coordinator is to listen at 0\.0\.0\.0.*give tg\.Tuning\(coordinator_host=…\)"):
        tg.Tuning(coordinator_bind_host="0.0.0.0").coordinator_listening
    told = tg.Tuning(coordinator_bind_host="0.0.0.0", coordinator_host="driver").coordinator_listening
    assert told.found_at(("0.0.0.0", 40_000)) == ("driver", 40_000)


@pytest.mark.parametrize(
    ("environment", "bound", "told"),
    [
        ({}, "10.0.0.7", None),
        ({SLOT_BIND_HOST_VARIABLE: "0.0.0.0"}, "0.0.0.0", "10.0.0.7"),
        ({SLOT_BIND_HOST_VARIABLE: "192.168.1.7"}, "192.168.1.7", None),
        ({SLOT_HOST_VARIABLE: "node-7.example.org"}, "10.0.0.7", "node-7.example.org"),
        ({SLOT_BIND_HOST_VARIABLE: "::", SLOT_HOST_VARIABLE: "node-7"}, "::", "node-7"),
    ],
)
def test_a_slot_listens_where_it_reached_the_coordinator_from_unless_its_host_says_otherwise(
    environment: dict[str, str], bound: str, told: str | None
) -> None:
    listening = slot_listening(7, ports=range(1), own_end="10.0.0.7", environment=environment)
    assert (listening.bind_host, listening.host) == (bound, told)


CLUSTER = {"spark.driver.host": "driver.example.org"}


@pytest.mark.parametrize(
    ("tuning", "configuration", "bound", "found"),
    [
        (tg.Tuning(), CLUSTER, "driver.example.org", "driver.example.org"),
        (tg.Tuning(), {"spark.driver.host": "[fe80::1]"}, "fe80::1", "fe80::1"),
        (tg.Tuning(), CLUSTER | {"spark.driver.bindAddress": "0.0.0.0"}, "0.0.0.0", "driver.example.org"),
        (tg.Tuning(), CLUSTER | {"spark.tidegate.coordinatorHost": "outside"}, "driver.example.org", "outside"),
        (tg.Tuning(), CLUSTER | {"spark.tidegate.coordinatorBindHost": "10.0.0.1"}, "10.0.0.1", None),
        (
            tg.Tuning(coordinator_bind_host="::"),
            CLUSTER | {"spark.tidegate.coordinatorBindHost": "10.0.0.1"},
            "::",
            "driver.example.org",
        ),
        (tg.Tuning(coordinator_bind_host="10.0.0.1", coordinator_host="outside"), CLUSTER, "10.0.0.1", "outside"),
    ],
)
def test_on_a_cluster_the_coordinator_is_where_sparks_driver_is_unless_told(
    tuning: tg.Tuning, configuration: dict[str, str], bound: str, found: str | None
) -> None:
    placed = placed_by(tuning, configuration, is_local=False)
    assert (placed.coordinator_bind_host, placed.coordinator_host) == (bound, found)


def test_on_one_machine_it_is_on_loopback_whatever_sparks_driver_is_called() -> None:
    placed = placed_by(tg.Tuning(linger="7 ms"), CLUSTER | {"spark.tidegate.slotPorts": "40100-40199"}, is_local=True)
    assert placed == tg.Tuning(linger="7 ms", slot_ports="40100-40199")
    assert placed.coordinator_listening.bind_host == "127.0.0.1"


def test_what_the_program_says_counts_more_than_sparks_configuration() -> None:
    placed = placed_by(tg.Tuning(coordinator_ports=40_001), {"spark.tidegate.coordinatorPorts": "40000"}, is_local=True)
    assert placed.coordinator_ports == 40_001


def test_a_job_runs_with_ports_of_its_own_and_under_another_name(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs at once share a range in which some ports are taken; names are told that nobody listens under."""
    monkeypatch.setenv(SLOT_BIND_HOST_VARIABLE, "0.0.0.0")
    monkeypatch.setenv(SLOT_HOST_VARIABLE, "localhost")
    with taken_port() as taken:
        ports = f"{taken}-{taken + 30}"
        tuning = tg.Tuning(
            coordinator_bind_host="0.0.0.0", coordinator_host="localhost", coordinator_ports=ports, slot_ports=ports
        )
        jobs = [build_ledger(bench.job(name, tuning=tuning), tg.sinks.collect(), rows=ROWS) for name in ("a", "b")]
        handles = [bench.start(job) for job in jobs]
        for handle in handles:
            assert handle.wait("1 minute") is tg.Status.FINISHED
            check_ledger([tuple(row) for row in handle.results("out")], ROWS)


def test_a_coordinator_whose_ports_are_taken_says_which_and_what_to_do(bench: Bench) -> None:
    with taken_port() as taken:
        tuning = tg.Tuning(coordinator_ports=taken)
        told = (
            rf"the coordinator can't listen at 127\.0\.0\.1, port {taken}: "
            r"it is taken.*Tuning\(coordinator_ports=\"40000-40019\""
        )
        with pytest.raises(JobError, match=told):
            bench.ledger(rows=ROWS, tuning=tuning)
        with pytest.raises(JobError, match=told):
            Gathering(tuning.coordinator_listening)


def test_an_address_that_the_host_doesnt_have_is_told(bench: Bench) -> None:
    told = r"203\.0\.113\.7, any port: its host has no such address.*coordinator_bind_host=…\), and .*coordinator_host=…"
    tuning = tg.Tuning(coordinator_bind_host="203.0.113.7")
    with pytest.raises(JobError, match=told):
        bench.ledger(rows=ROWS, tuning=tuning)
    with pytest.raises(JobError, match=told), tuning.coordinator_listening.explained():
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_slot_whose_ports_are_taken_fails_the_job_and_says_so(bench: Bench) -> None:
    with taken_port() as taken:
        handle = bench.ledger(rows=ROWS, tuning=tg.Tuning(slot_ports=taken), restart=tg.NoRestart())
        with pytest.raises(JobFailed, match=rf"slot \d can't listen at 127\.0\.0\.1, port {taken}: it is taken.*slot_ports"):
            handle.wait()


def test_a_slot_that_cant_reach_the_others_says_where_it_looked(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SLOT_HOST_VARIABLE, "127.0.0.9")  # where nobody listens
    handle = bench.ledger(rows=ROWS, restart=tg.NoRestart())
    with pytest.raises(JobFailed, match=r"can't reach \('127\.0\.0\.9', \d+\)"):
        handle.wait()
