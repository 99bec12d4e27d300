"""What a type checker makes of a user's program: `mypy --strict` finds nothing in user_program.py, and in must_fail.py
exactly the errors that its comments announce."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = HERE.parent.parent / "src/tidegate"
ANNOUNCED = re.compile(r"# error: ([a-z-]+(?:, [a-z-]+)*)$")
FOUND = re.compile(r"^(?P<file>[^:]+):(?P<line>\d+): error: .*\[(?P<code>[a-z-]+)\]$", re.MULTILINE)
# What users without stubs for pyarrow have to say, and nothing else: the project's own settings don't count.
SETTINGS = "[mypy]\nstrict = True\n[mypy-pyarrow.*]\nignore_missing_imports = True\n"

Errors = set[tuple[str, int, str]]  # file, line and code


def announced(name: str) -> Errors:
    lines = (HERE / name).read_text("utf-8").splitlines()
    return {
        (name, number, code)
        for number, line in enumerate(lines, start=1)
        if (match := ANNOUNCED.search(line)) is not None
        for code in match[1].split(", ")
    }


def test_mypy_finds_what_is_announced_and_nothing_else(tmp_path: Path) -> None:
    """Both programs at once, beside the package as it is installed, since that takes mypy some seconds."""
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    programs = ["user_program.py", "must_fail.py"]
    for name in programs:
        (tmp_path / name).write_text((HERE / name).read_text("utf-8"), "utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", *programs]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = {(each["file"], int(each["line"]), each["code"]) for each in FOUND.finditer(checked.stdout)}
    assert found == announced("must_fail.py"), checked.stdout + checked.stderr


def test_what_must_fail_is_announced_in_one_program_only() -> None:
    assert len(announced("must_fail.py")) >= 40
    assert announced("user_program.py") == set()


def test_the_package_says_that_it_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()
