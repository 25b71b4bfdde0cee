"""Recorded conversations with a model, kept in a JSON file and played back with no network.

The file is `{"version": 1, "exchanges": [{"request": ..., "response": ...}]}`. A request has messages, model and
tools; a response has message, usage, model, finish_reason, and cost_usd where it is known.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import os
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._core.ids import path_text
from .._core.threads import in_thread
from ..errors import AgentRuntimeError, InvalidArgument, StreamCut, brief
from ..interfaces import LLMClient, LLMResponse, LLMStreamChunk
from ..loop.model_calls import StreamBuffer
from .models import chunks_of

__all__ = ["Cassette", "CassetteMiss", "Exchange", "RecordingLLMClient", "ReplayLLMClient"]

VERSION = 1
_SHOWN_LINES = 40
_WIDTH = 120


class CassetteMiss(AgentRuntimeError, AssertionError):
    """A request that no recording answers; its text shows how the nearest one differs."""


@dataclass(frozen=True)
class Exchange:
    """A request and what the model answered, as JSON trees."""

    request: dict[str, Any]
    response: dict[str, Any]


@dataclass
class Cassette:
    """Exchanges in the order of their recording.

    Nothing is left out of them or made unreadable: images are kept as they were sent, and so is a secret that
    stands in a message or a tool's result. Look through a file before you share it. API keys are no part of a
    request, so they are not in it.
    """

    exchanges: list[Exchange] = field(default_factory=list)

    def add(self, request: Mapping[str, Any], response: Mapping[str, Any] | LLMResponse) -> None:
        """Keep a copy of an exchange; InvalidArgument if it is no JSON or lacks its messages or message."""
        if isinstance(response, LLMResponse):
            response = _told(response)
        self.exchanges.append(_exchange({"request": request, "response": response}, f"exchange {len(self.exchanges)}"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file: as a whole, or not at all. It replaces one that is there."""
        place = _file(path)
        tree = [{"request": each.request, "response": each.response} for each in self.exchanges]
        text = json.dumps({"version": VERSION, "exchanges": tree}, indent=2, ensure_ascii=False)
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = place.with_name(f".{place.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            # A lone surrogate has no UTF-8; its escape means the same in JSON.
            beside.write_bytes(text.encode("utf-8", "backslashreplace") + b"\n")
            os.replace(beside, place)
        finally:
            beside.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cassette:
        """What `save` wrote, or somebody by hand; InvalidArgument says what is wrong with it."""
        file = _file(path)
        try:
            tree = json.loads(file.read_bytes())
        except FileNotFoundError as error:
            raise InvalidArgument(f"no cassette {str(path)!r}: record one with RecordingLLMClient") from error
        except (ValueError, RecursionError, IsADirectoryError) as error:
            raise InvalidArgument(f"{str(path)!r} is no cassette: {error}") from error
        if not isinstance(tree, dict) or tree.get("version") != VERSION or not isinstance(tree.get("exchanges"), list):
            raise InvalidArgument(
                f'{str(path)!r} is no cassette of version {VERSION}: it is {{"version": {VERSION}, "exchanges": [...]}}'
            )
        return cls([_exchange(each, f"exchange {n} of {str(path)!r}") for n, each in enumerate(tree["exchanges"])])


def _file(path: str | os.PathLike[str]) -> Path:
    text = path_text(path)
    if text is None:
        raise InvalidArgument(f"{brief(path, 500)} is no path of a cassette")
    return Path(text)


class ReplayLLMClient(LLMClient):
    """A model that answers as it did when it was recorded, and never asks anybody.

    A recording answers a request with equal messages and tools, and the model where one was recorded; other
    options have no part in it. It answers once; asked more often than it was recorded, a request is a
    CassetteMiss if `strict`, and gets its last answer again if not.
    """

    def __init__(
        self, cassette: str | os.PathLike[str] | Cassette | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        if isinstance(cassette, str | os.PathLike):
            cassette = Cassette.load(cassette)
        elif not isinstance(cassette, Cassette | Iterable):
            raise InvalidArgument(f"{brief(cassette)} is no Cassette, list of exchanges or path of a cassette")
        elif not isinstance(cassette, Cassette):
            cassette = Cassette([_exchange(each, f"exchange {number}") for number, each in enumerate(cassette)])
        self._exchanges = list(cassette.exchanges)
        self._strict = strict
        self._used: set[int] = set()

    @property
    def unused(self) -> list[Exchange]:
        """The recordings that nobody has asked for yet."""
        return [each for number, each in enumerate(self._exchanges) if number not in self._used]

    async def generate(
        self,
        messages: list[Any],
        *,
        model: str | None = None,
        stream: bool = False,
        tools: list[dict[str, Any]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> LLMResponse:
        return self._answer(messages, model, tools)

    async def stream(
        self,
        messages: list[Any],
        *,
        model: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[LLMStreamChunk]:
        for chunk in chunks_of(self._answer(messages, model, tools)):
            yield chunk

    def _answer(self, messages: list[Any], model: str | None, tools: list[dict[str, Any]] | None) -> LLMResponse:
        asked = _plain({"messages": messages, "model": model, "tools": tools or None}, "the request")
        matching = [number for number, each in enumerate(self._exchanges) if _compared(each.request, asked) == asked]
        fresh = [number for number in matching if number not in self._used]
        if not fresh and (self._strict or not matching):
            raise self._miss(asked, matching)
        number = fresh[0] if fresh else matching[-1]
        self._used.add(number)
        response = copy.deepcopy(self._exchanges[number].response)
        return LLMResponse(
            message=response["message"],
            usage=response.get("usage") or {},
            model=response.get("model") or model or "",
            finish_reason=response.get("finish_reason") or "",
            cost_usd=response.get("cost_usd"),
        )

    def _miss(self, asked: dict[str, Any], matching: Sequence[int]) -> CassetteMiss:
        if matching:
            return CassetteMiss(
                f"this request was recorded {len(matching)} time(s) and is asked once more: record it again, "
                f"or replay with strict=False; it ends with\n{_pretty(asked['messages'][-1:])}"
            )
        if not self._exchanges:
            return CassetteMiss("the cassette is empty: record one with RecordingLLMClient")
        number, lines = self._nearest(asked)
        return CassetteMiss(
            f"no recording answers this request; exchange {number} of {len(self._exchanges)} (from 0) is the nearest"
            f"{' (and was already played)' if number in self._used else ''}:\n" + "\n".join(lines)
        )

    def _nearest(self, asked: dict[str, Any]) -> tuple[int, list[str]]:
        """The recording most like what was asked, and the difference to it."""
        wanted = _lines(asked)
        matcher = difflib.SequenceMatcher(None, b=wanted, autojunk=False)
        best, found, likeness = 0, [""], -1.0
        for number, each in enumerate(self._exchanges):
            lines = _lines(_compared(each.request, asked))
            matcher.set_seq1(lines)
            if (here := matcher.quick_ratio()) > likeness:
                best, found, likeness = number, lines, here
        difference = list(difflib.unified_diff(found, wanted, "recorded", "asked", n=2, lineterm=""))
        if len(difference) > _SHOWN_LINES:
            left = len(difference) - _SHOWN_LINES + 1
            difference[_SHOWN_LINES - 1 :] = [f"… and {left} more lines"]
        return best, difference


class RecordingLLMClient(LLMClient):
    """A client that asks `client` and keeps what it answers in a cassette file, written anew from the first answer on.

    The file is whole after every answer. What failed, and a stream that was left before its end, is not recorded.
    See Cassette for what such a file shows of your messages.
    """

    def __init__(self, client: LLMClient, path: str | os.PathLike[str]) -> None:
        self._client = client
        self._path = _file(path)
        self._lock = threading.Lock()
        self.cassette: Cassette = Cassette()

    async def generate(
        self,
        messages: list[Any],
        *,
        model: str | None = None,
        stream: bool = False,
        tools: list[dict[str, Any]] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        **kwargs: Any,
    ) -> LLMResponse:
        request = _plain({"messages": messages, "model": model, "tools": tools or None}, "the request")
        response = await self._client.generate(
            messages,
            model=model,
            stream=stream,
            tools=tools,
            temperature=temperature,
            max_tokens=max_tokens,
            **kwargs,
        )
        await in_thread(self._keep, request, response)
        return response

    async def stream(
        self,
        messages: list[Any],
        *,
        model: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[LLMStreamChunk]:
        request = _plain({"messages": messages, "model": model, "tools": tools or None}, "the request")
        heard, kept = StreamBuffer(), False
        async with _closing(self._client.stream(messages, model=model, tools=tools, **kwargs)) as chunks:
            try:
                async for chunk in chunks:
                    heard.take(chunk)
                    if not kept and chunk.response is not None:
                        kept = True
                        await in_thread(self._keep, request, chunk.response)
                    yield chunk
            except GeneratorExit:
                if not kept and heard.last.finish_reason is not None:  # it was left behind its end
                    await in_thread(self._keep, request, heard.whole(model))
                raise
        if not kept:
            # What somebody's own client tells may come in any of its chunks; an answer that was cut is none.
            with contextlib.suppress(StreamCut):
                await in_thread(self._keep, request, heard.whole(model))

    async def embed(self, texts: Sequence[str], *, model: str | None = None) -> list[list[float]]:
        return await self._client.embed(texts, model=model)

    async def moderate(self, text: str, *, model: str | None = None) -> dict[str, Any]:
        return await self._client.moderate(text, model=model)

    async def count_tokens(self, messages: list[Any], tools: list[dict[str, Any]] | None = None) -> int:
        return await self._client.count_tokens(messages, tools)

    def _keep(self, request: dict[str, Any], response: LLMResponse) -> None:
        # One at a time, or an earlier and shorter file could replace a later one.
        with self._lock:
            self.cassette.add(request, response)
            self.cassette.save(self._path)


@contextlib.asynccontextmanager
async def _closing(chunks: AsyncIterator[LLMStreamChunk]) -> AsyncIterator[AsyncIterator[LLMStreamChunk]]:
    try:
        yield chunks
    finally:
        # Somebody's own client may give an iterator that is no generator.
        if close := getattr(chunks, "aclose", None):
            await close()


def _told(response: LLMResponse) -> dict[str, Any]:
    told = {
        "message": response.message,
        "usage": response.usage,
        "model": response.model,
        "finish_reason": response.finish_reason,
    }
    return told | ({} if response.cost_usd is None else {"cost_usd": response.cost_usd})


def _exchange(tree: Any, where: str) -> Exchange:
    plain = _plain(tree, where)
    request = plain.get("request") if isinstance(plain, dict) else None
    response = plain.get("response") if isinstance(plain, dict) else None
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise InvalidArgument(f'{where} has no "request" with a list of "messages"')
    if not isinstance(response, dict) or not isinstance(response.get("message"), dict):
        raise InvalidArgument(f'{where} has no "response" with a "message"')
    return Exchange(request, response)


def _plain(tree: Any, where: str) -> Any:
    """The tree as JSON has it, so that what is compared later does not depend on how it was kept."""
    try:
        return json.loads(json.dumps(tree, allow_nan=False, default=_unwrapped))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where} cannot be kept in a cassette: {error}") from error


def _unwrapped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{brief(value)} is no JSON")


def _compared(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded request, with what it says nothing of (no tools, no name of a model) as it is asked now."""
    return {
        "messages": recorded["messages"],
        "model": asked["model"] if recorded.get("model") is None else recorded["model"],
        "tools": (recorded["tools"] or None) if "tools" in recorded else asked["tools"],
    }


def _pretty(tree: Any) -> str:
    text = json.dumps(tree, indent=2, ensure_ascii=False, sort_keys=True)
    # A lone surrogate would keep the whole text from being printed.
    return text.encode("utf-8", "backslashreplace").decode()


def _lines(request: Mapping[str, Any]) -> list[str]:
    """Pretty JSON cut to lines that a person can compare: long texts at their line breaks and every 120 characters."""
    lines = [part for line in _pretty(request).splitlines() for part in line.replace("\\n", "\\n\n").splitlines()]
    return [line[start : start + _WIDTH] for line in lines for start in range(0, len(line) or 1, _WIDTH)]
