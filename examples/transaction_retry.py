"""Transfers between accounts, tried again while there isn't the money. `.venv/bin/python examples/transaction_retry.py`

    transfers ──► [ visits ──by account──► accounts ]──► decided      one row for each transfer
                       ▲                      │  └─────► bookings     one row for each change of a balance
                       └───── next visit ─────┘

A transfer visits two accounts: the payer's, which takes the money off, then the payee's, which puts it on. An account knows
nothing of the others, so the second visit is a way round the loop. Who can't pay now may be paid meanwhile: such a transfer
goes round as well, and is given up after some tries. Which transfers succeed depends on who came first. Two things don't, and
no failure changes them: every transfer is decided exactly once, and money that is on its way is neither lost nor doubled.
"""

import random
from collections import Counter

import tidegate as tg

ACCOUNTS, OPENING, TRANSFERS, TRIES = 100, 100, 2_000, 10
VISIT = "account long, id long, payer long, payee long, amount long, tries long"


def transfer(number):
    """Its first visit is the payer's account."""
    chance = random.Random(number)
    payer, payee = chance.sample(range(ACCOUNTS), 2)
    return payer, number, payer, payee, chance.randint(1, OPENING), 1


class Account(tg.KeyedProcess):
    balance = tg.value("long", default=OPENING)

    def process(self, visit, ctx):
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

    def book(self, visit, change, ctx):
        self.balance.set(self.balance.get() + change)
        ctx.side("bookings", (visit.account, visit.id, change, self.balance.get()))


def build(job, *, transfers=TRANSFERS, rate=None):
    def visits(stream):
        """The body of the loop: what goes round again, and what leaves it."""
        visited = stream.key_by("account").process("accounts", Account(), returns=VISIT, side_outputs={
            "decided": "id long, done boolean, tries long", "bookings": "account long, id long, change long, balance long"})
        visited.side_output("bookings").to("bookings", tg.sinks.collect())
        return visited, visited.side_output("decided")

    (job.source("transfers", tg.sources.generator(make_row=transfer, schema=VISIT, rows=transfers, rate=rate, splits=2))
        .iterate("visits", visits)
        .to("decided", tg.sinks.collect()))
    return job


def prove(decided, bookings, transfers=TRANSFERS):
    """What has to hold, however the transfers met and whatever failed. Returns the balances in the end."""
    assert sorted(row.id for row in decided) == list(range(transfers)), "a transfer is decided exactly once"
    made = Counter((row.account, row.id, row.change) for row in bookings)
    due = [(account, number, change) for number, done, _ in decided if done
           for _, _, payer, payee, amount, _ in [transfer(number)]
           for account, change in [(payer, -amount), (payee, amount)]]
    assert made == Counter(due), "what is decided is booked, on both sides, and nothing else"
    balances = dict.fromkeys(range(ACCOUNTS), OPENING)
    for row in bookings:
        balances[row.account] += row.change
        assert 0 <= row.balance == balances[row.account], "an account's bookings follow each other, and none overdraws it"
    assert sum(balances.values()) == ACCOUNTS * OPENING, "money is neither made nor lost"
    return balances


def main():
    handle = build(tg.Job("transaction retry", slots=2)).start()
    handle.wait()
    decided = handle.results("decided")
    balances = prove(decided, handle.results("bookings"))
    done = [row for row in decided if row.done]
    print(f"{len(decided):,} transfers: {len(done):,} done, {sum(row.tries > 1 for row in done):,} of them not at the first "
          f"try, and {len(decided) - len(done):,} given up; {ACCOUNTS} accounts hold {sum(balances.values()):,} in sum, as ever.")


if __name__ == "__main__":
    main()
