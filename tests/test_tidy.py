"""The rules of the house, watched by a test: sizes, names, purity, exports, and what must not be in the tree.

A rule is a function from a parsed module of `src/` to complaints. `VIOLATIONS` shows for each rule something that it
must find, so that no rule goes blind. Import direction is checked by import-linter (`make lint`), style by ruff.
"""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

FILE_LINES = 500
FUNCTION_LINES, FUNCTION_LINES_HARD = 60, 80

# All that the protocol needs of Python. Nothing here reads a clock, draws a number, logs, waits or touches the world.
PURE_MODULES = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "copy",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "json",
    "math",
    "operator",
    "re",
    "string",
    "types",
    "typing",
}
IMPURE_BUILTINS = {"open", "print", "input", "exec", "eval", "hash", "id", "__import__"}

BANNED_CLASS_NAMES = re.compile(r"(Manager|Helper|Util|Impl|Base)s?$")
THEIR_WORDS_ALLOWED = ("src/tidegate/spark/", "src/tidegate/state/rocks_db.py")  # those who call Spark and RocksDB
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
MACHINE_PATH = re.compile(r"(?<![\w.~*})])/(?:work|root|home)/")
LOCK_FILE = re.compile(r"(\.lock|-lock\.(json|yaml))$")

# Pickle runs code: never on a socket, and users' functions travel on Spark's own closure path (security defaults 3
# and 4 of docs/promises.md). A file is added here with the way that its bytes take.
PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
PICKLE_ALLOWED = {
    "src/tidegate/state/pickled.py",  # opt-in state of a job, from its own store
    "src/tidegate/spark/interpreters.py",  # packs a task into Spark's closure
    "src/tidegate/control/launch.py",  # unpacks it in the slot's process
}


