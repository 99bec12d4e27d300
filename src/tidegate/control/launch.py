"""What every slot of a job gets, packed and unpacked, and its way to the driver."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import cloudpickle

from tidegate.channels.handshake import CONNECT_TIMEOUT_S, Identity
from tidegate.channels.links import Link, LinkLost, connect_link
from tidegate.control.failing import failed
from tidegate.control.messages import to_wire
from tidegate.control.settings import JobSettings
from tidegate.dataflow.operators.user_code import missing_module_advice
from tidegate.dataflow.plan import Plan
from tidegate.errors import JobError, TidegateError

# How the address begins of a store that is for one run and stays empty. Each process has its own, and forgets it.
STORE_OF_A_RUN = "memory://tidegate-transform-"


@dataclass(frozen=True, slots=True)
class SlotLaunch:
    """What every slot of a job gets, through Spark's own closure path."""

    plan: Plan
    settings: JobSettings
    store: str
    secret: bytes = field(repr=False)

    def packed(self) -> bytes:
        """Return it as `run_slot` takes it. Raises `JobError` if a user's function can't be pickled."""
        try:
            contents: bytes = cloudpickle.dumps(self)
        except Exception as error:
            culprits = [node.name for node in self.plan.nodes if not _travels(node.spec)]
            raise JobError(
                f"the job can't be sent to its slots: {error}. Functions travel pickled, with all they refer to"
                f"{f' (look at {culprits})' if culprits else ''}: make connections, locks and sessions in `open`, or "
                f"where they are used"
            ) from error
        # A slot that can't unpack the users' functions still has to be able to report that.
        payload: bytes = cloudpickle.dumps((self.settings.name, self.secret, contents))
        return payload


def identity_of(payload: bytes, attempt: int) -> Identity:
    """Return what a slot of the job proves to the coordinator and to other slots."""
    name, secret, _ = cloudpickle.loads(payload)
    return Identity(name, attempt, secret)


def unpacked(payload: bytes, index: int, link: Link) -> SlotLaunch:
    """Return the launch, in the process of the slot that it is for. If it can't be unpacked, because a module is missing or
    of another version, report that to the coordinator and raise `JobError`."""
    try:
        launch: SlotLaunch = cloudpickle.loads(cloudpickle.loads(payload)[2])
    except Exception as error:
        advice = (
            missing_module_advice(error)
            if isinstance(error, ImportError)
            else ("The modules here may be of another version than the driver's: send the same ones.")
        )
        explained = JobError(f"slot {index} can't unpack the job: {error}. {advice.rstrip()}")
        link.send(to_wire(failed(index, explained)))
        link.flush(timeout_s=5.0)
        raise explained from error
    return launch


def _travels(spec: Any) -> bool:
    try:
        cloudpickle.dumps(spec)
    except Exception:  # noqa: BLE001  (whatever a user's object raises)
        return False
    return True


def reach_driver(address: tuple[str, int], identity: Identity, hello: Mapping[str, Any]) -> Link:
    """Connect to the driver from a slot's process. The error, if that fails, is for whoever set the cluster up."""
    try:
        return connect_link(address, identity, hello, timeout_s=CONNECT_TIMEOUT_S)
    except LinkLost as error:
        raise TidegateError(
            f"{error} (tried from {socket.gethostname()}). If the job is over, or its driver gone, that is expected. "
            f"Otherwise this host can't connect to {address[0]}, port {address[1]}: let it through the firewall "
            f"(tg.Tuning(coordinator_ports=…) gives ports to open), or give the name of the driver's host "
            f"(spark.driver.host or tg.Tuning(coordinator_host=…)); see docs/clusters.md"
        ) from error
