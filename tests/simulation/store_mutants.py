"""Mutants of the store, of state, of snapshots and of sinks. See mutant.py."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tests.simulation.mutant import RESTORES, Mutant
from tidegate.dataflow.operators import event_time, sink, source
from tidegate.driver import attempts, committing, coordinator, savepoints
from tidegate.errors import CommitError, CorruptFile
from tidegate.protocol import epoch_coordinator, recovery
from tidegate.slot import exchange
from tidegate.snapshots import catalog, writing
from tidegate.state import format as state_format
from tidegate.state import heap_layers, operator_state, timers
from tidegate.testing.simulation.faults import FaultRates

# ------------------------------------------------------------------------------------------- store and state


class _Agreeable(int):
    """A checksum that matches whatever it is compared with."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class _BlindZlib:
    @staticmethod
    def crc32(data: Any, value: int = 0) -> int:
        return _Agreeable(zlib.crc32(data, value))


def _decode_with_care(original: Any) -> Any:
    """Only so much that a wrong bit leads to wrong values and not to the end of the interpreter."""

    def decode(self: state_format.StateFileReader, position: int, message: memoryview) -> Any:
        rows = original(self, position, message)
        try:
            rows.validate(full=True)
        except pa.ArrowInvalid as error:
            raise CorruptFile(str(error)) from error
        return rows

    return decode


def _skip_what_is_unreadable(original: Any) -> Any:
    def load(self: catalog.SnapshotCatalog, epoch: int) -> Any:
        try:
            return original(self, epoch)
        except CorruptFile:
            older = [each for each in self.epochs() if each < epoch]
            return original(self, older[-1]) if older else original(self, epoch)

    return load


def _frozen_in_name_only(original: Any) -> Any:
    def freeze(self: heap_layers.LayeredTable) -> heap_layers.Layer:
        # And the loop goes on writing to it.
        return heap_layers.Layer(self.fresh, may_hold_gone=True, is_private=False, below=self.main)

    return freeze


def _no_queue(original: Any) -> Any:
    def load(self: timers.TimerQueue, batches: Any, *, known: bool) -> None:
        assert self.state is not None
        for _, rows in batches:
            self._backend.load(self.state, rows, known=known)

    return load


def _take_copies_in(original: Any) -> Any:
    def load(self: operator_state.UnionList, rows: Any) -> None:
        for row in rows.column("value").to_pylist():
            self._ids.append(row["id"])
            self.cells.extend(None, [row["item"]])

    return load


# ------------------------------------------------------------------------------------------ snapshots and sinks


def _commit_at_once(original: Any) -> Any:
    def freeze(self: sink.SinkOperator, epoch: int) -> Any:
        frozen = original(self, epoch)
        prepared = self._prepared[epoch]
        finish, writer = prepared._finish, self._writer

        def finish_and_commit() -> Sequence[str]:
            assert finish is not None and writer is not None
            committables = finish()
            writer.commit(committables)
            return committables

        prepared._finish = finish_and_commit
        return frozen

    return freeze


def _forget_aborted_output(original: Any) -> Any:
    def freeze(self: sink.SinkOperator, epoch: int) -> Any:
        self._take_finished()
        self._pending._pending.clear()
        self._prepared.clear()
        return original(self, epoch)

    return freeze


def _swallow_commit_errors(original: Any) -> Any:
    def on_complete(self: sink.SinkOperator, epoch: int) -> None:
        try:
            original(self, epoch)
        except CommitError:
            return

    return on_complete


def _discard_when_opened(original: Any) -> Any:
    def opened(self: sink.SinkOperator, context: Any) -> None:
        original(self, context)
        if context.subtask == 0 and self._writer is not None:
            self._writer.discard_leftovers()

    return opened


def _announce_early(original: Any) -> Any:
    def handle(self: epoch_coordinator.EpochCoordinator, event: Any) -> list[Any]:
        effects: list[Any] = []
        for effect in original(self, event):
            if isinstance(effect, epoch_coordinator.CreateManifest):
                effects.append(epoch_coordinator.NotifyComplete(effect.epoch, None))
            effects.append(effect)
        return effects

    return handle


def _discard_doubtful(original: Any) -> Any:
    def handle(self: epoch_coordinator.EpochCoordinator, event: Any) -> list[Any]:
        active = self._active
        effects: list[Any] = original(self, event)
        if isinstance(event, epoch_coordinator.ManifestFailed) and active is not None:
            effects.append(epoch_coordinator.Discard(tuple(active.payloads.values())))
        return effects

    return handle


def _delete_unasked(original: Any) -> Any:
    def discard(self: catalog.SnapshotCatalog, files: Any, *, attempt: int) -> list[str]:
        return self._delete((), files)

    return discard