@dataclass(frozen=True, slots=True)
class Module:
    """A Python file: its path from the root, with forward slashes, and what is in it."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def parse(cls, path: str, text: str) -> Module:
        return cls(path, text, ast.parse(text, filename=path))


Rule = Callable[[Module], Iterator[str]]


# ---------------------------------------------------------------------------------------------------------- rules


def files_are_short(module: Module) -> Iterator[str]:
    yield from _too_long(module.path, len(module.text.splitlines()), soft=FILE_LINES, hard=FILE_LINES)


def functions_are_short(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            lines = node.end_lineno - node.lineno + 1
            yield from _too_long(_at(module, node, f"{node.name}()"), lines, soft=FUNCTION_LINES, hard=FUNCTION_LINES_HARD)


def modules_say_what_they_are(module: Module) -> Iterator[str]:
    if module.tree.body and not ast.get_docstring(module.tree):
        yield f"{module.path} has no docstring: what it is, its invariants, what it does not do"


def annotations_are_lazy(module: Module) -> Iterator[str]:
    beyond_docstring = module.tree.body[1 if ast.get_docstring(module.tree) is not None else 0 :]
    if beyond_docstring and not any(
        isinstance(node, ast.ImportFrom)
        and node.module == "__future__"
        and any(alias.name == "annotations" for alias in node.names)
        for node in beyond_docstring
    ):
        yield f"{module.path} lacks `from __future__ import annotations`"


def the_protocol_is_pure(module: Module) -> Iterator[str]:
    if not module.path.startswith("src/tidegate/protocol/"):
        return
    for node, imported in _imports(module):
        if imported.split(".")[0] not in PURE_MODULES | {"tidegate"}:
            yield _at(module, node, f"imports {imported}, which is not among the test's PURE_MODULES")
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS:
            yield _at(module, node, f"calls {node.func.id}()")


def class_names_say_something(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and BANNED_CLASS_NAMES.search(node.name):
            yield _at(module, node, f"class {node.name}: name it by what it does")


def sparks_words_stay_in_spark(module: Module) -> Iterator[str]:
    if module.path.startswith(THEIR_WORDS_ALLOWED):
        return
    for node, name in _identifiers(module):
        for theirs, ours in _sparks_words().items():
            if theirs in name.lower():
                yield _at(module, node, f"{name}: here it is {ours!r} (docs/glossary.md)")


def pickle_is_for_deploying_only(module: Module) -> Iterator[str]:
    if module.path in PICKLE_ALLOWED:
        return
    for node, imported in _imports(module):
        if imported.split(".")[0] in PICKLES:
            yield _at(module, node, f"imports {imported}: pickle is for deploying a job only (PICKLE_ALLOWED)")


def nothing_is_left_undone(module: Module) -> Iterator[str]:
    for number, line in enumerate(module.text.splitlines(), start=1):
        if UNFINISHED.search(line):
            yield f"{module.path}:{number} {line.strip()}"
    for node, name in _identifiers(module):
        if name == "NotImplementedError":
            yield _at(module, node, "NotImplementedError: an abstract method, or an error with a name")


RULES: list[Rule] = [
    files_are_short,
    functions_are_short,
    modules_say_what_they_are,
    annotations_are_lazy,
    the_protocol_is_pure,
    class_names_say_something,
    sparks_words_stay_in_spark,
    pickle_is_for_deploying_only,
    nothing_is_left_undone,
]

_ANYWHERE, _PROTOCOL = "src/tidegate/state/x.py", "src/tidegate/protocol/x.py"
VIOLATIONS: list[tuple[Rule, str, str]] = [
    (files_are_short, _ANYWHERE, "x = 1\n" * (FILE_LINES + 1)),
    (functions_are_short, _ANYWHERE, "def f():\n" + "    x = 1\n" * FUNCTION_LINES_HARD),
    (functions_are_short, _ANYWHERE, "class A:\n  async def f():\n" + "    x = 1\n" * FUNCTION_LINES_HARD),
    (modules_say_what_they_are, _ANYWHERE, "x = 1"),
    (annotations_are_lazy, _ANYWHERE, '"""Doc."""\nimport abc'),
    (annotations_are_lazy, _ANYWHERE, "from __future__ import division"),
    (the_protocol_is_pure, _PROTOCOL, "import time"),
    (the_protocol_is_pure, _PROTOCOL, "def f():\n    from numpy.random import rand"),
    (the_protocol_is_pure, _PROTOCOL, "import enum, logging as enum2"),
    (the_protocol_is_pure, _PROTOCOL, "print(1)"),
    (class_names_say_something, _ANYWHERE, "class StateManager: ..."),
    (class_names_say_something, _ANYWHERE, "def f():\n    class StoreUtils: ..."),
    (sparks_words_stay_in_spark, _ANYWHERE, "def f(checkpoint_id): ..."),
    (sparks_words_stay_in_spark, _ANYWHERE, "class BarrierAligner: ..."),
    (sparks_words_stay_in_spark, _ANYWHERE, "on_master = 1"),
    (sparks_words_stay_in_spark, _ANYWHERE, "x.last_checkpoint = 1"),
    (sparks_words_stay_in_spark, _ANYWHERE, "f(barrier=True)"),
    (sparks_words_stay_in_spark, _ANYWHERE, "from a import b as barrier"),
    (pickle_is_for_deploying_only, _ANYWHERE, "import pickle"),
    (pickle_is_for_deploying_only, _ANYWHERE, "def f():\n    from cloudpickle import dumps"),
    (nothing_is_left_undone, _ANYWHERE, "x = 1  # " + "TO" + "DO: two"),
    (nothing_is_left_undone, _ANYWHERE, "raise NotImplementedError"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule: Rule) -> None:
    _none([complaint for module in _source() for complaint in rule(module)])


@pytest.mark.parametrize(("rule", "path", "text"), VIOLATIONS, ids=[rule.__name__ for rule, _, _ in VIOLATIONS])
def test_the_rule_finds_what_breaks_it(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Module.parse(path, text)))


def test_every_rule_is_shown_to_find_something() -> None:
    assert {rule for rule, _, _ in VIOLATIONS} == set(RULES)


# -------------------------------------------------------------------------------------------------- what is public


# Public, but not for `from tidegate import *`, which would put them in place of Python's own.
NAMED_LIKE_BUILTINS = {"all", "any", "list", "map", "max", "min", "sum"}


def test_all_that_tidegate_shows_is_in_its_all() -> None:
    init = next(module for module in _source() if module.path == "src/tidegate/__init__.py")
    assert _declared_all(init.tree) == sorted(_bound_names(init.tree) - NAMED_LIKE_BUILTINS)


def test_importing_everything_shadows_no_builtin() -> None:
    import tidegate

    assert set(dir(tidegate)) & set(dir(builtins)) - set(vars(types.ModuleType("x"))) == NAMED_LIKE_BUILTINS
    assert not set(tidegate.__all__) & set(dir(builtins))


def test_what_tidegate_declares_public_is_there() -> None:
    import tidegate

    _none([name for name in getattr(tidegate, "__all__", ()) if not hasattr(tidegate, name)])


def _declared_all(tree: ast.Module) -> list[str]:
    """The names in `__all__`, sorted, with repetitions."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(x, ast.Name) and x.id == "__all__" for x in node.targets):
            return sorted(ast.literal_eval(node.value))
    pytest.fail("src/tidegate/__init__.py declares no __all__")


def _bound_names(tree: ast.Module) -> set[str]:
    """Public names that the module binds by itself; what it borrows from the standard library is not shown off."""
    bound: set[str] = set()
    guarded = [inner for node in tree.body if isinstance(node, ast.If) for inner in node.body]
    for node in [*tree.body, *guarded]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in sys.stdlib_module_names:
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = {alias.asname or alias.name.split(".")[0] for alias in node.names}
            bound |= names - sys.stdlib_module_names
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in bound if not name.startswith("_")}


