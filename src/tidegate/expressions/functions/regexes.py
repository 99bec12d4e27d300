"""Java's regular expressions, as far as RE2, which Arrow uses, can be given the same meaning.

Rewritten: `.`, which doesn't match Java's line ends; `$` at the end, which also matches before a last line end; `\\s`,
which has a vertical tab in Java. Refused: what RE2 doesn't have (look-around, back-references, possessive quantifiers),
and what means something else there (`\\b` and classes of Unicode, flags, `&&` and `[` in a class).
"""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.expressions.functions.calls import Call

_LINE_ENDS = r"\n\r\x{85}\x{2028}\x{2029}"
_SAME_ESCAPES = set("dDwW\\.[]{}()*+?^$|/-tnrf\"'@#%&=!<>:,;~_` ")


def translated(call: Call, pattern: str, *, group: int | None = None) -> str:
    """Return RE2's pattern. With `group`, that group is named `found`, and no other group captures."""
    reader = _Reader(call, pattern, group)
    made = reader.read()
    if group is not None and group > reader.groups:
        call.fail(f"the pattern {pattern!r} has {reader.groups} groups, and group {group} is asked for")
    if group == 0:
        made = f"(?P<found>{made})"
    try:
        pc.match_substring_regex(pa.array([""]), made)
    except pa.ArrowInvalid as error:
        call.fail(f"the pattern {pattern!r} can't be used: {error}")
    return made


def matches_nothing(made: str) -> bool:
    """Return whether a pattern matches the empty text."""
    return bool(pc.match_substring_regex(pa.array([""]), made)[0].as_py())


class _Reader:
    def __init__(self, call: Call, pattern: str, group: int | None) -> None:
        self._call = call
        self._pattern = pattern
        self._group = group
        self._at = 0
        self.groups = 0

    def read(self) -> str:
        made = []
        while self._at < len(self._pattern):
            made.append(self._next())
        return "".join(made)

    def _next(self) -> str:
        pattern, at = self._pattern, self._at
        char = pattern[at]
        if char == "\\":
            return self._escape(in_class=False)
        if char == "[":
            return self._class()
        if char == "(":
            return self._open()
        self._at += 1
        if char == ".":
            return f"[^{_LINE_ENDS}]"
        if char == "$":
            if self._at < len(pattern):
                self._refuse("$ before the end")
            return rf"(?:\r\n|[{_LINE_ENDS}])?\z"
        if char in "*+?}" and pattern[self._at : self._at + 1] == "+":
            self._refuse("a possessive quantifier")
        return char

    def _open(self) -> str:
        if self._pattern.startswith("(?:", self._at):
            self._at += 3
            return "(?:"
        if self._pattern.startswith("(?", self._at):
            self._refuse(self._pattern[self._at : self._at + 3])
        self._at += 1
        self.groups += 1
        if self._group is None:
            return "("
        return "(?P<found>" if self.groups == self._group else "(?:"

    def _class(self) -> str:
        pattern = self._pattern
        end = self._at + 1
        made = "["
        self._at = end
        if pattern[self._at : self._at + 1] == "^":
            made += "^"
            self._at += 1
        if pattern[self._at : self._at + 1] == "]":
            self._refuse("] at the beginning of a class")
        while self._at < len(pattern) and pattern[self._at] != "]":
            if pattern[self._at] == "[" or pattern.startswith("&&", self._at):
                self._refuse("[ or && in a class")
            if pattern[self._at] == "\\":
                made += self._escape(in_class=True)
            else:
                made += pattern[self._at]
                self._at += 1
        if self._at == len(pattern):
            self._refuse("a class without its ]")
        self._at += 1
        return made + "]"

    def _escape(self, *, in_class: bool) -> str:
        char = self._pattern[self._at + 1 : self._at + 2]
        self._at += 2
        if char == "s":
            return r"\t\n\x0B\f\r " if in_class else r"[\t\n\x0B\f\r ]"
        if char == "S" and not in_class:
            return r"[^\t\n\x0B\f\r ]"
        if char not in _SAME_ESCAPES:
            self._refuse(f"\\{char}")
        if char in "dDwWtnrf":
            return f"\\{char}"
        return re.escape(char)

    def _refuse(self, what: str) -> None:
        self._call.fail(f"{what} in the pattern {self._pattern!r} isn't supported, since Arrow's RE2 differs from Java")