def _items_rounded_down(original: Any) -> Any:
    def items_shares(pieces: Any, state: str, kind: Any, *, subtask: int, parallelism: int) -> Iterator[Any]:
        total = sum(piece.item_counts.get(state, 0) for piece in pieces)
        most = total // parallelism
        for share in original(pieces, state, kind, subtask=subtask, parallelism=parallelism):
            if kind is not recovery.StateKind.SPLIT or share.stop - share.start <= max(most, 1):
                yield share

    return items_shares


def _everybody_listens(original: Any) -> Any:
    return property(lambda self: self._final is None and self._gone_by_ms is None and not self.status.terminal)


def _groups_shifted(original: Any) -> Any:
    def key_groups_of(subtask: int, *, parallelism: int, key_group_count: int) -> range:
        groups: range = original(subtask, parallelism=parallelism, key_group_count=key_group_count)
        last = subtask == parallelism - 1
        return range(groups.start + (subtask > 0), groups.stop + (not last))

    return key_groups_of


def _one_slot_speaks_for_all(original: Any) -> Any:
    def on_committed(self: committing.Commits, slot: int, epoch: int) -> None:
        for each in range(len(self._by_slot)):
            original(self, each, epoch)

    return on_committed


# ------------------------------------------------------------------------------------------------ chains and savepoints


def _release_what_others_share(original: Any) -> Any:
    def release(self: catalog.SnapshotCatalog, epochs: Any, *, attempt: int) -> Any:
        doomed = [manifest for manifest in self.live_manifests() if manifest.epoch in epochs]
        return self._delete(doomed, self._files_listed_by(doomed))

    return release


def _build_on_the_last_one_written(original: Any) -> Any:
    def write(self: writing.PieceWriter, frozen: Any, *, epoch: int, base: int, full: bool) -> Any:
        return original(self, frozen, epoch=epoch, base=max([base, *self._written]), full=full)

    return write


def _look_for_nothing(_: Any) -> Any:
    """Or the catalogue would notice that a manifest lists what was discarded, and refuse it."""

    return lambda *args, **options: None


def _forget_changes(original: Any) -> Any:
    def write(self: writing.PieceWriter, frozen: Any, **rest: Any) -> Any:
        written = original(self, frozen, **rest)
        self._pending.clear()
        return written

    return write


def _supersede(original: Any) -> Any:
    def copied(self: savepoints.SavepointRequests, order: Any, info: Any, error: Any) -> None:
        original(self, order, info, error)
        if info is not None:
            self._release([info.epoch])  # it is in the savepoint, isn't it

    return copied


# -------------------------------------------------------------------------------------------------------- event time


def _forget_watermarks(original: Any) -> Any:
    def load(self: event_time.OperatorTime, batches: Any) -> None:
        """It begins again with the records."""

    return load


