"""What follows a freeze of the RocksDB backend, on a thread of its own: the frozen entries are written, and files linked.

Theory of operation. A freeze takes the dictionaries of dirty entries away from the tables and starts a thread. That writes
them, has RocksDB write its buffer to a file, and links the files in a new folder. As the loop writes nothing to RocksDB
until then, the folder holds the state as it was at the freeze, and nothing that came later. The loop finds the entries in
`frozen` of their table until RocksDB has them.

rocksdict holds the interpreter's lock while it writes a batch or links files, so the loop would feel that as if it did
it itself. Hence entries are written in small batches with rests between them (`Pace` of cutting.py), unless somebody is
waiting; and the buffer is written by `flush`, which lets go of the lock, so that nothing is left for the linking to
write. That takes a few milliseconds then, for the disk, however large the state is.

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

# What is sorted together is written quicker; a batch is written in half a millisecond or so.
CHUNK_ENTRIES, BATCH_ENTRIES = 16_384, 1024


class Settling:
    """`last` is a write-batch for when all entries are written; then the files are linked in `place`, of `folder`."""

    def __init__(self, db: Any, tables: Sequence[RocksTable], last: Any, place: Path, folder: Folder) -> None:
        self._place = place
        self._folder = folder  # lives as long as this
        self._error: Exception | None = None
        self._hurried = False
        self._needed = True
        self._done = threading.Event()
        # Not `Thread.start`, which waits until the thread runs, while all cores may be busy.
        _thread.start_new_thread(self._run, (db, tables, last))

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> Path:
        """Until it is done, without rests: then where the files are."""
        self._hurried = True
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._place

    def discard(self) -> None:
        """The files are not needed any more. The entries still are: the state goes on with them."""
        self._needed = False
        self._folder.discard(self._place)

    def _run(self, db: Any, tables: Sequence[RocksTable], last: Any) -> None:
        try:
            self._folder.remove_discarded()
            for table in tables:
                self._write(db, table)
            db.write(last)
            if self._needed:
                db.flush()
                link_files(db, self._place)
            if not self._needed:
                self._folder.discard(self._place)  # it may have been made since it was discarded
        except Exception as error:  # noqa: BLE001  (for who waits)
            self._error = error
        finally:
            self._done.set()

    def _write(self, db: Any, table: RocksTable) -> None:
        """From the end on, so that what is written can be taken out."""
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
