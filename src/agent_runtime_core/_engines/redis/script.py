"""The Lua script that applies all operations on a Redis server, joined from the parts of its operation sets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..._core.codec.json import compact
from ..base import Guard, Op, OperationSet


class Codec(NamedTuple):
    """Encodes the arguments of an operation for JSON and decodes its result."""

    pack: Callable[..., Any] = lambda *args: args
    unpack: Callable[[Any], Any] = lambda answer: answer


PLAIN = Codec()


@dataclass(frozen=True)
class RedisOperationSet(OperationSet):
    """An operation set in Lua: `script` adds functions to the tables `ops` and `applied`; see engine.lua.

    The functions in `seldom` are only defined in calls that need such a function.
    """

    script: str = ""
    seldom: str = ""
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    #: Errors that operations raise, by the first word of the error reply.
    refusals: Mapping[str, Callable[[], Exception]] = field(default_factory=dict)


def lua_source(module: str, name: str = "redis") -> str:
    """Return the text of a Lua file in the directory of a Python module."""
    return Path(module).with_name(f"{name}.lua").read_text(encoding="utf-8")


class Script(NamedTuple):
    """The text of the script, and the encoded start of each call of it."""

    text: str
    call: bytes


def prepared(text: str, *first: str) -> Script:
    """Return the script with these arguments before its last argument; the first of them is a key."""
    words = ("EVALSHA", hashlib.sha1(text.encode()).hexdigest(), "1", *first)
    return Script(text, b"*%d\r\n" % (len(words) + 1) + b"".join(bulk(word.encode()) for word in words))


def bulk(word: bytes) -> bytes:
    """Encode a word of a command as a RESP bulk string."""
    return b"$%d\r\n%s\r\n" % (len(word), word)


def joined(operation_sets: Sequence[RedisOperationSet]) -> str:
    """Join the parts of the script; each part is a function inside the function of the part before it.

    The whole script runs in each call, so each function that it defines costs time in every call. Lua finds a variable
    of an enclosing function by a linear search in all variables that are used so.
    """
    here = Path(__file__)
    first, last = (here.with_name(name).read_text(encoding="utf-8") for name in ("engine.lua", "end.lua"))
    seldom = _nested([lua_source(__file__, "admin"), *(each.seldom for each in operation_sets)])
    return _nested(
        [first, *(each.script for each in operation_sets), f"local function seldom()\n{seldom}\nend\n{last}"]
    )


def _nested(parts: Sequence[str]) -> str:
    parts = [part for part in parts if part]
    return "\nreturn (function()\n".join(parts) + "\nend)()" * (len(parts) - 1)


def packed(guard: Guard | None, ops: Sequence[Op], codecs: Mapping[str, Codec]) -> str:
    """Encode a commit for the script."""
    key, token = guard if guard is not None else (None, None)
    encoded = [(name, codecs.get(name, PLAIN).pack(*args)) for name, args in ops]
    return compact((key, token, encoded))


def unpacked(answer: str, ops: Sequence[Op], codecs: Mapping[str, Codec]) -> list[Any]:
    """Decode the results of a commit's operations."""
    results = json.loads(answer)
    return [codecs.get(op.name, PLAIN).unpack(result) for op, result in zip(ops, results, strict=True)]


def as_list(answer: Any) -> list[Any]:
    """Return a list from the script. Lua knows one type of table, so an empty list arrives as an empty object."""
    return answer or []
