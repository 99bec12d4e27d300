"""Write the fixtures of this version: `python -m tests.formats`.

Do this only when a format has changed, into the folder of the new format (`FOLDER` in fixtures.py), and keep the older ones.
Until the first release those of the present format may be written again, if a shape of state has changed on purpose.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.formats.fixtures import FOLDER, write_end, write_in_flight, write_own, write_savepoint


def main() -> None:
    for backend in ("heap", "rocksdb"):
        for kind, write in (("savepoint", write_savepoint), ("own", write_own), ("in-flight", write_in_flight)):
            with tempfile.TemporaryDirectory() as folder:
                write(Path(folder), backend, f"{kind}-{backend}")
    with tempfile.TemporaryDirectory() as folder:
        write_end(Path(folder))
    for file in sorted(FOLDER.iterdir()):
        print(f"{file.stat().st_size:>10,} {file.name}")


if __name__ == "__main__":
    main()
