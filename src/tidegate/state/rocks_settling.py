"""The work after a freeze of the RocksDB backend, on its own thread: frozen entries are written, and files are linked.

Theory of operation. A freeze takes the dictionaries of dirty entries away from the tables and starts a thread. The thread
writes the entries, makes RocksDB write its buffer to a file, and links the files in a new folder. As the loop writes nothing
to RocksDB until then, the folder holds the state as it was at the freeze, and nothing later. The loop finds the entries in
`frozen` of their table until RocksDB has them.

rocksdict holds the interpreter's lock while it writes a batch or links files, which would stop the loop. So entries are
written in small batches with rests between them (`Pace` of cutting.py), unless a caller is waiting. And the buffer is
written by `flush`, which releases the lock, so that the linking has nothing left to write. The linking then takes the disk a
few milliseconds, however large the state is.

Not here: when the loop has to wait (rocksdb.py).
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from tidegate.state.cutting import REST, Pace
from tidegate.state.rocks_cells import RocksTable, delete_all, put_all
from tidegate.state.rocks_db import link_files, rocksdict
from tidegate.state.rocks_folder import Folder
from tidegate.state.rocks_tables import FrozenRocksTables

# Entries that are sorted together are written faster. A batch takes about half a millisecond.
CHUNK_ENTRIES, BATCH_ENTRIES = 16_384, 1024


class Settling:
    """A freeze that is being written. `last` is a write-batch that follows all entries; then the files are linked in
    `place`, in `folder`."""

    def __init__(
        self,
        db: Any,
        tables: Sequence[RocksTable],
        columns: Sequence[FrozenRocksTables],
        last: Any,
        place: Path,
        folder: Folder,
    ) -> None:
        self._place = place
        self._folder = folder  # lives as long as this
        self._error: Exception | None = None
        self._hurried = False
        self._needed = True
        self.done = threading.Event()
        # Not `Thread.start`, which waits until the thread runs, while all cores may be busy.
        _thread.start_new_thread(self._run, (db, tables, columns, last))

    def wait(self) -> Path:
        """Wait until all is written, without rests; return where the files are."""
        self._hurried = True
        self.done.wait()
        if self._error is not None:
            raise self._error
        return self._place

    def discard(self) -> None:
        """Note that the files are not needed any more. The entries still are: the live state needs them."""
        self._needed = False
        self._folder.discard(self._place)

    def _run(self, db: Any, tables: Sequence[RocksTable], columns: Sequence[FrozenRocksTables], last: Any) -> None:
        try:
            self._folder.remove_discarded()
            for table in tables:
                self._write(db, table)
            pace = Pace(rest_factor=REST)
            for frozen in columns:
                frozen.write(lambda: None if self._hurried else pace.rest_if_due())
            db.write(last)
            if self._needed:
                db.flush()
                link_files(db, self._place)
            if not self._needed:
                self._folder.discard(self._place)  # it may have been made since it was discarded
        except Exception as error:  # noqa: BLE001  (`wait` raises it)
            self._error = error
        finally:
            self.done.set()

    def _write(self, db: Any, table: RocksTable) -> None:
        """Write a table's entries from the end, so that those that are written can be removed with `popitem`."""
        frozen = table.frozen
        pace = Pace(rest_factor=REST)
        while frozen:
            entries = list(islice(reversed(frozen.items()), CHUNK_ENTRIES))
            deleted, places, values = table.spelled_entries(entries)
            for start in range(0, max(len(deleted), len(places)), BATCH_ENTRIES):
                part = slice(start, start + BATCH_ENTRIES)
                batch = rocksdict.WriteBatch(raw_mode=True)
                delete_all(batch, deleted[part])
                put_all(batch, places[part], values[part])
                db.write(batch)
                if not self._hurried:
                    pace.rest_if_due()
            for _ in entries:
                frozen.popitem()
