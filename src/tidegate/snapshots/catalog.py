"""The catalog: which snapshots exist, who may add to them, and what may be deleted. It decides by file names alone.

Theory of operation. Attempts are numbered by exclusive creates, so each number has one claimant. The highest number is the
current attempt. Checking that an attempt is current and creating a manifest are two steps, so a coordinator that was
suspended between them could complete an epoch that its successor doesn't know about (docs/promises.md, rows 5 and 13). Two
orders close that gap:

    committing:   create the manifest  → look whether a newer attempt was claimed (FencedOff if so)
    claiming:     create the attempt   → look which epoch is the newest complete one, and record it as the origin
                                       → look whether a newer attempt was claimed (FencedOff if so)

Whichever create comes second is followed by a look that sees the first. So if the commit of an epoch returned, every
later attempt resumes from that epoch or a later one. If the commit ended in FencedOff, the epoch was announced to nobody:
either the next attempt found it and resumes from it, or the origin of that attempt excludes it for all later attempts too.
The lineage of an attempt is its own manifests, then those of its origin's attempt up to the origin's epoch, and so on. A
manifest outside the lineage of the highest attempt is dead: `epochs` doesn't list it, no attempt restores it, and `sweep`
deletes it.

Deleting. A file is needed if a manifest of the lineage lists it. There are no reference counts that could be wrong (rows 1
and 2). A new manifest lists only files of its own attempt and files that a manifest of its lineage lists. So a file that is
not needed will not be needed later, and a late delete by a fenced coordinator is harmless. Manifests are deleted before
their files.

Confirmed snapshots. An empty file notes that the output of a snapshot, and of every snapshot before it in its lineage, was
committed. The note is valid as long as its manifest is. The newest note implies all older ones.

A store that has lost the newest snapshot that this catalog knows of, because its folder was emptied or isn't mounted, is an
error: nothing begins again, and nothing is deleted.

An unreadable manifest is an error and is never skipped (row 4): nothing older is loaded instead. As long as it is in the
lineage, no file is deleted, since it may list any of them. If it is older than the newest snapshot, it stops no start. It
goes when it is superseded (`retire`), and the next attempt's sweep deletes the files that it alone has listed.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial

from tidegate.errors import AlreadyExists, CorruptFile, FencedOff, JobError, NotFound, StoreError
from tidegate.snapshots.claims import Claim, Program
from tidegate.snapshots.manifest import Manifest
from tidegate.snapshots.presence import require_present
from tidegate.store import layout
from tidegate.store.base import ObjectStore, Store
from tidegate.store.checked import checked_chunks
from tidegate.store.layout import ManifestName, OriginName
from tidegate.store.writable import unwritable

KEPT_ATTEMPTS = 10
"""How many claims `sweep` keeps. With several, a claimant that was suspended can't take a number a second time."""

_log = logging.getLogger(__name__)


