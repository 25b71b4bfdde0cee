"""Record a model's responses in a JSON file and replay them without a network.

The file is `{"version": 1, "exchanges": [{"request": ..., "response": ...}]}`. A request contains messages, model and
tools; a response contains message, usage, model, finish_reason, and cost_usd if it is known.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import itertools
import json
import os
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._core.ids import path_text
from .._core.threads import in_thread
from .._core.validation import Shown, must
from ..errors import AgentRuntimeError, StreamCut, brief
from ..interfaces import LLMClient, LLMResponse, LLMStreamChunk
from ..loop.model_calls import StreamBuffer
from .models import chunks_of

__all__ = ["Cassette", "CassetteMiss", "Exchange", "RecordingLLMClient", "ReplayLLMClient"]

VERSION = 1
_SHOWN_LINES = 40
_WIDTH = 120


class CassetteMiss(AgentRuntimeError, AssertionError):
    """No recording matches a request. The message shows the difference to the nearest recording."""


@dataclass(frozen=True)
class Exchange:
    """A request and the model's response, as JSON trees.

    Attributes:
        request: The request: messages, model, tools and options.
        response: The response of the model.
    """

    request: dict[str, Any]
    response: dict[str, Any]


@dataclass
class Cassette:
    """Exchanges in the order of their requests.

    Nothing is removed or redacted: images and secrets in messages or tool results are stored as they were sent.
    Check a file before you share it. It contains no API keys, because they are not part of a request.

    Attributes:
        exchanges: The exchanges.
    """

    exchanges: list[Exchange] = field(default_factory=list)

    def add(self, request: Mapping[str, Any], response: Mapping[str, Any] | LLMResponse) -> None:
        """Append a copy of an exchange.

        Args:
            request: The request.
            response: The response.

        Raises:
            InvalidArgument: It is not JSON-serializable, or the request contains no messages, or the response no
                message.
        """
        if isinstance(response, LLMResponse):
            response = _response_tree(response)
        self.exchanges.append(_exchange({"request": request, "response": response}, f"exchange {len(self.exchanges)}"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file atomically. An existing file is replaced.

        Args:
            path: The path of the file.
        """
        file = _file(path)
        tree = [{"request": each.request, "response": each.response} for each in self.exchanges]
        text = json.dumps({"version": VERSION, "exchanges": tree}, indent=2, ensure_ascii=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}-{threading.get_ident()}")
        try:
            # UTF-8 cannot encode a lone surrogate; its escape means the same in JSON.
            temporary.write_bytes(text.encode("utf-8", "backslashreplace") + b"\n")
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Cassette:
        """Read a file that `save` wrote or that was written by hand.

        Args:
            path: The path of the file.

        Returns:
            The cassette.

        Raises:
            InvalidArgument: The file does not exist or is not a cassette of this version.
        """
        file = _file(path)
        where = Shown(repr(str(path)))  # not cut: the name is at the end of a path
        try:
            tree = json.loads(file.read_bytes())
        except FileNotFoundError as error:
            raise must("cassette", "be an existing file", where, "Record one with RecordingLLMClient") from error
        except (ValueError, RecursionError, IsADirectoryError) as error:
            raise must("cassette", "be a JSON file", where, str(error)) from error
        if not isinstance(tree, dict) or tree.get("version") != VERSION or not isinstance(tree.get("exchanges"), list):
            constraint = f'have the form {{"version": {VERSION}, "exchanges": [...]}}'
            raise must(f"cassette {str(path)!r}", constraint, tree, "Record it again with RecordingLLMClient")
        return cls([_exchange(each, f"exchange {n} of {str(path)!r}") for n, each in enumerate(tree["exchanges"])])


def _file(path: str | os.PathLike[str]) -> Path:
    text = path_text(path)
    if text is None:
        raise must("path", "be a str or os.PathLike", path)
    return Path(text)


