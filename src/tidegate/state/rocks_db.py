"""RocksDB itself: opening it with bounded memory for the whole slot, and reading ranges of keys.

A database has one column family, and the first two bytes of a key are its state. With a column family for each state, a
batch would need a multi-get for each state, a freeze would write a file for each, and each would have its own write buffers.

Compaction is universal (size-tiered): a snapshot uploads every new file, and levelled compaction would rewrite all of the
state every few epochs if changes are spread over all keys. Universal compaction merges small files with small files, and all
files only when the others together reach `MAX_OVER_PERCENT` of the largest one.

There is no write-ahead log: what was written since the last freeze is lost with the slot, and is processed again from the
source.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from tidegate.errors import JobError, StoreError

try:
    import rocksdict as _rocksdict
except ImportError:  # it is an extra
    _rocksdict = None  # type: ignore[assignment]

rocksdict: Any = _rocksdict

# Shares of a slot's memory: Python's cache of values, RocksDB's block cache, and write buffers within the block cache.
CACHE_SHARE, BLOCKS_SHARE, WRITE_SHARE = 0.5, 0.5, 0.2
MIN_MEMORY_BYTES = 16 << 20
# At a freeze a write buffer is written to disk, which takes about 3 ms per MB; until then nothing else can be written.
MAX_WRITE_BUFFER_BYTES = 8 << 20
MAX_OVER_PERCENT = 60


def require_rocksdict() -> None:
    if rocksdict is None:
        raise JobError("the RocksDB backend needs the package rocksdict: pip install 'tidegate[rocksdb]'")


class SlotMemory:
    """The memory of all RocksDB backends of this process: one block cache, one budget of write buffers, and one budget of
    cached values. Each backend may use its equal share of the last one, and what the other backends don't use."""

    _of_process: ClassVar[WeakValueDictionary[int, SlotMemory]] = WeakValueDictionary()
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, memory_bytes: int) -> None:
        require_rocksdict()
        self.memory_bytes = memory_bytes
        self.cache_bytes = int(memory_bytes * CACHE_SHARE)
        self.blocks = rocksdict.Cache(int(memory_bytes * BLOCKS_SHARE))
        self.write_bytes = int(memory_bytes * WRITE_SHARE)
        self.buffers = rocksdict.WriteBufferManager.new_write_buffer_manager_with_cache(self.write_bytes, False, self.blocks)
        self._used: dict[int, float] = {}

    @classmethod
    def of_process(cls, memory_bytes: int) -> SlotMemory:
        """Return the memory that all backends with this setting share."""
        with cls._lock:
            memory = cls._of_process.get(memory_bytes)
            if memory is None:
                memory = cls._of_process[memory_bytes] = cls(memory_bytes)
            return memory

    def allowed(self, user: object, used_bytes: float) -> float:
        """Return how many bytes a backend may cache that uses `used_bytes` now."""
        self._used[id(user)] = used_bytes
        used = list(self._used.values())
        return max(self.cache_bytes / len(used), self.cache_bytes - sum(used) + used_bytes)

    def leave(self, user: object) -> None:
        self._used.pop(id(user), None)

    def options(self) -> Any:
        blocks = rocksdict.BlockBasedOptions()
        blocks.set_bloom_filter(10, False)
        _set(
            blocks,
            block_cache=self.blocks,
            block_size=8 << 10,
            format_version=5,
            cache_index_and_filter_blocks=True,
            pin_l0_filter_and_index_blocks_in_cache=True,
        )
        universal = rocksdict.UniversalCompactOptions()
        universal.max_size_amplification_percent = MAX_OVER_PERCENT
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        _set(
            options,
            block_based_table_factory=blocks,
            write_buffer_manager=self.buffers,
            write_buffer_size=min(MAX_WRITE_BUFFER_BYTES, self.write_bytes // 2),
            max_write_buffer_number=3,
            compression_type=rocksdict.DBCompressionType.lz4(),
            compaction_style=rocksdict.DBCompactionStyle.universal(),
            universal_compaction_options=universal,
            level_zero_file_num_compaction_trigger=6,
            target_file_size_base=64 << 20,
            max_background_jobs=2,
            max_open_files=1024,
            keep_log_file_num=1,
            max_log_file_size=1 << 20,
            stats_dump_period_sec=0,
            stats_persist_period_sec=0,
        )
        return options


def _set(options: Any, **settings: Any) -> None:
    for name, setting in settings.items():
        getattr(options, f"set_{name}")(setting)


def open_db(folder: Path, memory: SlotMemory, *, read_only: bool = False) -> Any:
    """Open a database of bytes. `read_only`: its folder isn't changed."""
    options = memory.options()
    access = rocksdict.AccessType.read_only(False) if read_only else rocksdict.AccessType.read_write()
    try:
        # The column family is named because its options would otherwise be those of the OPTIONS file in the folder.
        db = rocksdict.Rdict(str(folder), options, column_families={"default": options}, access_type=access)
    except Exception as error:
        raise StoreError(f"RocksDB can't open {folder}: {error}") from error
    write = rocksdict.WriteOptions()
    write.disable_wal = True
    write.memtable_insert_hint_per_batch = True  # batches are sorted
    db.set_write_options(write)
    return db


def link_files(db: Any, place: Path) -> None:
    """Make a database of the present content in a new folder, of hard links, and copies of small files. RocksDB calls that a
    checkpoint; here it is a freeze."""
    rocksdict.Checkpoint(db).create_checkpoint(str(place))


def scan_prefix(db: Any, start: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Return the entries whose keys begin with `start`, in order."""
    for key, value in db.items(from_key=start):
        if not key.startswith(start):
            return
        yield key, value


def scan_range(db: Any, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Return the entries with keys from `start` up to `stop`, in order. They don't go into the block cache.

    This is a generator, so that its frame holds `options` and `stop`: rocksdict's iterator points to them without a
    reference, and would end early if they were freed.
    """
    options = rocksdict.ReadOptions()
    options.set_iterate_upper_bound(stop)
    options.set_readahead_size(1 << 20)
    options.fill_cache(False)
    yield from db.items(from_key=start, read_opt=options)
