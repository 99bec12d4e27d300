"""Nexmark's events, made in columns: of 50 events one is a person, three are auctions, 46 are bids.

An event is a pure function of the seed and of its number, so any range of events can be made, in any order, by any process.
Persons, auctions and bids are three sources, because most queries read one or two of them. They agree: event number n
belongs to exactly one of the three, and a bid refers to the persons and auctions of the events before it. A source makes
only the columns that it is asked for.

The proportions, the hot keys and the distributions are those of the original suite. What differs:

- Event times have microseconds, and no two events have the same one. So queries that rank by time have one right answer.
- `extra` and person's texts are drawn from tables of a few thousand texts. The original draws each on its own.
- The original adds the first person's number to a bid's bidder twice, so that bids and persons hardly meet; here it is once.

Not here: events out of order, and rates that change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import tidegate as tg

Numbers = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint64]

EVENTS, AUCTIONS, BIDS = 50, 3, 46  # of 50 events the first is a person, the next three are auctions
FIRST_ID = 1000  # of persons and of auctions
FIRST_CATEGORY, CATEGORIES = 10, 5
HOT_GROUP = 100  # the hot auction, seller and bidder change with every so many
AUCTIONS_IN_FLIGHT, ACTIVE_PERSONS = 100, 1000
LEAD = 10  # how many auctions and persons that do not exist yet may be referred to
START_US = 1_436_918_400_000_000  # 2015-07-15 00:00:00, as in the original
CHANNELS = 10_000
HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")
TEXTS = 1 << 12  # how many different texts a text column has

PERSON = (
    "id long, name string, email_address string, credit_card string, city string, state string, date_time timestamp, "
    "extra string"
)
AUCTION = (
    "id long, item_name string, description string, initial_bid long, reserve long, date_time timestamp, "
    "expires timestamp, seller long, category long, extra string"
)
BID = "auction long, bidder long, price long, channel string, url string, date_time timestamp, extra string"


@dataclass(frozen=True, slots=True)
class Events:
    """`count` events, `rate` of them in a second of event time, in `splits` splits. Making them takes `seconds` at least."""

    count: int
    seed: int = 1
    rate: int = 100_000
    splits: int = 2
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.count % EVENTS or 1_000_000 % self.rate:
            raise ValueError(f"{self}: give a multiple of {EVENTS} events, and a rate that divides a million")

    def person(self, *columns: str) -> tg.Source:
        """Return the source of persons, with these columns (default: all)."""
        return self._source(PERSON, Persons, columns, 1)

    def auction(self, *columns: str) -> tg.Source:
        """Return the source of auctions, with these columns (default: all)."""
        return self._source(AUCTION, Auctions, columns, AUCTIONS)

    def bid(self, *columns: str) -> tg.Source:
        """Return the source of bids, with these columns (default: all)."""
        return self._source(BID, Bids, columns, BIDS)

    def rows(self, of_fifty: int) -> int:
        """Return how many records there are of a kind that has so many of 50 events."""
        return self.count // EVENTS * of_fifty

    def _source(self, ddl: str, make: type[_Make], columns: Sequence[str], of_fifty: int) -> tg.Source:
        declared = {each.split()[0]: each for each in ddl.split(", ")}
        chosen = tuple(columns) or tuple(declared)
        return tg.sources.generator(
            make(self, chosen),
            schema=", ".join(declared[name] for name in chosen),
            rows=self.rows(of_fifty),
            rate=None if self.seconds is None else self.rows(of_fifty) / self.seconds,
            splits=self.splits,
        )


@dataclass(frozen=True, slots=True)
class _Make:
    """Makes some columns of a range of one kind's records. Picklable, without state."""

    events: Events
    columns: tuple[str, ...]

    def __call__(self, split: int, start: int, count: int) -> dict[str, Any]:
        index = np.arange(start, start + count, dtype=np.int64)
        if self.events.splits > 1:
            index *= self.events.splits
            index += split
        return self.make(index)

    def make(self, index: Numbers) -> dict[str, Any]:
        """Return the columns of the records with these numbers, counted among those of their kind."""
        raise NotImplementedError

    def _time_us(self, number: Numbers) -> Numbers:
        return number * (1_000_000 // self.events.rate) + START_US

    def _bits(self, number: Numbers, use: int) -> Bits:
        """Return 64 random bits for each event number. `use` is another number for each use."""
        salt = (self.events.seed * 64 + use) * 0xD1B54A32D192ED03 & (2**64 - 1)
        bits = number.astype(np.uint64)
        bits *= np.uint64(0x9E3779B97F4A7C15)
        bits += np.uint64(salt)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits ^= bits >> np.uint64(shift)
            bits *= np.uint64(factor)
        bits ^= bits >> np.uint64(31)
        return bits

    def _text(self, table: pa.Array, number: Numbers, use: int) -> pa.Array:
        return table.take(pa.array(_below(self._bits(number, use), 0, 20, len(table))))


class Persons(_Make):
    """Makes persons."""

    def make(self, index: Numbers) -> dict[str, Any]:
        number = index * EVENTS
        made: dict[str, Any] = {}
        for name in self.columns:
            if name == "id":
                made[name] = index + FIRST_ID
            elif name == "date_time":
                made[name] = _timestamps(self._time_us(number))
            else:
                table = _person_texts()[name]
                made[name] = self._text(table, number, tuple(_person_texts()).index(name))
        return made


class Auctions(_Make):
    """Makes auctions."""

    def make(self, index: Numbers) -> dict[str, Any]:
        group = index // AUCTIONS
        number = group * (EVENTS - AUCTIONS) + index + 1
        bits = self._bits(number, 8)
        made: dict[str, Any] = {}
        for name in self.columns:
            if name == "id":
                made[name] = index + FIRST_ID
            elif name == "seller":
                hot = (bits & np.uint64(3)) > 0
                made[name] = np.where(hot, group // HOT_GROUP * HOT_GROUP, _person(group, bits)) + FIRST_ID
            elif name == "category":
                made[name] = _below(bits, 43, 16, CATEGORIES) + FIRST_CATEGORY
            elif name == "initial_bid":
                made[name] = _price(self._bits(number, 9))
            elif name == "reserve":
                made[name] = _price(self._bits(number, 9)) + _price(self._bits(number, 10))
            elif name == "date_time":
                made[name] = _timestamps(self._time_us(number))
            elif name == "expires":
                made[name] = _timestamps(self._time_us(number) + self._length_us(number))
            else:
                made[name] = self._text(_texts(name), number, 11 + ("item_name", "description", "extra").index(name))
        return made

    def _length_us(self, number: Numbers) -> Numbers:
        """On average it is the time in which as many auctions begin as are in flight."""
        average = AUCTIONS_IN_FLIGHT * EVENTS // AUCTIONS * (1_000_000 // self.events.rate)
        return _below(self._bits(number, 7), 0, 30, 2 * average) + 1


class Bids(_Make):
    """Makes bids."""

    def make(self, index: Numbers) -> dict[str, Any]:
        group = index // BIDS
        number = group * (EVENTS - BIDS) + index + (1 + AUCTIONS)
        wanted = frozenset(self.columns)
        made: dict[str, Any] = {}
        if wanted & {"auction", "bidder", "price"}:
            bits = self._bits(number, 0)
            if "auction" in wanted:
                made["auction"] = np.where(bits & np.uint64(1), *_auctions(group, bits)) + FIRST_ID
            if "bidder" in wanted:
                hot = (bits & np.uint64(6)) > 0
                made["bidder"] = np.where(hot, group // HOT_GROUP * HOT_GROUP + 1, _person(group, bits)) + FIRST_ID
            if "price" in wanted:
                made["price"] = _price(bits)
        if wanted & {"channel", "url"}:
            bits = self._bits(number, 1)
            hot = (bits & np.uint64(1)) > 0
            place = np.where(hot, _below(bits, 1, 2, len(HOT_CHANNELS)), _below(bits, 3, 32, CHANNELS) + len(HOT_CHANNELS))
            for name, table in zip(("channel", "url"), _channels(), strict=True):
                if name in wanted:
                    made[name] = table.take(pa.array(place))
        if "extra" in wanted:
            made["extra"] = self._text(_texts("bid_extra"), number, 2)
        if "date_time" in wanted:
            made["date_time"] = _timestamps(self._time_us(number))
        return made


def _below(bits: Bits, shift: int, width: int, limit: int) -> Numbers:
    """Return a number below the limit, from `width` of the bits."""
    drawn = bits >> np.uint64(shift)
    drawn &= np.uint64((1 << width) - 1)
    drawn *= np.uint64(limit)
    drawn >>= np.uint64(width)
    return drawn.view(np.int64)


def _person(group: Numbers, bits: Bits) -> Numbers:
    """Return one of the active persons, or of those that come next. `group` is the number of the last person."""
    active = np.minimum(group + 1, ACTIVE_PERSONS)
    return group + 1 - active + _scaled(bits, 3, active + LEAD)


def _auctions(group: Numbers, bits: Bits) -> tuple[Numbers, Numbers]:
    """Return the hot auction, and one of those in flight or of those that come next."""
    last = group * AUCTIONS + (AUCTIONS - 1)
    first = np.maximum(last - AUCTIONS_IN_FLIGHT, 0)
    return last // HOT_GROUP * HOT_GROUP, first + _scaled(bits, 23, last - first + (1 + LEAD))


def _scaled(bits: Bits, shift: int, limit: Numbers) -> Numbers:
    """Return a number below the limit, from 20 of the bits."""
    drawn = (bits >> np.uint64(shift)).view(np.int64)
    drawn &= (1 << 20) - 1
    drawn *= limit
    drawn >>= 20
    return drawn


def _price(bits: Bits) -> Numbers:
    """Return a price from 100 to 100,000,000, its logarithm being uniform; from the highest 21 of the bits."""
    coarse, fine = _price_tables()
    price: Numbers = np.rint(coarse[bits >> np.uint64(53)] * fine[(bits >> np.uint64(43)) & np.uint64(1023)]).astype(
        np.int64
    )
    return price


def _timestamps(us: Numbers) -> pa.Array:
    return pa.array(us).view(pa.timestamp("us", tz="UTC"))


@cache
def _price_tables() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """A price is the product of one number of each."""
    return 100.0 * 10.0 ** (np.arange(2048) * 6 / 2048), 10.0 ** (np.arange(1024) * 6 / 2048 / 1024)


@cache
def _channels() -> tuple[pa.Array, pa.Array]:
    """The channels and their addresses: first the hot ones. One address in ten has no channel's number."""
    random = np.random.default_rng(1)
    names = [*HOT_CHANNELS, *(f"channel-{number}" for number in range(CHANNELS))]
    urls = ["https://www.nexmark.com/" + "/".join([*_words(random, 3, 3, 5, "_"), "item.htm?query=1"]) for _ in names]
    for number in range(CHANNELS):
        if random.integers(10):
            urls[len(HOT_CHANNELS) + number] += f"&channel_id={int(f'{number:032b}'[::-1], 2) & 0x7FFFFFFF}"
    return pa.array(names), pa.array(urls)


@cache
def _texts(name: str) -> pa.Array:
    """The texts of a column, of the lengths that they have in the original."""
    shortest, longest = {
        "item_name": (3, 20),
        "description": (3, 100),
        "extra": (310, 470),  # of an auction, which is to have 500 bytes
        "bid_extra": (54, 82),
        "person_extra": (100, 150),
    }[name]
    return pa.array(_words(np.random.default_rng(len(name)), TEXTS, shortest, longest, " "))


@cache
def _person_texts() -> dict[str, pa.Array]:
    random = np.random.default_rng(2)
    first = ["Peter", "Paul", "Luke", "John", "Saul", "Vicky", "Kate", "Julie", "Sarah", "Deiter", "Walter"]
    last = ["Shultz", "Abrams", "Spencer", "White", "Bartels", "Walton", "Smith", "Jones", "Noris"]
    cities = [
        "Phoenix",
        "Los Angeles",
        "San Francisco",
        "Boise",
        "Portland",
        "Bend",
        "Redmond",
        "Seattle",
        "Kent",
        "Cheyenne",
    ]
    users, hosts = _words(random, TEXTS, 3, 7, "."), _words(random, TEXTS, 3, 5, "-")
    cards = random.integers(10_000, size=(TEXTS, 4))
    return {
        "name": pa.array([f"{one} {other}" for one in first for other in last]),
        "email_address": pa.array([f"{user}@{host}.com" for user, host in zip(users, hosts, strict=True)]),
        "credit_card": pa.array([" ".join(f"{part:04}" for part in card) for card in cards]),
        "city": pa.array(cities),
        "state": pa.array(["AZ", "CA", "ID", "OR", "WA", "WY"]),
        "extra": _texts("person_extra"),
    }


def _words(random: np.random.Generator, count: int, shortest: int, longest: int, between: str) -> list[str]:
    """Return texts of letters; one character in 13 is `between`."""
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz" * 12 + between * 26))
    lengths = random.integers(shortest, longest, size=count)
    return ["".join(random.choice(letters, size=length)) for length in lengths]


# The bounded table of q13: the row of key k is row k.
SIDE_INPUT = pa.array([f"value {key}" for key in range(10_000)])
