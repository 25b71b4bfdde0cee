"""The shape that every error message has, as a check for tables of triggered errors.

A test module has one table of `Triggered` rows, and two lines for each row:

    error = await error_of(row)
    assert (str(error), problems_of(row)) == (row.message, [])
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple


class Triggered(NamedTuple):
    """An error that a test triggers.

    A message about a value needs no more than its words: `X must be …, got …. Fix.` or `unknown X 'helo'. Did you
    mean 'hello'?`. A message about the state of something also has `about`, the object as the user named it, and
    `fix`, the words of the message that say what helps.
    """

    trigger: Callable[[], object]
    message: str
    about: str = ""
    fix: str = ""


async def error_of(row: Triggered) -> BaseException:
    """Return the error that the trigger raises; if it returns a coroutine, the error of awaiting it."""
    try:
        returned = row.trigger()
        if inspect.isawaitable(returned):
            await returned
    except Exception as error:  # noqa: BLE001 - the caller checks what it is
        return error
    raise AssertionError(f"nothing was raised: {row.message}")


MUST = re.compile(r"\S.*? must (?P<constraint>.+?), got (?P<got>.+)")
UNKNOWN = re.compile(
    r"(.+: )?unknown [a-z][\w -]*? (['\"<(\[{].*|\d+)\. (Did you mean '[^']+'\?|Known: [^.]+\.|None exist\.)( \S.*)?"
)
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
#: What no message has, each with the reason.
_NEVER = {
    r"\w\(s\)": "a plural in brackets",
    r"\b1[5-9]\d{8}\b": "epoch seconds",
    r"('[^']*', ){4}'[^']*'(,? (or|and)|,) '": "a list of more than five names",
    r"\n": "more than one line",
    r"(?<![\w'\".])_[a-z]\w+": "an internal name",
    r"\b[Aa] (?=[aeio]\w)(?!one\b)": "a for an",
    r"\bdid you mean": "a hint that is not a sentence",
    r"\b(nobody|somebody|whoever|is told|is refused|gives? no|a text|whole number)\b": "a retired idiom",
}
LONGEST = 600


def problems_of(row: Triggered) -> list[str]:
    """Return what is wrong with the shape of a message; an empty list if nothing is."""
    message = row.message
    found = [why for pattern, why in _NEVER.items() if re.search(pattern, message)]
    if len(message) > LONGEST:
        found.append(f"{len(message)} characters")
    if row.about or row.fix:
        return found + _problems_of_state(row)
    if (must := MUST.fullmatch(message)) is not None:
        # A constraint that only excludes something does not say what to write.
        if must["constraint"].startswith("not ") and not re.search(r"\. [A-Z]", must["got"]):
            found.append("no fix")
    elif UNKNOWN.fullmatch(message) is None:
        found.append("neither `X must …, got …` nor `unknown X …. Did you mean …?`")
    return found


def _problems_of_state(row: Triggered) -> list[str]:
    found = []
    if not row.about or row.about not in row.message:
        found.append(f"the object {row.about!r} is not named")
    if not row.fix or row.fix not in row.message:
        found.append(f"the fix {row.fix!r} is not named")
    if not _UUID.search(row.about) and _UUID.search(row.message):
        found.append("a derived id in place of the name that the user passed")
    return found


SOURCE = Path(__file__).parents[2] / "src" / "agent_runtime_core"
VALUE_ERRORS = frozenset({"InvalidArgument", "UnknownSetting"})


def literal_messages(wanted: Callable[[str], bool], kinds: Collection[str] = VALUE_ERRORS) -> Iterator[tuple[str, str]]:
    """Yield the file and the source of each message that is written where the error is raised.

    Args:
        wanted: Called with the name of a package or module at the top; whether to search it.
        kinds: Names of the classes of errors.
    """
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if not wanted(name.split("/")[0]):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Name(id=kind), args=[ast.Constant() | ast.JoinedStr() as message, *_]) if (
                    kind in kinds and "unknown(" not in ast.unparse(message)
                ):
                    yield name, ast.unparse(message).lstrip("f")[1:-1]