STORE_MUTANTS = (
    Mutant(
        "release what others share",
        "a snapshot that goes takes files of others with it",
        row=1,
        patches=((catalog.SnapshotCatalog, "release", _release_what_others_share),),
    ),
    Mutant(
        "build on the last one written",
        "increments build on a snapshot that was aborted",
        row=2,
        rates=FaultRates(kinds=("store fails", "slot dies"), store_error=0.05),
        patches=(
            (writing.PieceWriter, "write", _build_on_the_last_one_written),
            (catalog, "require_present", _look_for_nothing),
        ),
    ),
    Mutant(
        "forget changes",
        "what changed in an aborted epoch is in no later snapshot",
        rates=FaultRates(kinds=("store fails", "slot dies"), store_error=0.05),
        patches=((writing.PieceWriter, "write", _forget_changes),),
    ),
    Mutant(
        "savepoints supersede",
        "the snapshot that a savepoint was made of is dropped",
        row=3,
        patches=((savepoints.SavepointRequests, "_copied", _supersede),),
    ),
    Mutant(
        "deleted keys come back",
        "a delta doesn't say what was deleted",
        job="windows",
        patches=(
            (
                writing,
                "merged_sections",
                lambda original: lambda *what, with_deleted, **rest: original(*what, with_deleted=False, **rest),
            ),
        ),
    ),
    Mutant(
        "restored state is known",
        "the first snapshot after a rescaling lacks what was restored",
        rates=RESTORES,
        patches=(
            (
                heap_layers.LayeredTable,
                "load",
                lambda original: lambda self, keys, values, known: original(self, keys, values, known=True),
            ),
        ),
    ),
    Mutant(
        "names without attempt",
        "two attempts write one file",
        row=13,
        patches=((writing, "state_file_name", lambda original: lambda **name: original(**{**name, "attempt": 1})),),
    ),
    Mutant(
        "no fencing",
        "an attempt that is over completes snapshots",
        row=13,
        patches=((catalog.SnapshotCatalog, "_require_current", lambda original: lambda self, attempt: None),),
    ),
    Mutant(
        "no checksums",
        "what was read is believed",
        row=14,
        rates=FaultRates(kinds=("slot dies", "function raises"), flip=0.1),
        patches=(
            (state_format, "zlib", lambda original: _BlindZlib),
            (state_format.StateFileReader, "_decode", _decode_with_care),
        ),
    ),
    Mutant(
        "another hash in the exchange",
        "records and state go by different hashes",
        row=15,
        patches=((exchange, "hash_columns", lambda original: lambda columns: original(columns) ^ np.int64(1)),),
    ),
    Mutant(
        "shifted ranges",
        "a restore reads ranges that are off by one",
        row=15,
        patches=((recovery, "key_groups_of", _groups_shifted),),
    ),
    Mutant(
        "commit at once", "a sink commits when it has prepared", patches=((sink.SinkOperator, "freeze", _commit_at_once),)
    ),
    Mutant(
        "announce early",
        "an epoch is announced before its manifest is there",
        patches=((epoch_coordinator.EpochCoordinator, "handle", _announce_early),),
    ),
    Mutant(
        "forget aborted output",
        "what an aborted epoch has written is dropped",
        patches=((sink.SinkOperator, "freeze", _forget_aborted_output),),
    ),
    Mutant(
        "restore an older snapshot",
        "not the newest complete snapshot is restored",
        row=4,
        patches=((attempts, "newest_complete", lambda original: lambda epochs: sorted(epochs)[-2:][0] if epochs else None),),
    ),
    Mutant(
        "skip what is unreadable",
        "an unreadable manifest leads to an older snapshot",
        row=4,
        rates=FaultRates(kinds=("bit flips", "coordinator dies"), most_faults=40),
        patches=((catalog.SnapshotCatalog, "load", _skip_what_is_unreadable),),
    ),
    Mutant(
        "swallow commit errors",
        "an unknown outcome is taken for success",
        row=9,
        rates=FaultRates(outage=0.2),
        patches=((sink.SinkOperator, "on_complete", _swallow_commit_errors),),
    ),
    Mutant(
        "one slot speaks for all",
        "output that one slot has committed is said to be committed by all",
        row=9,
        patches=((committing.Commits, "on_committed", _one_slot_speaks_for_all),),
    ),
    Mutant(
        "discard when opened",
        "leftovers are given up before all has been committed again",
        row=11,
        rates=RESTORES,
        patches=((sink.SinkOperator, "open", _discard_when_opened),),
    ),
    Mutant(
        "items rounded down",
        "operator state that can't be dealt out evenly is lost",
        row=11,
        rates=RESTORES,
        job="hands",
        patches=((recovery, "_items_shares", _items_rounded_down),),
    ),
    Mutant(
        "discard the doubtful",
        "files of a manifest that may exist are deleted",
        row=2,
        rates=FaultRates(kinds=("store fails", "slot dies"), store_error=0.05),
        patches=(
            (epoch_coordinator.EpochCoordinator, "handle", _discard_doubtful),
            (catalog.SnapshotCatalog, "discard", _delete_unasked),
        ),
    ),
    Mutant(
        "union state grows",
        "every copy of an item is taken in as one more",
        row=16,
        rates=RESTORES,
        job="hands",
        patches=((operator_state.UnionList, "load", _take_copies_in),),
    ),
    Mutant(
        "shared containers",
        "a list that a snapshot is written of is changed in place",
        job="windows",
        patches=((heap_layers.DoubledTable, "owned", lambda original: lambda self, key: True),),
    ),
    Mutant(
        "frozen in name only",
        "state goes on changing while it is written",
        patches=((heap_layers.LayeredTable, "freeze", _frozen_in_name_only),),
    ),
    Mutant(
        "timers forgotten",
        "restored timers never fire",
        rates=RESTORES,
        job="windows",
        patches=((timers.TimerQueue, "load", _no_queue),),
    ),
    Mutant(
        "watermarks not restored",
        "event time begins again after a restore",
        rates=RESTORES,
        job="windows",
        patches=(
            (event_time.OperatorTime, "load", _forget_watermarks),
            (source.WatermarkOperator, "_latest_restored", lambda original: lambda self, context: {}),
        ),
    ),
    Mutant(
        "one watermark for all splits",
        "what is in order in its split is late in the stream",
        job="windows",
        patches=((source.WatermarkOperator, "follow", lambda original: lambda self, splits: None),),
    ),
    Mutant(
        "old links are heard",
        "the loss of an old link fails the attempt that is being opened",
        patches=((coordinator.Coordinator, "_listens", _everybody_listens),),
    ),
)
