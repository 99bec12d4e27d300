"""Writing a piece of a snapshot from frozen state, on the background thread.

Theory of operation. A piece is a chain of files: a base with all of the state, and deltas with the changes since then. An
epoch builds on the newest complete epoch, which its marker names (`base`): its piece is the chain of that epoch and one more
delta, with everything that changed since. The changes of epochs that are not known to be complete are kept in memory. So the
next delta includes the changes of an aborted epoch, and no piece refers to a file of an epoch that may be aborted
(docs/promises.md, rows 1 and 2). The subtask goes by the marker, and not by the last completion that it received, because an
older chain may be deleted before the piece is listed.

Chains stay short. A layer with all of the state begins a new chain. When the deltas are half as large as the base, they are
merged with it into a new base; when there are many, they are merged with each other. Merging reads the files back.

Operator state is small and always written whole: only that of the last file of a chain counts.

A backend with native files (native.py) makes a piece of those instead, except at full epochs, whose pieces are rows that any
backend can restore. Of files that never change, only those that the base doesn't list are uploaded.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tidegate.keygroups import key_groups_of
from tidegate.snapshots.manifest import ROWS, Manifest, OperatorEntry, PieceEntry, StateEntry
from tidegate.snapshots.native import upload
from tidegate.snapshots.row_files import Chain, row_reader, write_rows
from tidegate.state.cutting import rested
from tidegate.state.format import StateFileReader
from tidegate.state.merging import LayerInMemory, merged_sections
from tidegate.state.operator_state import frozen_in
from tidegate.state.sections import FrozenFiles, FrozenState, Section, SectionReader, StateInfo, StateKind
from tidegate.store.base import Store
from tidegate.store.layout import state_file_name

MAX_DELTAS = 32
MAX_DELTA_SHARE = 0.5  # of the base, in bytes


class PieceWriter:
    """The writer of one operator's pieces in one subtask, epoch after epoch.

    `restored` is the epoch and the chain that the subtask was restored from, if its state is exactly that chain.
    """

    def __init__(
        self,
        operator: str,
        *,
        store: Store,
        attempt: int,
        subtask: int,
        parallelism: int,
        key_group_count: int,
        restored: tuple[int, Chain] | None = None,
    ) -> None:
        self._operator = operator
        self._store = store
        self._attempt = attempt
        self._subtask = subtask
        self._parallelism = parallelism
        self._key_group_count = key_group_count
        self._written: dict[int, Chain] = dict([restored]) if restored else {}
        self._pending: dict[int, LayerInMemory] = {}

    def write(self, frozen: FrozenState, *, epoch: int, base: int, full: bool) -> OperatorEntry:
        """Write the piece, and return the operator's entry with only this piece. `base` is the newest complete epoch when
        this one was triggered, or 0."""
        # A file has its sections in the order of the states. Keyed state is written first.
        states = sorted(frozen.states, key=lambda info: info.kind is not StateKind.KEYED)
        keyed = {info.name for info in states if info.kind is StateKind.KEYED}
        native, rest = _native_and_rest(frozen)
        counts: Counter[str] = Counter()
        items = _counted((part for part in rest if keyed.isdisjoint(info.name for info in part.states)), counts)
        self._written = {each: chain for each, chain in self._written.items() if each >= base}
        self._pending = {each: older for each, older in self._pending.items() if each > base}
        if native is not None:
            # The state may be larger than memory, so its rows are written as they are read.
            chain: Chain = () if full else self._upload(native, epoch=epoch, base=base)
            content: Iterable[Section] = itertools.chain(native.sections() if full else (), items)
        else:
            layer = LayerInMemory(
                (
                    section
                    for part in rest
                    if not keyed.isdisjoint(info.name for info in part.states)
                    for section in part.sections()
                ),
                key_group_count=self._key_group_count,
            )
            chain, layers = self._links(layer, complete=frozen.complete, base=base, full=full)
            if keyed:
                self._pending[epoch] = layer
            content = itertools.chain(self._merged(states, layers, with_deleted=bool(chain)), items)
        files = chain + write_rows(
            self._store, self._name(epoch), states, rested(iter(content)), key_group_count=self._key_group_count
        )
        self._written[epoch] = files
        # Without keyed state the key-groups mean nothing, and there may be more subtasks than groups.
        groups = (
            key_groups_of(self._subtask, parallelism=self._parallelism, key_group_count=self._key_group_count)
            if keyed
            else range(0)
        )
        piece = PieceEntry(
            subtask=self._subtask, key_groups=(groups.start, groups.stop), files=files, item_counts=dict(counts)
        )
        return OperatorEntry(
            parallelism=self._parallelism,
            states=tuple(StateEntry.of(info) for info in states),
            pieces=(piece,),
        )

    def _upload(self, native: FrozenFiles, *, epoch: int, base: int) -> Chain:
        there = {file.local: file for file in self._written.get(base, ()) if file.form != ROWS}
        return tuple(
            there[file.local]
            if file.immutable and file.local in there
            else upload(self._store, file, name=self._name(epoch, file.local))
            for file in native.files()
        )

    def _name(self, epoch: int, local: str = "") -> str:
        return state_file_name(
            attempt=self._attempt, operator=self._operator, subtask=self._subtask, epoch=epoch, local=local
        )

    def _links(self, layer: LayerInMemory, *, complete: bool, base: int, full: bool) -> tuple[Chain, list[SectionReader]]:
        """Return the part of the chain that stays, and the layers that are merged into its new last file."""
        if complete:
            return (), [layer]
        layers: list[SectionReader] = [*self._pending.values(), layer]
        chain = tuple(file for file in self._written.get(base, ()) if file.form == ROWS)
        delta_bytes = sum(file.bytes for file in chain[1:]) + layer.bytes
        if chain and (full or delta_bytes > MAX_DELTA_SHARE * chain[0].bytes):
            return (), [*self._readers(chain), *layers]
        if len(chain) > MAX_DELTAS:
            return chain[:1], [*self._readers(chain[1:]), *layers]
        return chain, layers

    def _merged(
        self, states: Sequence[StateInfo], layers: Sequence[SectionReader], *, with_deleted: bool
    ) -> Iterator[Section]:
        for info in states:
            if info.kind is StateKind.KEYED:
                yield from merged_sections(info, layers, key_group_count=self._key_group_count, with_deleted=with_deleted)

    def _readers(self, chain: Chain) -> list[StateFileReader]:
        return [row_reader(self._store, file) for file in chain]


def chain_to_continue(
    manifest: Manifest,
    operator: str,
    states: Sequence[StateInfo],
    *,
    subtask: int,
    parallelism: int,
    native: str | None = None,
) -> Chain | None:
    """Return the files that this same subtask wrote, if they hold exactly its state: nothing was rescaled, renamed or
    converted. `native` is the form of its backend's native files, if any."""
    entry = manifest.operators.get(operator)
    if entry is None or entry.parallelism != parallelism:
        return None
    now = {info.name: (info.kind.value, info.shape, info.schema) for info in states}
    if any(
        now.get(state.name) != (state.kind, state.shape, state.arrow_schema())
        for state in entry.states
        if state.kind == StateKind.KEYED.value
    ):
        return None
    files = entry.pieces[subtask].files
    if native is not None:
        return files if any(file.form == native for file in files) else None
    return files if all(file.form == ROWS for file in files) else None


def _counted(parts: Iterable[FrozenState], counts: Counter[str]) -> Iterator[Section]:
    """Yield operator state as it is read, and count its rows: a log of records in flight may be larger than memory."""
    for part in parts:
        for section in part.sections():
            if section.rows.num_rows:
                counts[section.state] += section.rows.num_rows
                yield section


def _native_and_rest(frozen: FrozenState) -> tuple[FrozenFiles | None, list[FrozenState]]:
    parts = frozen_in(frozen)
    native = next((part for part in parts if hasattr(part, "native") and isinstance(part, FrozenFiles)), None)
    return native, [part for part in parts if part is not native]
