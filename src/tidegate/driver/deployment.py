"""What the coordinator is given to bring slots up and to talk to them, and the layouts that a job can be brought up in.

Spark, plain processes and the simulation each have a deployer; the coordinator knows only these protocols.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tidegate.control.messages import Message
from tidegate.dataflow.plan import Plan
from tidegate.driver.reports import Failure


class Deployment(Protocol):
    """Slots that were asked for. They connect by themselves."""

    def ended(self) -> str | Failure | None:
        """None while it runs; a text that says how it ended once all its slots are gone, or more than a text."""

    def cancel(self) -> None:
        """Ends it soon, without waiting."""


class Deployer(Protocol):
    def deploy(self, attempt: int) -> Deployment: ...


class Links(Protocol):
    """Connections to the slots of the present attempt; those of older ones are refused."""

    def expect(self, attempt: int) -> None:
        """From now on only this attempt's slots are let in; links of others are dropped."""

    def send(self, slot: int, message: Message) -> None:
        """To a slot that has registered. A lost link swallows it; `Coordinator.on_lost` follows."""


@dataclass(slots=True, eq=False)
class Layout:
    """The job at some parallelism: its plan, what deploys it, and the text that savepoints have of it."""

    plan: Plan
    deployer: Deployer
    graph: str = ""


@dataclass(slots=True, eq=False)
class Rescaling:
    """A change to another layout. When `done`, it runs, or `error` says why it never will; other threads may look.
    `job_ends`: because the job does."""

    layout: Layout
    error: str | None = None
    job_ends: bool = False
    done: bool = False
