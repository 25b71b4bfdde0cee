"""The one script that carries out all operations on a Redis server, joined from the parts of its concerns."""

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
    """How an operation's arguments become JSON, and its result what it is elsewhere."""

    pack: Callable[..., Any] = lambda *args: args
    unpack: Callable[[Any], Any] = lambda answer: answer


PLAIN = Codec()


@dataclass(frozen=True)
class RedisOperationSet(OperationSet):
    """A concern whose operations are Lua: `script` adds functions to `ops` and `applied`; see redis.lua.

    What `seldom` adds is not made in each call of the script, but in those that ask for some of it.
    """

    script: str = ""
    seldom: str = ""
    codecs: Mapping[str, Codec] = field(default_factory=dict)
    #: Errors that operations refuse with, by the word they use.
    refusals: Mapping[str, Callable[[], Exception]] = field(default_factory=dict)


def lua_source(module: str, name: str = "redis") -> str:
    """Lua beside a Python module."""
    return Path(module).with_name(f"{name}.lua").read_text(encoding="utf-8")


class Script(NamedTuple):
    """The text of the script, and how each call of it begins on its way to the server."""

    text: str
    call: bytes


def prepared(text: str, *first: str) -> Script:
    """The script with these arguments before its last one; the first of them is a key."""
    words = ("EVALSHA", hashlib.sha1(text.encode()).hexdigest(), "1", *first)
    return Script(text, b"*%d\r\n" % (len(words) + 1) + b"".join(bulk(word.encode()) for word in words))


def bulk(word: bytes) -> bytes:
    """Encode a word of a command, as the server reads it."""
    return b"$%d\r\n%s\r\n" % (len(word), word)


def joined(concerns: Sequence[RedisOperationSet]) -> str:
    """Each part is a function inside that of the part before it.

    The script is run from its start with each call, so the functions it makes cost time in all of them: Lua looks for
    what a function uses of the one around it among all locals that are used so, one after the other.
    """
    here = Path(__file__)
    first, last = (here.with_name(name).read_text(encoding="utf-8") for name in ("engine.lua", "end.lua"))
    seldom = _nested([lua_source(__file__, "admin"), *(each.seldom for each in concerns)])
    return _nested([first, *(each.script for each in concerns), f"local function seldom()\n{seldom}\nend\n{last}"])


def _nested(parts: Sequence[str]) -> str:
    parts = [part for part in parts if part]
    return "\nreturn (function()\n".join(parts) + "\nend)()" * (len(parts) - 1)


def packed(guard: Guard | None, ops: Sequence[Op], codecs: Mapping[str, Codec]) -> str:
    """A commit as the script reads it."""
    key, token = guard if guard is not None else (None, None)
    told = [(name, codecs.get(name, PLAIN).pack(*args)) for name, args in ops]
    return compact((key, token, told))


def unpacked(answer: str, ops: Sequence[Op], codecs: Mapping[str, Codec]) -> list[Any]:
    """The results of its operations."""
    results = json.loads(answer)
    return [codecs.get(op.name, PLAIN).unpack(result) for op, result in zip(ops, results, strict=True)]


def as_list(answer: Any) -> list[Any]:
    """Lua has one kind of table: an empty list comes as an empty object."""
    return answer or []
