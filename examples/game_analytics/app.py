"""The job: the progress of every player, and the rules that watch it.

    events ──by player──► play ──► progress   one row for each event: the player's numbers right after it
    rules ───to all─────►      ──► alerts     one row for each time that a rule fired

Rules and events are two streams, and which of two records on two streams arrives first is chance. So that the outcome
doesn't hang on it, an event waits in its player's state until event time has passed it on *both* streams: then all
rules that could apply to it are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import events
import rules

import tidegate as tg

PROGRESS = "n long, player long, kind string, level long, tries long, losses long, spent long"
ALERTS = "n long, player long, rule string, value long, action string"


class Play(tg.BroadcastProcess):
    """Follows the players. These six are state: after a crash they are as they were at the snapshot."""

    rules = tg.broadcast_map("string", "struct<watches:string,at_least:long,action:string,since:long,until:long>")
    waiting = tg.list("struct<n:long,kind:string,cents:long,ts:long>")
    level = tg.value("long", default=1)
    tries = tg.map("long", "long")  # by level
    losses = tg.value("long", default=0)  # since the last win
    spent = tg.value("long", default=0)  # in cents

    def process_broadcast(self, tick: Any, ctx: Any) -> None:
        """The stream of rules, to every subtask: most ticks bring nothing but their time."""
        if tick.rule is None:
            return
        if tick.watches is None:
            begun: Any = self.rules.get(tick.rule)
            rule = begun | {"until": tick.ts}
        else:
            rule = {
                "watches": tick.watches,
                "at_least": tick.at_least,
                "action": tick.action,
                "since": tick.ts,
                "until": rules.FOREVER_MS,
            }
        self.rules.put(tick.rule, rule)

    def process(self, event: Any, ctx: Any) -> None:
        self.waiting.add({"n": event.n, "kind": event.kind, "cents": event.cents, "ts": event.ts})
        ctx.timers.event_time(event.ts)

    def on_timer(self, at: int, ctx: Any) -> Iterator[tuple[Any, ...]]:
        """Event time has passed `at` on both streams."""
        waiting = self.waiting.get()  # in order of time: all events of a player are in one split
        due = [event for event in waiting if event["ts"] <= at]
        self.waiting.replace(waiting[len(due) :])
        for event in due:
            before = self.numbers()
            self.play(event)
            after = self.numbers()
            yield event["n"], ctx.key, event["kind"], *after.values()
            for name, rule in self.rules.items():
                old, new = before[rule["watches"]], after[rule["watches"]]
                if rule["since"] <= event["ts"] < rule["until"] and old < rule["at_least"] <= new:
                    ctx.side("alerts", (event["n"], ctx.key, name, new, rule["action"]))

    def play(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "start":
                level = self.level.get()
                self.tries.put(level, self.tries.get(level, 0) + 1)
            case "win":
                self.level.set(self.level.get() + 1)
                self.losses.clear()
            case "lose":
                self.losses.set(self.losses.get() + 1)
            case "purchase":
                self.spent.set(self.spent.get() + event["cents"])

    def numbers(self) -> dict[str, int]:
        """What rules can watch."""
        level = self.level.get()
        return {"level": level, "tries": self.tries.get(level, 0), "losses": self.losses.get(), "spent": self.spent.get()}


def build(job: tg.Job, game: events.Game, out: Path) -> None:
    """Adds the dataflow to the job. Its output goes to the folders `progress` and `alerts` in `out`."""
    ticks = rules.Ticks(game)
    all_events = tg.sources.generator(
        game.make, schema=events.SCHEMA, rows=game.event_count, rate=game.rate, splits=events.SPLITS
    )
    all_ticks = tg.sources.generator(make_row=ticks, schema=rules.SCHEMA, rows=ticks.count, rate=rules.TICKS_PER_S, splits=1)

    by_player = job.source("events", all_events).with_watermark("ts", "0 s").key_by("player")
    to_all = job.source("rules", all_ticks).with_watermark("ts", "0 s").broadcast()
    played = by_player.connect(to_all).process("play", Play(), returns=PROGRESS, side_outputs={"alerts": ALERTS})
    played.to("progress", tg.sinks.parquet(out / "progress"))
    played.side_output("alerts").to("alerts", tg.sinks.parquet(out / "alerts"))
