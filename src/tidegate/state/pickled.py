"""Pickled state: an opt-in for values that no Arrow type describes.

    seen = tg.value(tg.pickled())
    model = tg.value(tg.pickled(version=2, migrate=upgraded))       # upgraded(old_value, old_version) → value

A state holds such a value as bytes, on every backend: four bytes of version, big-endian, then a pickle of protocol 5. The
value is pickled when it is given to the state and unpickled each time it is handed out. So changes of the object afterwards
don't change the state, a value that can't be pickled is refused at once, and a function sees after a recovery what it would
have seen without one. None is not pickled: it is a null, as in any other state.

Versions. Every value carries the version with which it was written. `migrate(value, version)` is called with a value of an
older version and returns one of the present version. That is done when a snapshot is loaded, for all values of older
versions, before the first record. If a backend reopens its native files without loading rows, it is done when such a value
is handed out, each time until the value is written again. So `migrate` should depend only on its arguments, and stay in the
program as long as it may be started from snapshots with older values.

Classes are found by their names, as in pickle: they have to be importable on the slots. Classes of a notebook are not.
cloudpickle would store a copy of the class with each value, and the old code would stay in the state.

In a snapshot the column is binary, and its schema's metadata hold the version with which it was pickled. So binary state is
not taken for pickled state, nor the other way round. To unpickle is to run code: use this only if nobody but the job can
write to the store.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import JobError, RestoreError, SchemaError
from tidegate.state.values import Form

PROTOCOL = 5
MAX_VERSION = 2**32 - 1

_METADATA_KEY = b"tidegate.pickled"
_HEADER = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Pickled:
    """A state's type: any Python value that can be pickled. `pickled` returns it."""

    version: int = 1
    migrate: Callable[[Any, int], Any] | None = None

    def __str__(self) -> str:
        return shown(self.version)

    def metadata(self) -> dict[bytes, bytes]:
        """Return the metadata for the schema of a state that holds such values."""
        return {_METADATA_KEY: str(self.version).encode("ascii")}

    def form(self, state: str | None) -> Form:
        """Return the form in which a state of that name holds such values: bytes, which `copied` unpickles each time."""
        return Form(held=self.held, copied=lambda held: self.handed_out(held, state))

    def held(self, value: Any) -> bytes | None:
        if value is None:
            return None
        try:
            return _HEADER.pack(self.version) + pickle.dumps(value, protocol=PROTOCOL)
        except Exception as error:
            raise SchemaError(
                f"a {type(value).__qualname__} can't be pickled: {error}. Keep its parts instead, or "
                f"define its class in a module that the slots can import"
            ) from error

    def handed_out(self, held: bytes | None, state: str | None) -> Any:
        """Return the unpickled value, at the present version."""
        if held is None:
            return None
        if len(held) <= _HEADER.size:
            raise RestoreError(f"state {state!r} holds {_cut(repr(held))}, which is not a pickled value")
        version: int = _HEADER.unpack_from(held)[0]
        value = _unpickled(held, state)
        return value if version == self.version else self._migrated(value, version, state)

    def taken_in(self, column: pa.Array, state: str) -> pa.Array:
        """Return a column of a snapshot with all values at the present version.

        If all of them have the present version already, only the first is unpickled: so a class that is missing is found at
        the restore, and not hours later.
        """
        present = pc.equal(pc.binary_slice(column, 0, _HEADER.size), _HEADER.pack(self.version))
        if pc.all(present, min_count=0).as_py():
            filled = column.drop_null()
            if len(filled):
                self.handed_out(filled[0].as_py(), state)
            return column
        return pa.array(
            [
                held if now or held is None else self.held(self.handed_out(held, state))
                for held, now in zip(column.to_pylist(), present.to_pylist(), strict=True)
            ],
            type=column.type,
        )

    def _migrated(self, value: Any, version: int, state: str | None) -> Any:
        if version > self.version or self.migrate is None:
            raise RestoreError(f"state {state!r} {unreadable(version, self)}")
        try:
            return self.migrate(value, version)
        except Exception as error:
            raise RestoreError(
                f"state {state!r}: migrate failed for a value of version {version}, "
                f"{_cut(repr(value))}: {type(error).__name__}: {error}"
            ) from error


def pickled(*, version: int = 1, migrate: Callable[[Any, int], Any] | None = None) -> Pickled:
    """Return the type of a state whose values, list items or map values are any Python values that can be pickled.

    Increase `version` when the form of the values changes, and give `migrate(old_value, old_version)`, which converts a
    value of an older form in a snapshot to the present form.
    """
    if type(version) is not int or not 1 <= version <= MAX_VERSION:
        raise JobError(f"pickled(version={version!r}): versions are whole numbers from 1")
    if migrate is not None and not callable(migrate):
        raise JobError(f"pickled(migrate={migrate!r}): give a function of the old value and its version")
    if migrate is not None and version == 1:
        raise JobError("pickled(migrate=…): nothing is older than version 1; increase version=")
    return Pickled(version, migrate)


def pickled_version(schema: pa.Schema) -> int | None:
    """Return the version with which a state of a snapshot was pickled; None if it wasn't pickled."""
    found = (schema.metadata or {}).get(_METADATA_KEY)
    return None if found is None else int(found)


def shown(version: int) -> str:
    return f"pickled(version={version})"


def unreadable(version: int, now: Pickled) -> str:
    """Return why values of a version can't be read, as the end of a sentence about a state."""
    if version > now.version:
        return (
            f"was pickled with version {version} and is declared with version {now.version}: run the program that "
            f"wrote it, or a later one"
        )
    return (
        f"was pickled with version {version} and is declared with version {now.version}, without a conversion from one to "
        f"the other: give pickled(version={now.version}, migrate=…), a function of the old value and its version"
    )


def _unpickled(held: bytes, state: str | None) -> Any:
    body = memoryview(held)[_HEADER.size :]
    try:
        return pickle.loads(body)
    except Exception as error:
        try:
            _Finding(io.BytesIO(body)).load()
        except _Missing as missing:
            raise RestoreError(
                f"state {state!r} holds a value whose class {missing} is missing here ({error}): put the class "
                f"back under that name where the slots can import it, until all values are migrated"
            ) from error
        except Exception:  # noqa: BLE001  (the same failure as before)
            pass
        raise RestoreError(
            f"state {state!r} holds a value that can't be unpickled: {type(error).__name__}: {error}"
        ) from error


class _Missing(Exception):
    """A class or function that a pickle names is missing. The text is its full name."""


class _Finding(pickle.Unpickler):
    """An unpickler that reports which name is missing."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            raise _Missing(f"{module}.{name}") from None


def _cut(text: str) -> str:
    return text if len(text) <= 100 else text[:99] + "…"