# ------------------------------------------------------------------------------------------------- the tree itself


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    _none(
        [
            f"{path}:{number} {line.strip()}"
            for path in _tracked()
            if (text := _text_of(path)) is not None
            for number, line in enumerate(text.splitlines(), start=1)
            if MACHINE_PATH.search(line)
        ]
    )


@pytest.mark.parametrize("folder", ["work", "root", "home"])
def test_a_machine_path_is_told_from_a_part_of_an_address(folder: str) -> None:
    assert MACHINE_PATH.search(f'open("/{folder}/me/x")')
    assert MACHINE_PATH.search(f"file:///{folder}/me/x")
    assert not MACHINE_PATH.search(f"https://example.org/{folder}/me/x")


def test_there_are_no_lock_files() -> None:
    _none([path for path in _tracked() if LOCK_FILE.search(path)])


def test_the_words_that_the_glossary_leaves_to_spark_are_known() -> None:
    assert {"barrier", "checkpoint", "master"} <= _sparks_words().keys()


def test_every_word_of_the_glossary_is_used_in_the_source() -> None:
    words = {word.strip() for row in _glossary() for word in row[0].split(",")}
    assert len(words) > 50
    source = "\n".join(module.text for module in _source()).lower()
    _none(
        sorted(word for word in words if not re.search(rf"\b{word.lower().replace('-', '.?').replace(' ', '.?')}", source))
    )


def test_the_tests_that_the_promises_name_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs/promises.md").read_text("utf-8")))
    written = "\n".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    _none(sorted(name for name in named if f"def {name}(" not in written))


def test_no_two_decisions_have_one_number() -> None:
    """There may be gaps: numbers are given out before the decisions are written down."""
    numbers = sorted(int(path.name[:3]) for path in (ROOT / "docs/adr").glob("*.md"))
    assert len(numbers) == len(set(numbers)) and numbers[0] == 1


# ------------------------------------------------------------------------------------------------------- the means


@cache
def _glossary() -> tuple[tuple[str, ...], ...]:
    """The rows of its tables: the word, what it means, and in the first table what it is not."""
    lines = (ROOT / "docs/glossary.md").read_text("utf-8").splitlines()
    rows = (tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines if line.startswith("| "))
    return tuple(row for row in rows if row[0] != "word")


@cache
def _sparks_words() -> dict[str, str]:
    """By each word that the glossary leaves to Spark, ours for it."""
    found = ((re.fullmatch(r"(\w+) \(Spark's word\)", row[2]), row[0]) for row in _glossary() if len(row) > 2)
    return {theirs[1]: ours for theirs, ours in found if theirs is not None}


def _none(complaints: Iterable[str]) -> None:
    complaints = list(complaints)
    assert not complaints, "\n" + "\n".join(complaints)


def _at(module: Module, node: ast.AST, what: str) -> str:
    return f"{module.path}:{getattr(node, 'lineno', 1)} {what}"


def _too_long(what: str, lines: int, *, soft: int, hard: int) -> Iterator[str]:
    if lines > hard:
        yield f"{what} has {lines} lines, the limit is {hard}{f', better {soft}' if soft < hard else ''}"
    elif lines > soft:
        warnings.warn(f"{what} has {lines} lines, more than {soft}: is it still one concept?", stacklevel=2)


def _imports(module: Module) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node, node.module or ""


def _identifiers(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """Every name that the module defines, uses or passes; no strings, no comments."""
    for node in ast.walk(module.tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield node, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node, name
            case ast.keyword(arg=str(name)):
                yield node.value, name
            case ast.alias(name=name, asname=asname):
                yield node, f"{name} as {asname}" if asname else name


@cache
def _source() -> tuple[Module, ...]:
    paths = [path for path in _tracked() if path.startswith("src/") and path.endswith(".py")]
    assert paths, "no source was found: the test is looking at the wrong place"
    return tuple(Module.parse(path, text) for path in paths if (text := _text_of(path)) is not None)


@cache
def _tracked() -> tuple[str, ...]:
    """The files of the project, new ones included: by git where there is one, otherwise by a walk."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode("utf-8")
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    found = listed.split("\0") if listed else [path.relative_to(ROOT).as_posix() for path in _walk(ROOT)]
    return tuple(sorted(path for path in found if path and (ROOT / path).is_file()))


def _walk(folder: Path) -> Iterator[Path]:
    """Without hidden folders (but for .ci) and what is made when the project is used (see .gitignore)."""
    made = {"__pycache__", "artifacts", "build", "dist", "demo-out", "out", "spark-warehouse", "metastore_db"}
    for path in folder.iterdir():
        if path.is_file():
            yield path
        elif path.is_dir() and (
            path.name == ".ci" or not (path.name.startswith(".") or path.name in made or path.name.endswith(".egg-info"))
        ):
            yield from _walk(path)


def _text_of(path: str) -> str | None:
    """None where the file is no text (or went away meanwhile)."""
    try:
        return (ROOT / path).read_text("utf-8")
    except (UnicodeDecodeError, FileNotFoundError):
        return None
