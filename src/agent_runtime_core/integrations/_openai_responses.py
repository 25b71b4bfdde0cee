"""Answers of the models of OpenAI Agents as JSON, and back: what the journal keeps of a model call."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar, cast

from agents.exceptions import ModelBehaviorError
from agents.items import ModelResponse, TResponseOutputItem, TResponseStreamEvent
from agents.usage import Usage, deserialize_usage
from openai.types import responses
from pydantic import BaseModel, TypeAdapter

from .._core.clock import Clock
from ..loop.model_calls import DELTA_EVERY, MOST_OF_DELTA

T = TypeVar("T")

_USAGE: TypeAdapter[Usage] = TypeAdapter(Usage)
_FAILURES: dict[str, Any] = {
    "response.failed": responses.ResponseFailedEvent,
    "response.incomplete": responses.ResponseIncompleteEvent,
    "response.error": responses.ResponseErrorEvent,
    "error": responses.ResponseErrorEvent,
}
_KEPT = (
    "id",
    "created_at",
    "model",
    "object",
    "status",
    "error",
    "incomplete_details",
    "usage",
)  # of a failed response

# Fields of a streamed response, with the values of a response that was not streamed.
_RESPONSE: dict[str, Any] = {
    "created_at": 0.0,
    "model": "",
    "object": "response",
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "status": "completed",
}


def recorded(response: ModelResponse) -> dict[str, Any]:
    """Return an answer as JSON."""
    return {
        "output": [_plain(item) for item in response.output],
        "usage": _USAGE.dump_python(response.usage, mode="json"),
        "response_id": response.response_id,
        "request_id": response.request_id,
        "raw_usage": response.raw_usage,
    }


def recorded_stream(response: responses.Response, items: list[TResponseOutputItem]) -> dict[str, Any]:
    """Return a streamed answer as JSON, in the form of `recorded`.

    Args:
        response: The response of the last event.
        items: The items of earlier events. Some servers leave them out of the last event.
    """
    usage = Usage()
    if response.usage is not None:
        usage = Usage(
            requests=1,
            input_tokens=response.usage.input_tokens or 0,
            output_tokens=response.usage.output_tokens or 0,
            total_tokens=response.usage.total_tokens or 0,
            input_tokens_details=response.usage.input_tokens_details,
            output_tokens_details=response.usage.output_tokens_details,
        )
    answer = recorded(
        ModelResponse(
            output=response.output or items,
            usage=usage,
            response_id=response.id,
            request_id=getattr(response, "_request_id", None),
        )
    )
    return {**answer, "model": response.model, "created_at": response.created_at}


def answered(record: dict[str, Any]) -> ModelResponse:
    """Return the answer of a record."""
    return ModelResponse(
        output=_items(record),
        usage=deserialize_usage(record["usage"]),
        response_id=record["response_id"],
        request_id=record["request_id"],
        raw_usage=record["raw_usage"],
    )


def events_of(record: dict[str, Any]) -> Iterator[TResponseStreamEvent]:
    """Return the events of a recorded answer, with each text as one delta."""
    usage = record["usage"]
    fields = {name: record.get(name, default) for name, default in _RESPONSE.items()}
    reported = None
    if usage["requests"]:
        reported = responses.ResponseUsage.construct(
            **{name: usage[name] for name in ("input_tokens", "output_tokens", "total_tokens")},
            input_tokens_details=usage["input_tokens_details"],
            output_tokens_details=usage["output_tokens_details"],
        )
    response = responses.Response.construct(
        id=record["response_id"] or "", output=record["output"], usage=reported, **fields
    )
    response._request_id = record["request_id"]
    started = response.model_copy(update={"output": [], "usage": None, "status": "in_progress"})
    yield responses.ResponseCreatedEvent(type="response.created", response=started, sequence_number=0)
    number = 0
    for index, item in enumerate(response.output):
        for event in _item_events(item, index, number):
            number = event.sequence_number
            yield event
    yield responses.ResponseCompletedEvent(type="response.completed", response=response, sequence_number=number + 1)


def _item_events(item: Any, index: int, number: int) -> Iterator[Any]:
    yield responses.ResponseOutputItemAddedEvent.construct(
        type="response.output_item.added", item=item, output_index=index, sequence_number=number + 1
    )
    for place, part in enumerate(item.content or [] if item.type == "message" else []):
        if part.type == "output_text":
            number += 1
            yield responses.ResponseTextDeltaEvent.construct(
                type="response.output_text.delta", content_index=place, delta=part.text, item_id=item.id,
                logprobs=[], output_index=index, sequence_number=number + 1,
            )  # fmt: skip
    yield responses.ResponseOutputItemDoneEvent.construct(
        type="response.output_item.done", item=item, output_index=index, sequence_number=number + 2
    )


def _items(record: dict[str, Any]) -> list[TResponseOutputItem]:
    # `construct` does not validate: servers of third parties leave out fields that the SDK's types require.
    return list(responses.Response.construct(output=record["output"]).output)


def _plain(item: Any) -> Any:
    return item.model_dump(mode="json", exclude_unset=True, warnings=False) if isinstance(item, BaseModel) else item


class NoAnswer(ModelBehaviorError):
    """A stream ended without an answer. The SDK makes its own error of the last event.

    Args:
        event: The event that ended it. If None, the events just ended.

    Attributes:
        last_event: What its record keeps of that event.
    """

    last_event: dict[str, Any] | None = None

    def __init__(self, event: Any = None) -> None:
        super().__init__(
            "the model's stream ended without an answer"
            if event is None
            else f"the model's stream ended with {event.type}: {_reason(event)}"
        )
        if isinstance(event, BaseModel):
            self.last_event = _plain(event)
            if "response" in self.last_event:
                response = self.last_event["response"]
                self.last_event["response"] = {name: response[name] for name in _KEPT if name in response}

    def events(self) -> list[TResponseStreamEvent]:
        """Return the event that ended the stream, in a list."""
        event = self.last_event
        return [] if event is None else [_FAILURES[event["type"]].construct(**event)]


@asynccontextmanager
async def closing(events: AsyncIterator[T]) -> AsyncIterator[AsyncIterator[T]]:
    """Close a stream of a model after the block, if it can be closed: it may hold a lock or a connection."""
    try:
        yield events
    finally:
        close = getattr(events, "aclose", None)
        if close is not None:
            await close()


async def consumed(
    events: AsyncIterator[TResponseStreamEvent],
    forward: Callable[[TResponseStreamEvent], None],
    keep: Callable[[TResponseStreamEvent], None],
    publish: Callable[[str], Awaitable[None]],
    clock: Clock,
) -> dict[str, Any]:
    """Return the answer of a stream as JSON.

    Args:
        events: The stream.
        forward: Gets each event before the last event.
        keep: Gets the last event, and the events that follow it.
        publish: Gets the text of the answer, in parts.
        clock: Limits how often it does.

    Raises:
        NoAnswer: The stream contains no answer.
    """
    items: list[TResponseOutputItem] = []
    text, published_at = "", clock.boot()
    answer: dict[str, Any] | None = None
    async for event in events:
        kind = getattr(event, "type", None)
        if isinstance(event, responses.ResponseCompletedEvent):
            answer = recorded_stream(event.response, items)
        if answer is not None or kind in _FAILURES:
            keep(event)
            if answer is None:
                raise NoAnswer(event)
            continue
        if isinstance(event, responses.ResponseOutputItemDoneEvent):
            items.append(event.item)
        elif isinstance(event, responses.ResponseTextDeltaEvent):
            text += event.delta
        forward(event)
        if text and (len(text) >= MOST_OF_DELTA or clock.boot() - published_at >= DELTA_EVERY):
            await publish(text)
            text, published_at = "", clock.boot()
    if text:
        await publish(text)
    if answer is None:
        raise NoAnswer
    return answer


def _reason(event: Any) -> str:
    """Return why a stream failed, as the provider says it."""
    response = getattr(event, "response", None)
    for each in (event, getattr(response, "error", None), getattr(response, "incomplete_details", None)):
        reason = getattr(each, "message", None) or getattr(each, "reason", None)
        if reason:
            return str(reason)
    return "the provider gave no reason"


def model_of(record: dict[str, Any]) -> str:
    """Return the name of the model that answered, "" if it is unknown."""
    return cast(str, record.get("model") or "")
