"""Which snapshots there are, who may add to them, and what may be deleted: decided by names alone.

Theory of operation. Attempts are numbered by exclusive creates, so each number has one claimant, and the highest is the
current attempt. The check that one is current can't be made in one step with the create of a manifest, so a coordinator
that was stopped between the two could complete an epoch behind the back of its successor (docs/promises.md, rows 5 and
13). Two orders close that gap:

    committing:   create the manifest  → look whether a newer attempt was claimed (FencedOff if so)
    claiming:     create the attempt   → look which epoch is the newest complete one, and record it as the origin
                                       → look whether a newer attempt was claimed (FencedOff if so)

Whichever create comes second is followed by a look that sees the first. So an epoch whose commit returned is one that
every later attempt goes on from. An epoch whose commit ended in FencedOff was announced to nobody; the next attempt
either found it and goes on from it, or its origin says that it did not, and then no attempt after it does either. The
lineage of an attempt is its own manifests, then those of its origin's attempt up to the origin's epoch, and so on. What
is outside the lineage of the highest attempt is dead: not listed by `epochs`, not restored, deleted by `sweep`.

Deleting. A file is needed where a manifest of the lineage lists it. Nothing else is counted, so there is no count to
get wrong (rows 1 and 2). A new manifest lists only files that one of its lineage lists and files of its own attempt; so what
is unneeded once stays so, and a late delete by a fenced coordinator does no harm. Manifests go before their files.

Confirmed snapshots. An empty file notes that the output of a snapshot, and of all before it in its lineage, was committed.
It counts as long as its manifest does; the newest one stands for all.

An unreadable manifest is an error and never skipped (row 4): nothing is loaded past it, nothing is deleted beside it.
"""

from __future__ import annotations

import logging
import uuid
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from tidegate.errors import AlreadyExists, CorruptFile, FencedOff, NotFound, StoreError
from tidegate.store import layout
from tidegate.store.base import Store
from tidegate.store.checked import checked_chunks
from tidegate.store.claims import Claim, Program
from tidegate.store.layout import ManifestName, OriginName
from tidegate.store.manifest import Manifest
from tidegate.store.writable import unwritable

KEPT_ATTEMPTS = 10
"""How many claims `sweep` leaves. Several, so that a claimant that slept can't take a number a second time."""

REMEMBERED_DISCARDS = 100_000


_log = logging.getLogger(__name__)


