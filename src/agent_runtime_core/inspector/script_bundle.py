"""Turn the ES modules of the page into one classic script, because a page on disk cannot load modules.

Each module becomes a function that returns its exports, after the modules that it imports. The forms of imports and
exports are those that the modules use. Any other form is an error that names its line, so a bundle is never silently
wrong.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from .._core.validation import Shown, must
from ..errors import InvalidArgument

_NAME: Final = r"[A-Za-z_$][\w$]*"
_PAIR: Final = rf"{_NAME}(?:\s+as\s+{_NAME})?"
_NAMES: Final = rf"\{{\s*{_PAIR}\s*(?:,\s*{_PAIR}\s*)*,?\s*\}}"
_IMPORT: Final = re.compile(
    rf"""import(?:\s*(?P<names>{_NAMES})\s*|\s+(?P<default>{_NAME})\s+)from\s*"(?P<path>[^"\n]+)";?"""
)
_EXPORT: Final = re.compile(rf"export\s*(?P<names>{_NAMES})(?!\s*from\b);?")
_DECLARATION: Final = re.compile(rf"export\s+(?=(?:async\s+)?(?:function|class|const)\s+(?P<name>{_NAME}))")
_DEFAULT: Final = re.compile(r"export\s+default\s+(?=function\b)")
_FORMS: Final = (
    'import { a, b } from "./x.js", import a from "./x.js", export function, export class, export const, '
    "export { a, b } or export default function"
)
#: Names of the bundle's own. No module may use them.
_MODULE, _DEFAULT_NAME = "$module", "$default"
#: Text that would end the script element, or change how an HTML parser reads it.
_MARKUP: Final = re.compile(r"</script|<script|<!--|\$module|\$default", re.IGNORECASE)

_SKIPPED: Final = re.compile(r"\s+|//[^\n]*|/\*[\s\S]*?\*/")
_STRING: Final = re.compile(r'"(?:[^"\\\n]|\\[\s\S])*"|' + r"'(?:[^'\\\n]|\\[\s\S])*'")
_WORD: Final = re.compile(r"[\w$]+")
_REGEX: Final = re.compile(r"/(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/[a-z]*")
_TEMPLATE: Final = re.compile(r"(?:[^`\\$]|\\[\s\S]|\$(?!\{))*(`|\$\{)")
#: After these words comes an expression, so a slash begins a regular expression.
_BEFORE_EXPRESSION: Final = (
    "return", "typeof", "case", "in", "of", "delete", "void", "throw", "new", "else", "do", "await", "yield",
    "instanceof",
)  # fmt: skip
_OPENING, _CLOSING = "([{", ")]}"
_HOLE: Final = "${"


class _Import(NamedTuple):
    path: str
    names: dict[str, str]  # the name in this module, by the name in the other one
    position: int


class _Module(NamedTuple):
    path: str
    text: str
    imports: list[_Import]
    exports: dict[str, str]  # the name in this module, by the exported name
    body: str  # the text without imports and exports, on the same lines


def bundled(files: Mapping[str, str], entry: str) -> str:
    """Return a classic script that does what the module `entry` does.

    Args:
        files: Source text by path, such as `pages/runs.js`.
        entry: The path of the module that the page loads.

    Raises:
        InvalidArgument: A module contains an import or export in another form, imports what does not exist, or imports
            itself through other modules.
    """
    modules: dict[str, _Module] = {}
    _collect(files, entry, (), modules)
    numbers = {path: number for number, path in enumerate(modules)}
    parts = []
    for number, module in enumerate(modules.values()):
        imports = "".join(f"const {_pattern(each.names)} = {_MODULE}{numbers[each.path]};\n" for each in module.imports)
        exports = ", ".join(f"{name}: {local}" for name, local in module.exports.items())
        parts.append(
            f"// {module.path}\nconst {_MODULE}{number} = (function () {{\n{imports}{module.body}\n"
            f"return {{ {exports} }};\n}})();\n"
        )
    return f'(function () {{\n"use strict";\n{"".join(parts)}}})();\n'


def _pattern(names: Mapping[str, str]) -> str:
    return f"{{ {', '.join(f'{name}: {local}' for name, local in names.items())} }}"


def _collect(files: Mapping[str, str], path: str, importing: tuple[str, ...], modules: dict[str, _Module]) -> None:
    """Add a module after all that it imports. A dict keeps this order."""
    if path in modules:
        return
    if path in importing:
        raise must("modules", "not import each other in a circle", Shown(" > ".join((*importing, path))))
    module = _parsed(path, files[path])
    for each in module.imports:
        if each.path not in files:
            raise _error(path, module.text, each.position, "import a file of the page", each.path)
        _collect(files, each.path, (*importing, path), modules)
        for name in each.names:
            if name not in modules[each.path].exports:
                raise _error(path, module.text, each.position, f"import a name that {each.path} exports", name)
    modules[path] = module


