"""Read the description of a function and of its parameters from its docstring."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["read_docstring"]

_PARAMETERS: Final = frozenset(
    [
        "args",
        "arguments",
        "params",
        "parameters",
        "keyword_args",
        "keyword_arguments",
        "kwargs",
        "other_parameters",
        "other_params",
        "other_args",
        "other_arguments",
    ]
)
_OTHERS: Final = frozenset(
    [
        "return",
        "returns",
        "yield",
        "yields",
        "receive",
        "receives",
        "raise",
        "raises",
        "except",
        "exceptions",
        "warns",
        "example",
        "examples",
        "note",
        "notes",
        "warning",
        "warnings",
        "see_also",
        "references",
        "attributes",
        "todo",
        "tip",
        "hint",
        "important",
        "caution",
        "danger",
        "attention",
        "error",
        "methods",
        "usage",
    ]
)
_PROSE: Final = frozenset(["example", "examples", "note", "notes", "see_also", "references", "warning", "warnings"])
#: Sections for the reader of the description, such as "Note: never call it twice." They are part of it.
_KEPT: Final = frozenset(
    "note notes warning warnings important caution danger attention tip hint usage".split()  # noqa: SIM905
)
_BULLETS: Final = ("- ", "* ", "+ ")
_SECTIONS: Final = _PARAMETERS | _OTHERS
_HEADING: Final = re.compile(r"([A-Za-z]+(?: [A-Za-z]+)?):[ \t]*$")
_UNDERLINE: Final = re.compile(r"(-{3,}|={3,})[ \t]*$")
_NAME: Final = r"[\\*`]{0,4}\w+[*`]{0,3}"
_NAMES: Final = rf"{_NAME}(?:[ \t]*,[ \t]*{_NAME})*"
# The parentheses contain the type, such as (tuple(int, str), optional).
_ENTRY: Final = re.compile(rf"({_NAMES})[ \t]*(?:\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))?[ \t]*:(?:[ \t]+(.*)|$)")
_NUMPY_ENTRY: Final = re.compile(rf"({_NAMES})[ \t]*(?::.*)?$")
_FIELD_ENTRY: Final = re.compile(
    r"[:@](param|parameter|arg|argument|key|keyword|kwarg|type|return|returns|rtype|raise|raises|except|exception|"
    r"yield|yields|ytype|var|ivar|cvar|vartype|meta)\b([^:]*):(?:[ \t]+(.*)|$)"
)
_FIELD_NAMES: Final = frozenset(["param", "parameter", "arg", "argument", "key", "keyword", "kwarg"])


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the description of a function, and the descriptions of its parameters by name.

    Sections and fields are left out of the description; unindented text after them is part of it, and so are notes and
    warnings. The styles of Google, NumPy, Sphinx and Epytext are understood.

    Args:
        text: The docstring without common indentation, as `inspect.getdoc` returns it.
    """
    reader = _Reader()
    lines = text.splitlines() or [""]
    skip = False
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if skip:  # the underline of a heading
            skip = False
        elif _UNDERLINE.match(following) and _section_name(line) in _SECTIONS:
            reader.start(_section_name(line), numpy=True)
            skip = True
        else:
            reader.line(line)
    return reader.result()


class _Reader:
    """Reads a docstring line by line."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._found: dict[str, list[str]] = {}
        self._section = ""  # the section or field of the current line; empty in the description
        self._numpy = False
        self._margin: int | None = None  # indentation of the entries of a section
        self._after_blank = False
        self._current: list[str] = []  # the parameters that the current line describes
        self._bullets = False  # whether the entries of the section are a list in Markdown

    def start(self, section: str, *, numpy: bool = False, margin: int | None = None) -> None:
        """Start a section or a field."""
        self._section, self._numpy, self._margin = section, numpy, margin
        self._after_blank, self._current = False, []
        if section in _KEPT:
            self._text += ["", f"{section.capitalize()}:"]

    def line(self, line: str) -> None:
        """Read one line."""
        text = line.strip()
        depth = len(line) - len(line.lstrip())
        heading = _HEADING.match(line)
        if heading and _key(heading[1]) in _SECTIONS:
            self.start(_key(heading[1]))
        elif field := _FIELD_ENTRY.match(line):
            self.start("field", margin=1)
            if field[1] in _FIELD_NAMES and field[2].split():
                self._describe(field[2].split()[-1], field[3] or "")
        elif not self._section:
            self._text.append(line)
        elif not text:
            self._after_blank = True
            if self._section in _KEPT:
                self._text.append("")
        elif depth == 0 and self._left(text):
            self.start("")
            self._text += ["", line]
        elif self._section in _KEPT:
            self._margin = depth if self._margin is None else self._margin
            self._text.append(line)
        else:
            self._inside(text, depth)

    def result(self) -> tuple[str, dict[str, str]]:
        """Return the description of the function, and those of its parameters."""
        text = re.sub(r"\n(?:[ \t]*\n){2,}", "\n\n", "\n".join(self._text)).strip()
        joined = {name: " ".join(filter(None, parts)) for name, parts in self._found.items()}
        return text, {name: description for name, description in joined.items() if description}

    def _left(self, text: str) -> bool:
        """Return whether an unindented line comes after the section."""
        if self._numpy:
            if self._section in _PROSE:  # until the next heading
                return False
            return self._after_blank and not _NUMPY_ENTRY.match(text)
        # Some authors do not indent the entries of a section. Those end at the first blank line.
        return self._after_blank if self._margin in (None, 0) else True

    def _inside(self, text: str, depth: int) -> None:
        if self._margin is None:
            self._margin, self._bullets = depth, text.startswith(_BULLETS)
        if self._section in _PARAMETERS and depth <= self._margin:
            named = text[2:].lstrip() if self._bullets and text.startswith(_BULLETS) else text
            entry = (_NUMPY_ENTRY if self._numpy else _ENTRY).match(named)
            if entry:
                self._describe(entry[1], "" if self._numpy else entry[2] or "")
                return
        for name in self._current:
            self._found[name].append(text)

    def _describe(self, names: str, description: str) -> None:
        self._current = [name.strip().strip("\\*`") for name in names.split(",")]
        for name in self._current:
            self._found[name] = [description.strip()]


def _key(heading: str) -> str:
    return heading.lower().replace(" ", "_")


def _section_name(line: str) -> str:
    return _key(line.strip()) if line == line.lstrip() else ""
