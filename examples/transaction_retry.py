"""Transfers between accounts, tried again while there isn't the money. `.venv/bin/python examples/transaction_retry.py`

    transfers ──► [ visits ──by account──► accounts ]──► decided      one row for each transfer
                       ▲                      │  └─────► bookings     one row for each change of a balance
                       └───── next visit ─────┘

A transfer visits two accounts: the payer's, which takes the money off, then the payee's, which puts it on. Accounts know
nothing of each other, so between the two visits it goes round the loop. Who can't pay now may be paid meanwhile: such a
transfer goes round as well, and is given up after some tries. Which transfers succeed depends on who came first. Two things
don't, and no failure changes them: each transfer is decided once, and money on its way is neither lost nor doubled.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import tidegate as tg
from tidegate.dataflow.stream import Stream

ACCOUNTS, OPENING, TRANSFERS, TRIES = 100, 100, 2_000, 10
VISIT = "account long, id long, payer long, payee long, amount long, tries long"


def transfer(number: int) -> tuple[int, ...]:
    """Its first visit is the payer's account."""
    chance = random.Random(number)
    payer, payee = chance.sample(range(ACCOUNTS), 2)
    return payer, number, payer, payee, chance.randint(1, OPENING), 1


class Account(tg.KeyedProcess):
    balance = tg.value("long", default=OPENING)

    def process(self, visit: Any, ctx: Any) -> Iterator[Any]:
        if visit.account == visit.payee:
            self.book(visit, visit.amount, ctx)
            ctx.side("decided", (visit.id, True, visit.tries))
        elif visit.amount <= self.balance.get():
            self.book(visit, -visit.amount, ctx)
            yield visit._replace(account=visit.payee)
        elif visit.tries < TRIES:
            yield visit._replace(tries=visit.tries + 1)
        else:
            ctx.side("decided", (visit.id, False, visit.tries))

    def book(self, visit: Any, change: int, ctx: Any) -> None:
        self.balance.set(self.balance.get() + change)
        ctx.side("bookings", (visit.account, visit.id, change, self.balance.get()))


def transfers(**rest: Any) -> tg.Source:
    return tg.sources.generator(make_row=transfer, schema=VISIT, rows=TRANSFERS, splits=2, **rest)


def build(job: tg.Job, source: tg.Source) -> tg.Job:
    def visits(stream: Stream) -> tuple[Stream, Stream]:
        """The body of the loop: what goes round again, and what leaves it."""
        visited = stream.key_by("account").process(
            "accounts",
            Account(),
            returns=VISIT,
            side_outputs={
                "decided": "id long, done boolean, tries long",
                "bookings": "account long, id long, change long, balance long",
            },
        )
        visited.side_output("bookings").to("bookings", tg.sinks.collect())
        return visited, visited.side_output("decided")

    job.source("transfers", source).iterate("visits", visits).to("decided", tg.sinks.collect())
    return job


def prove(decided: Sequence[Any], bookings: Sequence[Any]) -> dict[int, int]:
    """What has to hold, however the transfers met and whatever failed. Returns the balances in the end."""
    assert sorted(row.id for row in decided) == list(range(TRANSFERS)), "every transfer is decided, and once"
    due: Counter[tuple[int, int, int]] = Counter()
    for number in (row.id for row in decided if row.done):
        _, _, payer, payee, amount, _ = transfer(number)
        due.update([(payer, number, -amount), (payee, number, amount)])
    assert due == Counter((row.account, row.id, row.change) for row in bookings), "what was decided is booked, and no more"
    balances = dict.fromkeys(range(ACCOUNTS), OPENING)
    for row in bookings:
        balances[row.account] += row.change
        assert 0 <= row.balance == balances[row.account], "an account's bookings follow each other, and none overdraws it"
    assert sum(balances.values()) == ACCOUNTS * OPENING, "money is neither made nor lost"
    return balances


def main() -> None:
    handle = build(tg.Job("transaction retry", slots=2), transfers()).start()
    handle.wait()
    decided: Sequence[Any] = handle.results("decided")
    balances = prove(decided, handle.results("bookings"))
    tries = [row.tries for row in decided if row.done]
    print(
        f"{len(decided):,} transfers: {tries.count(1):,} done at once, {len(tries) - tries.count(1):,} later, "
        f"{len(decided) - len(tries):,} given up; {ACCOUNTS} accounts hold {sum(balances.values()):,} in sum, as ever."
    )


if __name__ == "__main__":
    main()