class SnapshotCatalog:
    """The snapshots of one job. `claimant` identifies this catalog's claims; by default it is random. `program` says who
    claims, for the messages of drivers that are fenced off."""

    def __init__(self, store: Store, *, claimant: str | None = None, program: Program | None = None) -> None:
        self.store = store
        self._program = program
        self._claimant = claimant if claimant is not None else uuid.uuid4().hex
        self._claims: dict[int, set[bytes]] = {}  # those that this catalog has tried to create, by attempt
        self._newest_epoch = 0
        self._newest_complete = 0  # that this catalog knows of: later attempts resume from it or from a later one
        # Manifests never change, so each is read once. `release` forgets those that it deleted.
        self._listed_files: dict[ManifestName, frozenset[str]] = {}
        self._present: frozenset[str] = frozenset()  # files of the newest snapshot: they were there when it was completed
        self._confirmed: set[ManifestName] = set()  # the notes that this catalog may delete

    def claim_attempt(self, *, above: int = 0) -> int:
        """Claim a new attempt, and return its number: higher than all earlier ones, which it fences, and than `above`.

        From now on, `epochs` lists what this attempt descends from. FencedOff if a newer attempt was claimed meanwhile.
        """
        attempt = self._create_claim(above)
        live = self.live_manifests()
        self._require_current(attempt)  # otherwise the newest snapshot may be a later attempt's, which can't be our parent
        parent = live[-1] if live else None
        parent_attempt, self._newest_epoch = (parent.attempt, parent.epoch) if parent else (0, 0)
        origin = OriginName(attempt=attempt, parent_attempt=parent_attempt, parent_epoch=self._newest_epoch)
        self.store.create(layout.origin_name(origin), b"")
        self._require_current(attempt)
        self._newest_complete = self._newest_epoch
        return attempt

    def attempts(self) -> list[int]:
        """Return the claimed attempts. `sweep` forgets the oldest."""
        parsed = map(layout.parse_attempt_name, self.store.list(layout.ATTEMPTS))
        return [attempt for attempt in parsed if attempt is not None]

    def is_current(self, attempt: int) -> bool:
        """Return whether no newer attempt was claimed."""
        if attempt != max(self.attempts(), default=0):
            return False
        # If the store's create is not quite exclusive, another claimant may have taken our number.
        return attempt not in self._claims or self._is_ours(attempt)

    def is_superseded(self) -> bool:
        """Return whether this catalog has claimed an attempt and another claimant a newer one."""
        newest = max(self.attempts(), default=0)
        if not self._claims or not newest:
            return False
        return newest not in self._claims or not self._is_ours(newest)

    def taken_over(self, attempt: int) -> FencedOff | StoreError:
        """Return the error for an attempt that is over: who took the job over, and what to do. StoreError if nobody did."""
        newest = max(self.attempts(), default=0)
        if newest < attempt:
            return self._gone(f"attempt {attempt}")
        claim = self._claim(newest)
        whose = "the job" if self._program is None else f"job {self._program.job!r}"
        by = "" if claim is None else f": {claim.described}"
        if self._program is not None and claim is not None and claim.program == self._program:
            by = f": this same process started it again, at {claim.at}"
        return FencedOff(
            f"attempt {attempt} is over: {whose} was taken over by another program of the same name and folder{by} "
            f"(attempt {newest} in {layout.shown(self.store.address)}). Give each its own name or folder, or stop one of "
            f"them"
        )

    def live_manifests(self) -> list[ManifestName]:
        """Return the complete snapshots that the newest attempt can resume from, ascending by epoch."""
        return self._live(self._origins(), self._manifests())

    def epochs(self) -> list[int]:
        """Return the complete epochs that the newest attempt can resume from, ascending."""
        return [manifest.epoch for manifest in self.live_manifests()]

    def manifests(self) -> list[Manifest]:
        """Return the manifests of `epochs`, verified."""
        return [read_manifest(self.store, _file_of(manifest)) for manifest in self.live_manifests()]

    def intact_manifests(self) -> tuple[list[Manifest], list[CorruptFile]]:
        """Return the manifests of `epochs` that aren't damaged, verified, and an error for each of the others."""
        intact, damaged = [], []
        for manifest in self.live_manifests():
            try:
                intact.append(read_manifest(self.store, _file_of(manifest)))
            except CorruptFile as error:
                damaged.append(error)
        return intact, damaged

    def highest_epoch_seen(self) -> int:
        """Return the highest epoch that left a trace, be it complete, aborted or dead; 0 if none did."""
        manifests = (manifest.epoch for manifest in self._manifests())
        origins = (origin.parent_epoch for origin in self._origins().values())
        files = (
            parsed.epoch
            for name in self.store.list(layout.STATE)
            if (parsed := layout.parse_state_file_name(name)) is not None
        )
        return max((0, *manifests, *origins, *files))

    def load(self, epoch: int) -> Manifest:
        """Return the manifest, verified. NotFound if the epoch isn't complete, CorruptFile if the manifest is damaged."""
        for manifest in self.live_manifests():
            if manifest.epoch == epoch:
                return read_manifest(self.store, _file_of(manifest))
        raise NotFound(f"epoch {epoch} is not a complete snapshot in {layout.shown(self.store.address)}")

    def verify(self, epoch: int) -> None:
        """Check the length and checksum of every file of the snapshot; StoreError names the first file that fails."""
        for file in self.load(epoch).files():
            size_bytes = self.store.size(file.name)
            if size_bytes != file.bytes:
                raise CorruptFile(f"{file.name} has {size_bytes} bytes; epoch {epoch} lists {file.bytes}")
            for _ in checked_chunks(self.store, file, listed_by=f"epoch {epoch}"):
                pass

    def commit(self, manifest: Manifest) -> None:
        """Complete the epoch. Announce the snapshot, and let sinks commit, only after this returns.

        Every file that the snapshot before didn't list must be in the store, with its length, as this process sees the
        store; one that was discarded with an aborted epoch is not (row 2). FencedOff if a newer attempt was claimed. After
        any other StoreError the outcome is unknown: the snapshot may exist and is then valid, but must not be announced;
        continue with a higher epoch.
        """
        assert manifest.epoch > self._newest_epoch, f"epoch {manifest.epoch} after {self._newest_epoch}"
        name = ManifestName(epoch=manifest.epoch, attempt=manifest.attempt)
        self._require_current(manifest.attempt)
        self._require_present(manifest)
        self._newest_epoch = manifest.epoch
        self.store.create(_file_of(name), manifest.to_bytes())
        self._listed_files[name] = self._present = _names_in(manifest)
        self._require_current(manifest.attempt)
        self._newest_complete = manifest.epoch

    def confirm(self, epoch: int, *, attempt: int) -> None:
        """Note that the committables of this attempt's snapshot, and of all snapshots before it, were committed."""
        name = ManifestName(epoch=epoch, attempt=attempt)
        self._require_current(attempt)
        with suppress(AlreadyExists):
            self.store.create(layout.committed_name(name), b"")
        self._forget_confirmed(self._confirmed - {name})
        self._confirmed.add(name)

    def is_confirmed(self, manifest: ManifestName) -> bool:
        """Return whether all committables of the snapshot are known to be committed."""
        noted, live = self._noted(), self.live_manifests()
        return manifest in live and any(each in live and each.epoch >= manifest.epoch for each in noted)

    def release(self, epochs: Collection[int], *, attempt: int) -> list[str]:
        """Delete these snapshots, except files that others list. Return the deleted names; FencedOff if not current."""
        self._require_current(attempt)
        live = self.live_manifests()
        doomed = [manifest for manifest in live if manifest.epoch in epochs]
        assert not doomed or doomed[-1] != live[-1], "a failure rolls back to the newest snapshot"
        kept = [manifest for manifest in live if manifest not in doomed]
        # A release that failed has perhaps deleted the manifest, and not all of its files.
        begun = [manifest for manifest in self._listed_files if manifest.epoch in epochs and manifest not in live]
        unneeded = self._files_listed_by([*doomed, *begun]) - self._files_listed_by(kept)
        self._forget_confirmed(self._confirmed.intersection(doomed))
        deleted = self._delete(doomed, unneeded)
        self._listed_files = {manifest: self._listed_files[manifest] for manifest in kept}
        return deleted

    def retire(self, epochs: Collection[int], *, attempt: int) -> list[str]:
        """Release these snapshots, also those whose manifests are damaged. Nobody knows which files such a manifest has
        listed, so only the manifest is deleted now."""
        self._require_current(attempt)
        deleted = []
        for manifest in self.live_manifests()[:-1]:
            if manifest.epoch in epochs:
                try:
                    self._files_listed_by([manifest])
                except CorruptFile as error:
                    _log.warning(
                        "The manifest of epoch %d, which is not needed any more, is damaged and is deleted: %s. Files that "
                        "it alone has listed are deleted when the job is started again",
                        manifest.epoch,
                        error,
                    )
                    self._forget_confirmed(self._confirmed.intersection([manifest]))
                    deleted += self._delete([manifest], ())
        return deleted + self.release(epochs, attempt=attempt)

    def discard(self, files: Collection[str], *, attempt: int) -> list[str]:
        """Delete state files of aborted epochs, except those that a snapshot lists. The caller guarantees that no later
        manifest lists the deleted ones. Return the deleted names; FencedOff if not current."""
        self._require_current(attempt)
        # Names come from slots, which may delete state files only.
        state_files = {name for name in files if layout.parse_state_file_name(name) is not None}
        unneeded = state_files - self._files_listed_by(self.live_manifests())
        return self._delete((), unneeded)

    def sweep(self, current_attempt: int) -> list[str]:
        """Delete what older attempts left: state files that no snapshot lists or that are incomplete, dead manifests, old
        claims.

        Files of the current attempt stay, since a manifest may still list them. Return the deleted names; FencedOff if not
        current.
        """
        self._require_current(current_attempt)
        # List files before manifests: then a file whose manifest is just being created is either not seen, or needed.
        files = self.store.list(layout.STATE)
        origins, manifests = self._origins(), self._manifests()
        live = self._live(origins, manifests)
        needed = self._files_listed_by(live)
        dead = [manifest for manifest in manifests if manifest not in live and manifest.attempt < current_attempt]
        stale = {name for name in files if _is_older(current_attempt, name)}
        noted = self._noted()
        newest = max((each for each in noted if each in live), default=None)
        self._confirmed |= set() if newest is None else {newest}
        self._forget_confirmed(
            {each for each in noted if each != newest and (each in live or each.attempt < current_attempt)}
        )
        if isinstance(self.store, ObjectStore):
            self.store.remove_uploads(partial(_is_older, current_attempt))
        return self._delete(dead, stale - needed) + self._prune_claims(current_attempt, live, origins)

    def _create_claim(self, above: int) -> int:
        while True:
            attempt = max(above, *self.attempts(), 0) + 1
            claim = Claim.now(attempt, self._claimant, self._program).to_bytes()
            # Before the create: if its answer gets lost, the claim may be there, now or after the next try.
            self._claims.setdefault(attempt, set()).add(claim)
            try:
                self.store.create(layout.attempt_name(attempt), claim)
            except AlreadyExists:
                continue
            except StoreError as error:
                raise StoreError(unwritable(self.store.address, error)) from error
            self._warn_of_running_program(attempt)
            return attempt

    def _warn_of_running_program(self, attempt: int) -> None:
        before = None if self._program is None else self._claim(attempt - 1)
        if before is None or before.program is None or not before.program.appears_alive():
            return
        _log.warning(
            "Attempt %d of job %r takes over from a program that is still running: %s. If it still runs the job, it "
            "ends with FencedOff.",
            attempt,
            before.program.job,
            before.described,
        )

    def _claim(self, attempt: int) -> Claim | None:
        """Return the claim, which is for messages only; None if it can't be read."""
        try:
            return Claim.from_bytes(self.store.read(layout.attempt_name(attempt))) if attempt > 0 else None
        except StoreError:
            return None

    def _is_ours(self, attempt: int) -> bool:
        return self.store.read(layout.attempt_name(attempt)) in self._claims[attempt]

    def _require_current(self, attempt: int) -> None:
        if not self.is_current(attempt):
            raise self.taken_over(attempt)

    def _live(self, origins: Mapping[int, OriginName], manifests: Collection[ManifestName]) -> list[ManifestName]:
        """Return the lineage. StoreError if it lacks a snapshot that this catalog knows of, and which is never deleted."""
        live = lineage(origins, manifests)
        if self._newest_complete > (live[-1].epoch if live else 0):
            raise self._gone(f"epoch {self._newest_complete}")
        return live

    def _gone(self, what: str) -> StoreError:
        return StoreError(
            f"{what} is gone from {layout.shown(self.store.address)}: the folder was emptied, or isn't mounted any more. A "
            f"job that began again without it would repeat its output"
        )

    def _require_present(self, manifest: Manifest) -> None:
        try:
            require_present(self.store, manifest, known=self._present)
        except (StoreError, JobError):
            self._require_current(manifest.attempt)  # the sweep of a newer attempt may have deleted the file
            raise

    def _forget_confirmed(self, manifests: Iterable[ManifestName]) -> None:
        for manifest in sorted(manifests):
            self.store.delete(layout.committed_name(manifest))
            self._confirmed.discard(manifest)

    def _noted(self) -> list[ManifestName]:
        parsed = map(layout.parse_committed_name, self.store.list(layout.COMMITTED))
        return [manifest for manifest in parsed if manifest is not None]

    def _delete(self, manifests: Iterable[ManifestName], files: Iterable[str]) -> list[str]:
        names = [_file_of(manifest) for manifest in manifests]
        names += sorted(files)
        for name in names:
            self.store.delete(name)
        return names

    def _prune_claims(
        self, current_attempt: int, live: Iterable[ManifestName], origins: Mapping[int, OriginName]
    ) -> list[str]:
        # The lineage needs the claims and origins of the attempts that its manifests are of.
        oldest = min([current_attempt - KEPT_ATTEMPTS + 1, *(manifest.attempt for manifest in live)])
        claims = [layout.attempt_name(attempt) for attempt in self.attempts() if attempt < oldest]
        return self._delete((), claims + [layout.origin_name(o) for o in origins.values() if o.attempt < oldest])

    def _files_listed_by(self, manifests: Iterable[ManifestName]) -> frozenset[str]:
        names: frozenset[str] = frozenset()
        for manifest in manifests:
            if manifest not in self._listed_files:
                self._listed_files[manifest] = _names_in(read_manifest(self.store, _file_of(manifest)))
            names |= self._listed_files[manifest]
        return names

    def _origins(self) -> dict[int, OriginName]:
        parsed = map(layout.parse_origin_name, self.store.list(layout.ORIGINS))
        return {origin.attempt: origin for origin in parsed if origin is not None}

    def _manifests(self) -> list[ManifestName]:
        parsed = map(layout.parse_manifest_name, self.store.list(layout.MANIFESTS))
        return [manifest for manifest in parsed if manifest is not None]


