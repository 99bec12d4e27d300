"""What a type checker makes of a user's program: `mypy --strict` finds nothing in user_program.py, and in must_fail.py
exactly the errors that its comments announce."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ANNOUNCED = re.compile(r"# error: ([a-z-]+(?:, [a-z-]+)*)$")
FOUND = re.compile(r"^(?P<file>[^:]+):(?P<line>\d+): error: (?P<text>.*)\[(?P<code>[a-z-]+)\]$", re.MULTILINE)

Errors = set[tuple[str, int, str]]  # file, line and code


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Errors:
    """Both programs are checked at once, against the package as it is installed: by its `py.typed`, not by its source."""
    folder = tmp_path_factory.mktemp("typing")
    settings = folder / "mypy.ini"
    # What the project's own settings say of pyarrow is what users without stubs for it have to say.
    settings.write_text("[mypy]\nstrict = True\n[mypy-pyarrow.*]\nignore_missing_imports = True\n")
    programs = []
    for name in ("user_program.py", "must_fail.py"):
        programs.append(folder / name)
        programs[-1].write_text((HERE / name).read_text("utf-8"), "utf-8")
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        settings,
        "--cache-dir",
        folder / "cache",
        "--no-error-summary",
    ]
    checked = subprocess.run([*command, *programs], cwd=folder, capture_output=True, text=True, check=False)
    assert checked.returncode in (0, 1), checked.stdout + checked.stderr
    errors = {(Path(each["file"]).name, int(each["line"]), each["code"]) for each in FOUND.finditer(checked.stdout)}
    assert {(name, code) for name, _, code in errors} or checked.returncode == 0, checked.stdout
    print(checked.stdout)
    return errors


def announced(name: str) -> Errors:
    lines = (HERE / name).read_text("utf-8").splitlines()
    return {
        (name, number, code)
        for number, line in enumerate(lines, start=1)
        if (match := ANNOUNCED.search(line)) is not None
        for code in match[1].split(", ")
    }


@pytest.mark.parametrize("name", ["user_program.py", "must_fail.py"])
def test_mypy_finds_what_is_announced_and_nothing_else(found: Errors, name: str) -> None:
    here = {error for error in found if error[0] == name}
    assert here == announced(name)


def test_there_is_something_that_must_fail() -> None:
    assert len(announced("must_fail.py")) > 30
    assert announced("user_program.py") == set()


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src/tidegate/py.typed").exists()
    assert files("tidegate") is not None, "mypy reads the package as it is installed"