class ReplayLLMClient(LLMClient):
    """A client that replays recorded responses and never calls a model.

    A recording matches a request with equal messages and tools, and an equal model if a model was recorded. Other
    options are ignored. Each recording is replayed once. A request that is repeated more often than it was recorded
    raises CassetteMiss with `strict=True`, and gets its last response again with `strict=False`.

    Args:
        cassette: The path of a file, a cassette, or a list of exchanges as dicts.
        strict: Whether a request that is repeated too often raises CassetteMiss.

    Raises:
        InvalidArgument: The cassette is of another type or not valid.
    """

    def __init__(
        self, cassette: str | os.PathLike[str] | Cassette | Sequence[Mapping[str, Any]], *, strict: bool = True
    ) -> None:
        if isinstance(cassette, str | os.PathLike):
            cassette = Cassette.load(cassette)
        elif not isinstance(cassette, Cassette | Iterable):
            raise must("cassette", "be a Cassette, a list of exchanges or a path", cassette)
        elif not isinstance(cassette, Cassette):
            cassette = Cassette([_exchange(each, f"exchange {number}") for number, each in enumerate(cassette)])
        self._exchanges = list(cassette.exchanges)
        self._strict = strict
        self._used: set[int] = set()

    @property
    def unused(self) -> list[Exchange]:
        """The recordings that were not replayed yet."""
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
        self, messages: list[Any], *, model: str | None = None, tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> AsyncIterator[LLMStreamChunk]:
        for chunk in chunks_of(self._answer(messages, model, tools)):
            yield chunk

    def _answer(self, messages: list[Any], model: str | None, tools: list[dict[str, Any]] | None) -> LLMResponse:
        request = _json_tree({"messages": messages, "model": model, "tools": tools or None}, "the request")
        matching = [
            number for number, each in enumerate(self._exchanges) if _comparable(each.request, request) == request
        ]
        unused = [number for number in matching if number not in self._used]
        if not unused and (self._strict or not matching):
            raise self._miss(request, matching)
        number = unused[0] if unused else matching[-1]
        self._used.add(number)
        response = copy.deepcopy(self._exchanges[number].response)
        return LLMResponse(
            message=response["message"],
            usage=response.get("usage") or {},
            model=response.get("model") or model or "",
            finish_reason=response.get("finish_reason") or "",
            cost_usd=response.get("cost_usd"),
        )

    def _miss(self, request: dict[str, Any], matching: Sequence[int]) -> CassetteMiss:
        if matching:
            count = "once" if len(matching) == 1 else f"{len(matching)} times"
            return CassetteMiss(
                f"this request was recorded {count} and is sent once more. Record it again, "
                f"or replay with strict=False. Its last message is\n{_pretty(request['messages'][-1:])}"
            )
        if not self._exchanges:
            return CassetteMiss("the cassette is empty. Record one with RecordingLLMClient")
        number, lines = self._nearest(request)
        return CassetteMiss(
            f"no recording matches this request; exchange {number} of {len(self._exchanges)} (from 0) is the nearest"
            f"{' (already replayed)' if number in self._used else ''}:\n" + "\n".join(lines)
        )

    def _nearest(self, request: dict[str, Any]) -> tuple[int, list[str]]:
        """The number of the most similar recording, and the lines of its diff to the request."""
        wanted = _lines(request)
        matcher = difflib.SequenceMatcher(None, b=wanted, autojunk=False)
        best, found, similarity = 0, [""], -1.0
        for number, each in enumerate(self._exchanges):
            lines = _lines(_comparable(each.request, request))
            matcher.set_seq1(lines)
            if (ratio := matcher.quick_ratio()) > similarity:
                best, found, similarity = number, lines, ratio
        difference = list(difflib.unified_diff(found, wanted, "recorded", "sent", n=2, lineterm=""))
        if len(difference) > _SHOWN_LINES:
            left = len(difference) - _SHOWN_LINES + 1
            difference[_SHOWN_LINES - 1 :] = [f"… and {left} more lines"]
        return best, difference


