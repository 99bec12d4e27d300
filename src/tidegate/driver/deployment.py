"""How the coordinator starts slots and sends them messages, and the layouts in which a job can run.

Spark, plain processes and the simulation each have a deployer. The coordinator knows only these protocols.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tidegate.control.messages import Message
from tidegate.dataflow.plan import Plan
from tidegate.driver.reports import Failure


class Deployment(Protocol):
    """Slots that are being started or run. Each connects to the coordinator itself."""

    def ended(self) -> str | Failure | None:
        """Return None while any slot is there, and then how the deployment ended."""

    def cancel(self) -> None:
        """End the slots soon, without waiting for that."""


class Deployer(Protocol):
    def deploy(self, attempt: int) -> Deployment: ...


class Links(Protocol):
    """Connections to the slots of the present attempt. Slots of older attempts are refused."""

    def expect(self, attempt: int) -> None:
        """Accept only this attempt's slots from now on, and drop all other links."""

    def send(self, slot: int, message: Message) -> None:
        """Send to a slot that has registered. If its link is lost, so is the message, and `Coordinator.on_lost` follows."""


@dataclass(slots=True, eq=False)
class Layout:
    """A job at some parallelism: its plan, its deployer, and the description that savepoints contain."""

    plan: Plan
    deployer: Deployer
    graph: str = ""


@dataclass(slots=True, eq=False)
class Rescaling:
    """A change to another layout. When `done`, the job runs in it, or `error` says why it never will; `job_ends` if that is
    because the job ends, and `went_back` if the job runs as before because it couldn't run in the new layout. Other threads
    may read it."""

    layout: Layout
    error: str | None = None
    job_ends: bool = False
    went_back: bool = False
    done: bool = False