def lineage(origins: Mapping[int, OriginName], manifests: Collection[ManifestName]) -> list[ManifestName]:
    """Return the manifests that the newest attempt descends from, ascending by epoch.

    An attempt whose origin is unknown has no ancestors. An attempt that left only manifests still counts, so that no
    complete snapshot is ignored because another file is missing.
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


def read_manifest(store: Store, name: str) -> Manifest:
    """Return the manifest of a snapshot or savepoint, verified."""
    manifest = Manifest.from_bytes(store.read(name), name=name)
    if name == layout.SAVEPOINT:
        if manifest.savepoint is None:
            raise CorruptFile(f"{name} in {layout.shown(store.address)} is not the manifest of a savepoint")
    elif layout.parse_manifest_name(name) != ManifestName(epoch=manifest.epoch, attempt=manifest.attempt):
        raise CorruptFile(f"{name} holds the manifest of epoch {manifest.epoch}, attempt {manifest.attempt}")
    return manifest


def _file_of(manifest: ManifestName) -> str:
    return layout.manifest_name(epoch=manifest.epoch, attempt=manifest.attempt)


def _is_older(attempt: int, name: str) -> bool:
    """Return whether this is the name of a state file of an older attempt."""
    parsed = layout.parse_state_file_name(name)
    return parsed is not None and parsed.attempt < attempt


def _names_in(manifest: Manifest) -> frozenset[str]:
    return frozenset(file.name for file in manifest.files())
