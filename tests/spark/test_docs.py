"""Every Python snippet of the README and of docs/ is run, page by page, as a user would type it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in found if FENCE.search(page.read_text())]


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_the_snippets_of_a_page_run_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    text = page.read_text()
    script = tmp_path / "snippets.py"
    # Each snippet keeps its line number, so that an error points into the page.
    lines = [""] * text.count("\n")
    for match in FENCE.finditer(text):
        start = text[:match.start(1)].count("\n")
        for offset, line in enumerate(match[1].splitlines()):
            lines[start + offset] = line
    script.write_text("\n".join(lines))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, text=True, capture_output=True, timeout=280,
                          env=os.environ | {"PYSPARK_PYTHON": sys.executable}, check=False)
    assert done.returncode == 0, f"{page.name}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"


def test_there_are_pages_with_snippets() -> None:
    assert {"README.md", "guide.md"} <= {page.name for page in pages()}