def _parsed(path: str, text: str) -> _Module:
    """Read the imports and exports of a module."""
    if found := _MARKUP.search(text):
        raise _error(
            path, text, found.start(), "not contain text that ends a script element, or a name of the bundle", found[0]
        )
    try:
        words = words_in(text, ("import", "export", "await"))
    except UnreadableScript as error:
        raise _error(
            path, text, error.position, "have closed strings and brackets", text[error.position : error.position + 40]
        ) from error
    module = _Module(path, text, [], {}, "")
    parts, end = [], 0
    for word in words:
        if word.text == "await" and word.depth:
            continue
        found, replacement = _replaced(module, word)
        lines = "\n" * text.count("\n", found.start(), found.end())
        parts += [text[end : found.start()], replacement, lines]
        end = found.end()
    return module._replace(body="".join([*parts, text[end:]]))


def _replaced(module: _Module, word: Word) -> tuple[re.Match[str], str]:
    """Note an import or export, and return it with what the body contains in its place."""
    text, position = module.text, word.position
    if not word.depth:
        if found := _IMPORT.match(text, position):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(module.path), found["path"]))
            names = _pairs(found["names"]) if found["names"] else {"default": found["default"]}
            if found["path"].startswith(("./", "../")):
                module.imports.append(_Import(target, names, position))
                return found, ""
        elif found := _EXPORT.match(text, position):
            module.exports.update({name: local for local, name in _pairs(found["names"]).items()})
            return found, ""
        elif found := _DECLARATION.match(text, position):
            module.exports[found["name"]] = found["name"]
            return found, ""
        elif found := _DEFAULT.match(text, position):
            module.exports["default"] = _DEFAULT_NAME
            return found, f"const {_DEFAULT_NAME} = "
    line = text[position : position + 80].partition("\n")[0]
    raise _error(module.path, text, position, f"have imports and exports in the forms {_FORMS}", line)


def _pairs(names: str) -> dict[str, str]:
    """Return {"a": "b", "c": "c"} for `{ a as b, c }`."""
    pairs = (each.split() for each in names.strip("{} \n").split(",") if each.strip())
    return {each[0]: each[-1] for each in pairs}


def _error(path: str, text: str, position: int, constraint: str, got: str) -> InvalidArgument:
    return must(f"{path}, line {text.count(chr(10), 0, position) + 1},", constraint, got)


class Word(NamedTuple):
    """A word in code, with its position and how many brackets are open around it."""

    text: str
    position: int
    depth: int


class UnreadableScript(ValueError):
    """The text is no JavaScript that this module can read. `position` is where it stopped."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


def words_in(text: str, wanted: Collection[str]) -> list[Word]:
    """Return the places of the words `wanted` in code. A property, as in `meta.import`, is left out.

    Raises:
        UnreadableScript: A string, template, comment or bracket does not end. A regular expression after `)` is read as
            a division, which ends in this error or does not affect the words.
    """
    found: list[Word] = []
    open_brackets: list[str] = []
    position, before = 0, ""
    while position < len(text):
        if skipped := _SKIPPED.match(text, position):
            position = skipped.end()
            continue
        start, each = position, text[position]
        if word := _WORD.match(text, position):
            each, position = word[0], word.end()
            if each in wanted and before != ".":
                found.append(Word(each, start, len(open_brackets)))
        elif each in "\"'":
            position = _end(_STRING, text, position)
        elif each == "/" and _begins_regex(before):
            position = _end(_REGEX, text, position)
            each = ")"  # ends a value, as a bracket does
        elif each == "`" or (each == "}" and open_brackets[-1:] == [_HOLE]):
            if each == "}":
                open_brackets.pop()
            position = _end(_TEMPLATE, text, position + 1)
            is_hole = text[position - 1] == "{"
            if is_hole:
                open_brackets.append(_HOLE)
            each = "(" if is_hole else ")"
        else:
            position += 1
            if each in _OPENING:
                open_brackets.append(each)
            elif each in _CLOSING and (not open_brackets or open_brackets.pop() != _OPENING[_CLOSING.index(each)]):
                raise UnreadableScript(start)
        before = each
    if open_brackets:
        raise UnreadableScript(len(text))
    return found


def _begins_regex(before: str) -> bool:
    if before[-1:].isalnum() or before[-1:] in ("_", "$"):
        return before in _BEFORE_EXPRESSION
    return before not in (")", "]", '"', "'")


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    found = pattern.match(text, position)
    if found is None:
        raise UnreadableScript(position)
    return found.end()
