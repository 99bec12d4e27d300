"""Which snapshot a micro-batch goes on from, and what is said where there is no such thing."""

from __future__ import annotations

import random

import pytest

from tidegate.errors import RestoreError
from tidegate.runtime.attempts import batch_before
from tidegate.runtime.exchange import Traffic
from tidegate.runtime.micro_batches import Stillness
from tidegate.store.catalog import SnapshotCatalog
from tidegate.store.manifest import Manifest, MicroBatch
from tidegate.store.memory import MemoryStore


def manifest(epoch: int, attempt: int, batch: int | None, query: str = "q") -> Manifest:
    return Manifest(job="j", epoch=epoch, attempt=attempt, created_ms=0, key_group_count=8, ending=None, operators={},
                    micro_batch=None if batch is None else MicroBatch(query, batch))


def before(number: int, *manifests: Manifest) -> int | None:
    found = batch_before(MicroBatch("q", number), manifests, store="memory://s")
    return None if found is None else found.epoch


def test_a_batch_goes_on_from_the_one_before_it() -> None:
    assert before(0) is None
    assert before(1, manifest(4, 1, 0)) == 4
    assert before(7, manifest(4, 1, 5), manifest(5, 1, 6)) == 5


def test_a_batch_that_runs_again_passes_its_own_snapshot_over() -> None:
    assert before(0, manifest(1, 1, 0)) is None
    assert before(6, manifest(4, 1, 5), manifest(5, 1, 6)) == 4


def test_whatever_else_is_there_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(RestoreError, match=r"goes on from the snapshot of micro-batch 4, and memory://s holds none"):
        before(5)
    with pytest.raises(RestoreError, match=r"has those of the micro-batches \[1, 2\]: state and stream would drift apart"):
        before(5, manifest(1, 1, 1), manifest(2, 1, 2))
    with pytest.raises(RestoreError, match=r"are of the query other\. .* start_from='memory://s'"):
        before(1, manifest(1, 1, 0, query="other"))
    with pytest.raises(RestoreError, match=r"are of a job that is no query"):
        before(0, manifest(1, 1, None))
    with pytest.raises(RestoreError, match=r"is at micro-batch 0, and its snapshots in memory://s are at 3"):
        before(0, manifest(1, 1, 2), manifest(2, 1, 3))


def test_what_an_attempt_passed_over_is_dead() -> None:
    store = MemoryStore()
    first = SnapshotCatalog(store)
    attempt = first.claim_attempt()
    for number in range(3):
        first.commit(manifest(number + 1, attempt, number))

    again = SnapshotCatalog(store)
    second = again.claim_attempt(choose=lambda found: batch_before(MicroBatch("q", 2), found, store="memory://s"))
    assert again.epochs() == [1, 2], "the snapshot of the batch that runs again doesn't count"
    again.sweep(second)
    assert len(store.list("manifests")) == 2
    again.commit(manifest(4, second, 2))
    assert [each.micro_batch for each in SnapshotCatalog(store).manifests()] == [MicroBatch("q", n) for n in range(3)]

    third = SnapshotCatalog(store)
    third.claim_attempt(choose=lambda found: None)
    assert third.epochs() == []


def test_a_manifest_tells_its_micro_batch_and_one_without_looks_as_ever() -> None:
    of_batch = manifest(3, 1, 7)
    assert Manifest.from_bytes(of_batch.to_bytes(), name="m") == of_batch
    assert b"micro_batch" not in manifest(3, 1, None).to_bytes()


class Ring:
    """Slots that send one another records, and answer when they get to it: what `Stillness` knows of a run."""

    def __init__(self, chance: random.Random, slots: int) -> None:
        self._chance = chance
        self._slots = [Traffic() for _ in range(slots)]
        self.under_way: list[int] = []                      # where they go
        self._replays = chance.randrange(3)                 # of the first slot
        self._asked: dict[int, int] = {}
        self._answers: dict[int, tuple[int, Traffic]] = {}
        for _ in range(5):
            self._send(0)

    @property
    def still(self) -> bool:
        return not self.under_way and not self._replays

    def probe(self, number: int) -> None:
        assert not self._asked, "one question at a time"
        self._asked = dict.fromkeys(range(len(self._slots)), number)

    def traffic(self, number: int) -> Traffic | None:
        answers = [traffic for asked, traffic in self._answers.values() if asked == number]
        return sum(answers, Traffic()) if len(answers) == len(self._slots) else None

    def step(self) -> None:
        """A record arrives, or an answer is given."""
        if self._asked and self._chance.random() < 0.5:
            slot = self._chance.choice(sorted(self._asked))
            replays = bool(slot == 0 and self._replays)
            self._answers[slot] = self._asked.pop(slot), self._slots[slot] + Traffic(replays=replays)
        elif self._replays and self._chance.random() < 0.1:
            self._replays -= 1
            self._send(0)
        elif self.under_way:
            slot = self.under_way.pop(self._chance.randrange(len(self.under_way)))
            self._slots[slot] += Traffic(taken=1)
            if self._chance.random() < 0.9:                 # else it leaves the loop
                self._send(slot)

    def _send(self, slot: int) -> None:
        self._slots[slot] += Traffic(sent=1)
        self.under_way.append(self._chance.randrange(len(self._slots)))


@pytest.mark.parametrize("seed", range(50))
def test_all_is_still_when_nothing_is_on_its_way_and_never_before(seed: int) -> None:
    chance = random.Random(seed)
    ring = Ring(chance, slots=chance.randint(1, 4))
    stillness = Stillness(ring)     # type: ignore[arg-type]
    for _ in range(100_000):
        if chance.random() < 0.3 and stillness.look():
            assert ring.still
            return
        ring.step()
    raise AssertionError("it was never noticed")