class SnapshotCatalog:
    """The snapshots of one job. `claimant` tells this catalog's claims from others'; made up unless given. `program` says
    who claims, for whoever is fenced off by it."""

    def __init__(self, store: Store, *, claimant: str | None = None, program: Program | None = None) -> None:
        self._store = store
        self._program = program
        self._claimant = claimant if claimant is not None else uuid.uuid4().hex
        self._claims: dict[int, bytes] = {}
        self._newest_epoch = 0
        # Manifests never change, so what one lists is read once. `release` forgets those that are gone.
        self._listed_files: dict[ManifestName, frozenset[str]] = {}
        self._discarded: deque[str] = deque(maxlen=REMEMBERED_DISCARDS)
        self._confirmed: set[ManifestName] = set()  # those whose notes are ours to delete

    @property
    def store(self) -> Store:
        return self._store

    def claim_attempt(self, *, above: int = 0) -> int:
        """The number of a new attempt, higher than every one before and than `above`; it fences all of them.

        From now on `epochs` is what this attempt descends from. FencedOff where a newer attempt came in between.
        """
        attempt = self._create_claim(above)
        live = self._live_manifests()
        self._require_current(attempt)  # or the newest snapshot may be a later attempt's, which is no parent of ours
        parent = live[-1] if live else None
        parent_attempt, self._newest_epoch = (parent.attempt, parent.epoch) if parent else (0, 0)
        origin = OriginName(attempt=attempt, parent_attempt=parent_attempt, parent_epoch=self._newest_epoch)
        self._store.create(layout.origin_name(origin), b"")
        self._require_current(attempt)
        return attempt

    def attempts(self) -> list[int]:
        """Those that were claimed; the oldest may be forgotten."""
        parsed = map(layout.parse_attempt_name, self._store.list(layout.ATTEMPTS))
        return [attempt for attempt in parsed if attempt is not None]

    def is_current(self, attempt: int) -> bool:
        """Whether no newer attempt was claimed."""
        if attempt != max(self.attempts(), default=0):
            return False
        # Where the store's create is not quite exclusive, another claimant may have taken our number.
        claim = self._claims.get(attempt)
        return claim is None or self._store.read(layout.attempt_name(attempt)) == claim

    def is_superseded(self) -> bool:
        """Whether this catalog has claimed an attempt and somebody else a newer one."""
        newest = max(self.attempts(), default=0)
        if not self._claims or not newest:
            return False
        return newest not in self._claims or self._store.read(layout.attempt_name(newest)) != self._claims[newest]

    def taken_over(self, attempt: int) -> FencedOff:
        """The error of whoever finds that the attempt is over: who took it over, and what to do."""
        newest = max(self.attempts(), default=0)
        claim = self._claim(newest)
        whose = "the job" if self._program is None else f"job {self._program.job!r}"
        by = "" if claim is None else f": {claim.described}"
        if self._program is not None and claim is not None and claim.program == self._program:
            by = f": this very process started it once more, at {claim.at}"
        return FencedOff(
            f"attempt {attempt} is over: {whose} was taken over by another program of the same name and folder{by} "
            f"(attempt {newest} in {layout.shown(self._store.address)}). Give each its own name or folder, or stop one of "
            f"them"
        )

    def epochs(self) -> list[int]:
        """The complete epochs that the newest attempt can go on from, ascending."""
        return [manifest.epoch for manifest in self._live_manifests()]

    def manifests(self) -> list[Manifest]:
        """Those of `epochs`, verified."""
        return [self._read(manifest) for manifest in self._live_manifests()]

    def highest_epoch_seen(self) -> int:
        """No epoch above it was ever begun in a way that left a trace, complete, aborted or dead; 0 where none was."""
        manifests = (manifest.epoch for manifest in self._manifests())
        origins = (origin.parent_epoch for origin in self._origins().values())
        files = (
            parsed.epoch
            for name in self._store.list(layout.STATE)
            if (parsed := layout.parse_state_file_name(name)) is not None
        )
        return max((0, *manifests, *origins, *files))

    def load(self, epoch: int) -> Manifest:
        """The manifest, verified. NotFound where the epoch isn't complete, CorruptFile where it can't be believed."""
        for manifest in self._live_manifests():
            if manifest.epoch == epoch:
                return self._read(manifest)
        raise NotFound(f"epoch {epoch} is not a complete snapshot in {layout.shown(self._store.address)}")

    def verify(self, epoch: int) -> None:
        """Reads every file of the snapshot against its length and checksum; StoreError names the first that fails."""
        for file in self.load(epoch).files():
            size_bytes = self._store.size(file.name)
            if size_bytes != file.bytes:
                raise CorruptFile(f"{file.name} has {size_bytes} bytes; epoch {epoch} lists {file.bytes}")
            for _ in checked_chunks(self._store, file, listed_by=f"epoch {epoch}"):
                pass

    def commit(self, manifest: Manifest) -> None:
        """Completes the epoch. Only when this returns may anyone be told, and sinks commit.

        FencedOff where a newer attempt was claimed. After any other StoreError the outcome is unknown: the snapshot may
        be there, and is as good as any, but must not be announced; go on with a higher epoch. A manifest that lists what
        was discarded with an aborted epoch is not created at all (row 2).
        """
        gone = _names_in(manifest).intersection(self._discarded)
        if gone:
            raise NotFound(f"epoch {manifest.epoch} builds on {min(gone)}, which was deleted with an aborted epoch")
        assert manifest.epoch > self._newest_epoch, f"epoch {manifest.epoch} after {self._newest_epoch}"
        name = ManifestName(epoch=manifest.epoch, attempt=manifest.attempt)
        self._require_current(manifest.attempt)
        self._newest_epoch = manifest.epoch
        self._store.create(layout.manifest_name(epoch=name.epoch, attempt=name.attempt), manifest.to_bytes())
        self._listed_files[name] = _names_in(manifest)
        self._require_current(manifest.attempt)

    def confirm(self, epoch: int, *, attempt: int) -> None:
        """Notes that what this attempt's snapshot lists for sinks was committed, and so what those before it list."""
        name = ManifestName(epoch=epoch, attempt=attempt)
        self._require_current(attempt)
        with suppress(AlreadyExists):
            self._store.create(layout.committed_name(name), b"")
        self._forget_confirmed(self._confirmed - {name})
        self._confirmed.add(name)

    def is_confirmed(self, manifest: ManifestName) -> bool:
        """Whether everything that the snapshot lists for sinks is known to be committed."""
        noted, live = self._noted(), self._live_manifests()
        return manifest in live and any(each in live and each.epoch >= manifest.epoch for each in noted)

    def release(self, epochs: Collection[int], *, attempt: int) -> list[str]:
        """Deletes these snapshots, except what others share. Returns the names deleted; FencedOff if not current."""
        self._require_current(attempt)
        live = self._live_manifests()
        doomed = [manifest for manifest in live if manifest.epoch in epochs]
        assert not doomed or doomed[-1] != live[-1], "the newest snapshot is what a failure goes back to"
        kept = [manifest for manifest in live if manifest not in doomed]
        unneeded = self._files_listed_by(doomed) - self._files_listed_by(kept)
        self._forget_confirmed(self._confirmed.intersection(doomed))
        deleted = self._delete(doomed, unneeded)
        self._listed_files = {manifest: self._listed_files[manifest] for manifest in kept}
        return deleted

    def discard(self, files: Collection[str], *, attempt: int) -> list[str]:
        """Deletes state files of aborted epochs, except what a snapshot lists. The caller vouches that no manifest will
        list the others. Returns the names deleted; FencedOff if not current."""
        self._require_current(attempt)
        # Names may come from slots: whatever isn't a state file is not theirs to delete.
        state_files = {name for name in files if layout.parse_state_file_name(name) is not None}
        unneeded = state_files - self._files_listed_by(self._live_manifests())
        self._discarded.extend(unneeded)
        return self._delete((), unneeded)

    def sweep(self, current_attempt: int) -> list[str]:
        """Deletes what older attempts left: state files that no snapshot lists, dead manifests, old claims.

        Files of the current attempt may be in flight and stay. Returns the names deleted; FencedOff if not current.
        """
        self._require_current(current_attempt)
        # Files before manifests: one that a manifest is about to list is then either not seen here or seen there.
        files = self._store.list(layout.STATE)
        origins, manifests = self._origins(), self._manifests()
        live = lineage(origins, manifests)
        needed = self._files_listed_by(live)
        dead = [manifest for manifest in manifests if manifest not in live and manifest.attempt < current_attempt]
        left = {
            name
            for name in files
            if (parsed := layout.parse_state_file_name(name)) is not None and parsed.attempt < current_attempt
        }
        noted = self._noted()
        newest = max((each for each in noted if each in live), default=None)
        self._confirmed |= set() if newest is None else {newest}
        self._forget_confirmed(
            {each for each in noted if each != newest and (each in live or each.attempt < current_attempt)}
        )
        return self._delete(dead, left - needed) + self._prune_claims(current_attempt, live, origins)

    def _create_claim(self, above: int) -> int:
        while True:
            attempt = max(above, *self.attempts(), 0) + 1
            claim = Claim.now(attempt, self._claimant, self._program).to_bytes()
            self._claims[attempt] = claim  # before it is known: where the answer gets lost, the claim may be ours
            try:
                self._store.create(layout.attempt_name(attempt), claim)
            except AlreadyExists:
                del self._claims[attempt]
                continue
            except StoreError as error:
                raise StoreError(unwritable(self._store.address, error)) from error
            self._warn_of_the_one_before(attempt)
            return attempt

    def _warn_of_the_one_before(self, attempt: int) -> None:
        before = None if self._program is None else self._claim(attempt - 1)
        if before is None or before.program is None or not before.program.appears_alive():
            return
        _log.warning(
            "Attempt %d of job %r takes over from a program that is still there: %s. If it still runs the job, it "
            "ends with FencedOff.",
            attempt,
            before.program.job,
            before.described,
        )

    def _claim(self, attempt: int) -> Claim | None:
        """None if it can't be read: it is for messages only."""
        try:
            return Claim.from_bytes(self._store.read(layout.attempt_name(attempt))) if attempt > 0 else None
        except StoreError:
            return None

    def _require_current(self, attempt: int) -> None:
        if not self.is_current(attempt):
            raise self.taken_over(attempt)

    def _forget_confirmed(self, manifests: Iterable[ManifestName]) -> None:
        for manifest in sorted(manifests):
            self._store.delete(layout.committed_name(manifest))
            self._confirmed.discard(manifest)

    def _noted(self) -> list[ManifestName]:
        parsed = map(layout.parse_committed_name, self._store.list(layout.COMMITTED))
        return [manifest for manifest in parsed if manifest is not None]

    def _delete(self, manifests: Iterable[ManifestName], files: Iterable[str]) -> list[str]:
        names = [layout.manifest_name(epoch=manifest.epoch, attempt=manifest.attempt) for manifest in manifests]
        names += sorted(files)
        for name in names:
            self._store.delete(name)
        return names

    def _prune_claims(
        self, current_attempt: int, live: Iterable[ManifestName], origins: Mapping[int, OriginName]
    ) -> list[str]:
        # The lineage goes through the attempts of its manifests: their origins are needed and their numbers taken.
        oldest = min([current_attempt - KEPT_ATTEMPTS + 1, *(manifest.attempt for manifest in live)])
        claims = [layout.attempt_name(attempt) for attempt in self.attempts() if attempt < oldest]
        return self._delete((), claims + [layout.origin_name(o) for o in origins.values() if o.attempt < oldest])

    def _read(self, manifest: ManifestName) -> Manifest:
        name = layout.manifest_name(epoch=manifest.epoch, attempt=manifest.attempt)
        found = Manifest.from_bytes(self._store.read(name), name=name)
        if (found.epoch, found.attempt) != (manifest.epoch, manifest.attempt):
            raise CorruptFile(f"{name} holds the manifest of epoch {found.epoch}, attempt {found.attempt}")
        return found

    def _files_listed_by(self, manifests: Iterable[ManifestName]) -> frozenset[str]:
        names: frozenset[str] = frozenset()
        for manifest in manifests:
            if manifest not in self._listed_files:
                self._listed_files[manifest] = _names_in(self._read(manifest))
            names |= self._listed_files[manifest]
        return names

    def _live_manifests(self) -> list[ManifestName]:
        return lineage(self._origins(), self._manifests())

    def _origins(self) -> dict[int, OriginName]:
        parsed = map(layout.parse_origin_name, self._store.list(layout.ORIGINS))
        return {origin.attempt: origin for origin in parsed if origin is not None}

    def _manifests(self) -> list[ManifestName]:
        parsed = map(layout.parse_manifest_name, self._store.list(layout.MANIFESTS))
        return [manifest for manifest in parsed if manifest is not None]


def lineage(origins: Mapping[int, OriginName], manifests: Collection[ManifestName]) -> list[ManifestName]:
    """The manifests that the newest attempt descends from, ascending by epoch.

    An attempt whose origin is not known has no ancestors; one that left only manifests still counts, so that nothing
    complete is passed over because a file beside it is gone.
    """
    attempt = max([*origins, *(manifest.attempt for manifest in manifests)], default=0)
    below: int | None = None
    live: list[ManifestName] = []
    while attempt:
        live += [m for m in manifests if m.attempt == attempt and (below is None or m.epoch <= below)]
        origin = origins.get(attempt)
        if origin is None:
            break
        attempt, below = origin.parent_attempt, origin.parent_epoch
    return sorted(live)


def _names_in(manifest: Manifest) -> frozenset[str]:
    return frozenset(file.name for file in manifest.files())