class RecordingLLMClient(LLMClient):
    """A client that passes calls to `client` and saves the responses in a cassette file.

    The first response replaces an existing file, and the file is complete after every response. Exchanges are in the
    order of their requests, so equal concurrent requests get their own responses when they are replayed. Failed calls
    and streams that were not read to their end are not recorded. See Cassette for the data that such a file exposes.

    Args:
        client: The client that calls the model.
        path: The path of the file.

    Examples:
        >>> import asyncio
        >>> from agent_runtime_core import MockLLMClient
        >>> from agent_runtime_core.testing import RecordingLLMClient, ReplayLLMClient
        >>> ask = [{"role": "user", "content": "Hi"}]
        >>> _ = asyncio.run(RecordingLLMClient(MockLLMClient(["Hello!"]), "chat.json").generate(ask))
        >>> asyncio.run(ReplayLLMClient("chat.json").generate(ask)).message["content"]
        'Hello!'
    """

    def __init__(self, client: LLMClient, path: str | os.PathLike[str]) -> None:
        self._client = client
        self._path = _file(path)
        self._lock = threading.Lock()
        self._requests = itertools.count()
        self._numbers: dict[int, int] = {}  # the numbers of recorded requests, by the id of their exchange
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
        request = _json_tree({"messages": messages, "model": model, "tools": tools or None}, "the request")
        number = next(self._requests)
        response = await self._client.generate(
            messages, model=model, stream=stream, tools=tools, temperature=temperature, max_tokens=max_tokens, **kwargs
        )
        await in_thread(self._record, number, request, response)
        return response

    async def stream(
        self, messages: list[Any], *, model: str | None = None, tools: list[dict[str, Any]] | None = None, **kwargs: Any
    ) -> AsyncIterator[LLMStreamChunk]:
        request = _json_tree({"messages": messages, "model": model, "tools": tools or None}, "the request")
        number, buffer, recorded = next(self._requests), StreamBuffer(), False
        async with _closing(self._client.stream(messages, model=model, tools=tools, **kwargs)) as chunks:
            try:
                async for chunk in chunks:
                    buffer.take(chunk)
                    if not recorded and chunk.response is not None:
                        recorded = True
                        await in_thread(self._record, number, request, chunk.response)
                    yield chunk
            except GeneratorExit:
                if not recorded and buffer.last.finish_reason is not None:  # closed after its last chunk
                    await in_thread(self._record, number, request, buffer.whole(model))
                raise
        if not recorded:
            # A custom client may put usage and finish reason in any chunk. A truncated response is not recorded.
            with contextlib.suppress(StreamCut):
                await in_thread(self._record, number, request, buffer.whole(model))

    async def embed(self, texts: Sequence[str], *, model: str | None = None) -> list[list[float]]:
        return await self._client.embed(texts, model=model)

    async def moderate(self, text: str, *, model: str | None = None) -> dict[str, Any]:
        return await self._client.moderate(text, model=model)

    async def count_tokens(self, messages: list[Any], tools: list[dict[str, Any]] | None = None) -> int:
        return await self._client.count_tokens(messages, tools)

    def _record(self, number: int, request: dict[str, Any], response: LLMResponse) -> None:
        exchanges = self.cassette.exchanges
        # Without the lock an earlier and shorter file could replace a later file.
        with self._lock:
            self.cassette.add(request, response)
            added = exchanges.pop()
            later = (place for place, each in enumerate(exchanges) if self._numbers.get(id(each), -1) > number)
            exchanges.insert(next(later, len(exchanges)), added)
            self._numbers[id(added)] = number
            self.cassette.save(self._path)


@contextlib.asynccontextmanager
async def _closing(chunks: AsyncIterator[LLMStreamChunk]) -> AsyncIterator[AsyncIterator[LLMStreamChunk]]:
    try:
        yield chunks
    finally:
        # The iterator of a custom client may not be a generator.
        if close := getattr(chunks, "aclose", None):
            await close()


def _response_tree(response: LLMResponse) -> dict[str, Any]:
    tree = {
        "message": response.message,
        "usage": response.usage,
        "model": response.model,
        "finish_reason": response.finish_reason,
    }
    return tree | ({} if response.cost_usd is None else {"cost_usd": response.cost_usd})


def _exchange(tree: Any, where: str) -> Exchange:
    exchange = _json_tree(tree, where)
    request = exchange.get("request") if isinstance(exchange, dict) else None
    response = exchange.get("response") if isinstance(exchange, dict) else None
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise must(where, 'have a "request" with a list of "messages"', request)
    if not isinstance(response, dict) or not isinstance(response.get("message"), dict):
        raise must(where, 'have a "response" with a "message"', response)
    return Exchange(request, response)


def _json_tree(tree: Any, where: str) -> Any:
    """The value after a JSON round trip, so that recorded and new requests compare equal."""
    try:
        return json.loads(json.dumps(tree, allow_nan=False, default=_unwrapped))
    except (TypeError, ValueError, RecursionError) as error:
        raise must(
            where, "be JSON-serializable", Shown(error), "Use plain dicts, lists, strings and numbers"
        ) from error


def _unwrapped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{brief(value)} is not JSON-serializable")


def _comparable(recorded: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded request; a model or tools that it does not have are taken from the new request."""
    return {
        "messages": recorded["messages"],
        "model": request["model"] if recorded.get("model") is None else recorded["model"],
        "tools": (recorded["tools"] or None) if "tools" in recorded else request["tools"],
    }


def _pretty(tree: Any) -> str:
    text = json.dumps(tree, indent=2, ensure_ascii=False, sort_keys=True)
    # Printing a lone surrogate would raise UnicodeEncodeError.
    return text.encode("utf-8", "backslashreplace").decode()


def _lines(request: Mapping[str, Any]) -> list[str]:
    """Indented JSON, with long strings split at their line breaks and every 120 characters, for a readable diff."""
    lines = [part for line in _pretty(request).splitlines() for part in line.replace("\\n", "\\n\n").splitlines()]
    return [line[start : start + _WIDTH] for line in lines for start in range(0, len(line) or 1, _WIDTH)]
