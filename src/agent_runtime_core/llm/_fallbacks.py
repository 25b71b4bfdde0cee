"""Change a request that its server rejects, send it once more, and change later requests before they are sent."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Final
from urllib.parse import urlsplit

from .._core.arguments import SYSTEM_ROLES
from .._core.log import log
from ..errors import ProviderError
from ._openai_format import is_empty
from ._provider import Request

Messages = Sequence[Mapping[str, Any]]
#: What the model says between the result of a tool and a message of the user.
_ACKNOWLEDGED: Final = {"role": "assistant", "content": "OK."}


def merged(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with consecutive messages of the user, or of the model, joined."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if is_empty(message):
            continue  # it is not sent, so the messages around it follow each other
        before = found[-1] if found else {}
        role = message.get("role")
        if role in ("user", "assistant") and role == before.get("role") and not before.get("tool_calls"):
            found[-1] = {**before, **message, "content": joined(_content(before), _content(message))}
        else:
            found.append(dict(message))
    return found


def with_one_system_message(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with the contents of all system messages in one message at the beginning."""
    system = [dict(each) for each in messages if each.get("role") in SYSTEM_ROLES]
    rest = [dict(each) for each in messages if each.get("role") not in SYSTEM_ROLES]
    if not system:
        return rest
    return [{**system[0], "content": reduce(joined, map(_content, system))}, *rest]


def without_system_messages(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with the system messages as text of the user."""
    return merged([{**each, "role": "user"} if each.get("role") in SYSTEM_ROLES else each for each in messages])


def with_answers_to_results(messages: Messages) -> list[dict[str, Any]]:
    """Return the messages with one of the model between the result of a tool and a message of the user."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if is_empty(message):
            continue
        if message.get("role") == "user" and found and found[-1].get("role") == "tool":
            found.append(dict(_ACKNOWLEDGED))
        found.append(dict(message))
    return found


def joined(first: Any, second: Any) -> Any:
    """Join two contents: texts with an empty line between them, parts in one list."""
    if isinstance(first, list) or isinstance(second, list):
        return [*_parts(first), *_parts(second)]
    return "\n\n".join(_text(each) for each in (first, second) if each)


def _content(message: Mapping[str, Any]) -> Any:
    return message.get("content") or message.get("refusal")


def _parts(content: Any) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": _text(content)}] if content else []


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


#: Fields with a model's reasoning, under the names of all servers.
REASONING_FIELDS = frozenset(
    {"reasoning", "reasoning_content", "reasoning_details", "reasoning_items", "reasoning_text", "thinking",
     "thinking_blocks", "thinking_content", "thoughts"}
)  # fmt: skip
#: Servers that return a model's reasoning and reject it in a request, or never return it.
_WITHOUT_REASONING = ("openai.com", "azure.com", "groq.com", "cerebras.ai", "mistral.ai")
_PREFIXES_WITHOUT_REASONING = ("groq", "cerebras", "mistral", "codestral", "azure")
_STATUSES = (400, 422)
_SCHEMA_STATUSES = (400, 404, 422, 501)
_UNKNOWN_FIELD = re.compile(
    r"(extra|additional|unexpected|unknown|unrecognized|unsupported|invalid) (request )?"
    r"(inputs?|fields?|keys?|propert(y|ies)|names?|parameters?|arguments?|keyword)"
    r"|additionalproperties"
    r"|(propert(y|ies)|fields?|parameters?) .{0,80}(not (permitted|allowed|supported)|unsupported)",
    re.I,
)
#: DeepSeek and Moonshot want the reasoning of some messages back.
_WANTED = re.compile(r"\bmissing\b|\b(is|are) required\b|must be (passed|provided|sent|included)|field required", re.I)
#: They accept any text for a message without reasoning. Moonshot takes an empty text for missing.
_NO_REASONING = " "
#: A parameter that this model of the server does not accept, or accepts with another value only.
_NOT_SUPPORTED = re.compile(r"(not|n't) support|unsupported|deprecated|not (allowed|permitted)|only the default", re.I)
_NO_SCHEMA = re.compile(
    r"response[ _-]?(format|schema|mime[ _-]?type)|json[ _-]?(mode|schema|object|response|format|output)"
    r"|structured[ _]?output|guided[ _](json|decoding)|schema produces a constraint",
    re.I,
)
#: A mistake in the schema, which its author must see.
_WRONG_SCHEMA = re.compile(r"invalid (json )?schema", re.I)
_NO_STREAM_OPTIONS = re.compile(r"stream[ _]options|include_usage", re.I)
#: Chat templates that demand alternating roles; llama.cpp reports their errors with status 500.
_TEMPLATE_STATUSES = (400, 422, 500, None)
_ALTERNATING = (
    r"\balternat(e|es|ing)\b|\b(successive|consecutive|interleave)\b|unexpected role|expected last role|same role"
    r"|roles? in a row|role of message with (even|odd) index"
)
_ONE_SYSTEM_MESSAGE = (
    r"system.{0,60}\b(beginning|start|first|once|only|after role)\b"
    r"|\b(one|single|multiple|several|more than one|two)\b.{0,15}system|" + _ALTERNATING
)
_NO_SYSTEM_MESSAGE = (
    r"(system|developer)['\"`]? (role|messages?|prompts?|instructions?)\b.{0,20}"
    r"(not|n't|un) ?(be )?(support|allow|enabl)"
    r"|(not|n't) (support|allow)\w* ['\"`]?(system|developer)"
)
_ANSWER = "Your final answer must be {form}, without any other text."


@dataclass(frozen=True)
class Fallback:
    """A change of rejected requests.

    Attributes:
        name: What the change omits, for the log.
        statuses: The HTTP statuses of such a rejection; None is an error in a stream.
        rejected: Returns whether the words of the error complain about a part that is in the request.
        change: Returns the request without this part. Repeating the change changes nothing.
        option: The option of the client that makes the change from the first request on, or "".
    """

    name: str
    statuses: tuple[int | None, ...]
    rejected: Callable[[str, Request], bool]
    change: Callable[[Request], Request]
    option: str = ""


class Fallbacks:
    """The changes that the requests of one client need, for each model.

    Args:
        table: All possible changes. The first that fits an error is tried.
        always: Returns the names of the changes of every request to a model.
    """

    def __init__(
        self, table: Sequence[Fallback] = (), always: Callable[[str], Collection[str]] = lambda model: ()
    ) -> None:
        self._table, self._always = table, always
        self._remembered: dict[str, frozenset[str]] = {}

    def known(self, request: Request) -> Request:
        """Return a new request with the changes that its server is known to need."""
        return self._changed(request, {*self._always(request.model), *self._remembered.get(request.model, ())})

    def after(self, error: ProviderError, request: Request) -> Request | None:
        """Return the request to send after an error; None if no further change helps."""
        text = str(error)
        for each in self._table:
            if each.name not in request.changes and error.status in each.statuses and each.rejected(text, request):
                log.info("%s, %s: request rejected; retrying once without %s", error.provider, error.model, each.name)
                # All changes, because this change may add what an earlier change omits.
                return self._changed(request, {*request.changes, each.name})
        return None

    def _changed(self, request: Request, names: Collection[str]) -> Request:
        for each in self._table:
            if each.name in names:
                request = each.change(request)
        return replace(request, changes=frozenset(names))

    def remember(self, request: Request) -> None:
        """Make the changes of an answered request in all later requests to its model."""
        known = self._remembered.get(request.model, frozenset())
        new = request.changes - known - frozenset(self._always(request.model))
        if not new:
            return
        self._remembered[request.model] = known | new
        for each in self._table:
            if each.name in new:
                how = f". {each.option} saves the rejected request" if each.option else ""
                log.warning(
                    "model %r: server rejects %s; later requests are sent without%s", request.model, each.name, how
                )


def _reordered(name: str, rejection: str, change: Callable[[Messages], list[dict[str, Any]]]) -> Fallback:
    """Return the fallback that changes the order of messages, if that changes anything."""
    pattern = re.compile(rejection, re.I)
    return Fallback(
        name,
        _TEMPLATE_STATUSES,
        lambda text, request: bool(pattern.search(text)) and change(request.messages) != list(request.messages),
        lambda request: replace(request, messages=change(request.messages)),
    )


_ORDER = [
    _reordered("system messages after the first message", _ONE_SYSTEM_MESSAGE, with_one_system_message),
    _reordered("system messages", _NO_SYSTEM_MESSAGE, without_system_messages),
    _reordered("consecutive messages of one role", _ALTERNATING, merged),
    _reordered("messages of the user after results of tools", _ALTERNATING, with_answers_to_results),
]


def openai_fallbacks(
    provider: str, endpoint: str, *, send_reasoning: bool | None, schema_in_prompt: bool | None, by_prefix: bool = False
) -> Fallbacks:
    """Return the fallbacks of a client for servers that are compatible with OpenAI.

    Args:
        provider: The provider whose fields the messages have.
        endpoint: The server's URL, "" if it is unknown.
        send_reasoning: Whether to send a model's reasoning back; None depends on the server.
        schema_in_prompt: Whether to describe a response format in the prompt; None depends on the server.
        by_prefix: Whether model names begin with the name of their provider.
    """
    reasoning = Fallback(
        "reasoning",
        _STATUSES,
        lambda text, request: _complains(text, request, provider, _fields(request, provider) & REASONING_FIELDS),
        lambda request: _without_fields(request, provider, lambda name: name in REASONING_FIELDS),
        "send_reasoning=False",
    )
    kept = REASONING_FIELDS | {"tool_calls"}
    demanded = Fallback(
        "missing reasoning_content",
        _STATUSES,
        lambda text, request: _demands_reasoning(text) and _with_reasoning(request, provider) != request,
        lambda request: _with_reasoning(request, provider),
    )
    others = Fallback(
        "fields of its messages",
        _STATUSES,
        lambda text, request: _complains(text, request, provider, _fields(request, provider) - REASONING_FIELDS),
        lambda request: _without_fields(request, provider, lambda name: name not in kept, top=False),
    )
    calls = Fallback(
        "fields of its tool calls",
        _STATUSES,
        lambda text, request: _complains(text, request, provider, _call_fields(request, provider)),
        lambda request: _without_fields(request, provider, lambda name: name == "tool_calls", top=False),
    )
    schema = Fallback(
        "response_format", _SCHEMA_STATUSES, _rejects_schema, _with_schema_in_prompt, "schema_in_prompt=True"
    )
    options = Fallback(
        "stream_options",
        _STATUSES,
        lambda text, request: bool(_NO_STREAM_OPTIONS.search(text)),
        lambda request: replace(request, extra={**request.extra, "stream_options": None}),
    )
    table = [options, *_PARAMETERS, others, calls]
    if schema_in_prompt is not False:
        table.append(schema)
    if send_reasoning is not True:
        table.insert(0, reasoning)
    table += _ORDER
    if send_reasoning is not False:
        table.append(demanded)

    def always(model: str) -> Collection[str]:
        names = {schema.name} if schema_in_prompt else set()
        if send_reasoning is False or (send_reasoning is None and _refuses_reasoning(endpoint, by_prefix, model)):
            names.add(reasoning.name)
        return names

    return Fallbacks(table, always)


def _rejects_temperature(text: str, request: Request) -> bool:
    return request.temperature is not None and _is_named("temperature", text) and bool(_NOT_SUPPORTED.search(text))


def _rejects_max_tokens(text: str, request: Request) -> bool:
    return request.max_tokens is not None and _is_named("max_tokens", text) and _is_named("max_completion_tokens", text)


def _with_max_completion_tokens(request: Request) -> Request:
    if request.max_tokens is None:
        return request
    extra = {"max_completion_tokens": request.max_tokens, **request.extra}
    return replace(request, max_tokens=None, extra=extra)


def _demands_reasoning(text: str) -> bool:
    return _is_named("reasoning_content", text) and bool(_WANTED.search(text))


def _with_reasoning(request: Request, provider: str) -> Request:
    """Return the request with a text as reasoning of the answers without it, such as answers of another model."""
    messages = [
        message
        if message.get("role") != "assistant" or "reasoning_content" in _own_fields(message, provider)
        else {"reasoning_content": _NO_REASONING, **message}
        for message in request.messages
    ]
    return replace(request, messages=messages)


#: Reasoning models reject these, and some model names do not show that the model reasons.
_PARAMETERS = (
    Fallback("temperature", _STATUSES, _rejects_temperature, lambda request: replace(request, temperature=None)),
    Fallback("max_tokens", _STATUSES, _rejects_max_tokens, _with_max_completion_tokens),
)


def _refuses_reasoning(endpoint: str, by_prefix: bool, model: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    if any(host == known or host.endswith("." + known) for known in _WITHOUT_REASONING):
        return True
    return by_prefix and not host and model.partition("/")[0] in _PREFIXES_WITHOUT_REASONING


def _own_fields(message: Mapping[str, Any], provider: str) -> Mapping[str, Any]:
    fields = (message.get("provider_fields") or {}).get(provider)
    return fields if isinstance(fields, Mapping) else {}


def _fields(request: Request, provider: str) -> set[str]:
    """Return the names of the fields that only some servers accept."""
    names: set[str] = set()
    for message in request.messages:
        if message.get("role") == "assistant":
            names |= _own_fields(message, provider).keys() - {"tool_calls"} | message.keys() & REASONING_FIELDS
    return names


def _call_fields(request: Request, provider: str) -> set[str]:
    return {
        name
        for message in request.messages
        for fields in (_own_fields(message, provider).get("tool_calls") or {}).values()
        for name in fields
    }


def _complains(text: str, request: Request, provider: str, names: Collection[str]) -> bool:
    """Return whether an error complains about a field of `names`, by its name or without any name."""
    if any(_is_named(name, text) for name in names):
        return not _WANTED.search(text)
    if not names or not _UNKNOWN_FIELD.search(text):
        return False
    return not any(_is_named(name, text) for name in _fields(request, provider) | _call_fields(request, provider))


def _is_named(name: str, text: str) -> bool:
    return bool(re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", text))


def _without_fields(request: Request, provider: str, omitted: Callable[[str], bool], *, top: bool = True) -> Request:
    messages = []
    for message in request.messages:
        own = _own_fields(message, provider)
        kept = {name: value for name, value in own.items() if not omitted(name)}
        if message.get("role") == "assistant":
            changed = {name: value for name, value in message.items() if not (top and omitted(name))}
            if own:
                changed["provider_fields"] = {**message["provider_fields"], provider: kept}
            message = changed
        messages.append(message)
    return replace(request, messages=messages)


def _rejects_schema(text: str, request: Request) -> bool:
    wanted = request.extra.get("response_format")
    is_json = isinstance(wanted, Mapping) and wanted.get("type") in ("json_schema", "json_object")
    return is_json and bool(_NO_SCHEMA.search(text)) and not _WRONG_SCHEMA.search(text)


def _with_schema_in_prompt(request: Request) -> Request:
    """Return the request with a system text that describes the answer, instead of a response format."""
    wanted = request.extra.get("response_format")
    if not isinstance(wanted, Mapping) or wanted.get("type") not in ("json_schema", "json_object"):
        return request
    schema = (wanted.get("json_schema") or {}).get("schema")
    text = _ANSWER.format(form="JSON that matches the JSON Schema below" if schema else "a JSON object")
    if schema:
        text += "\n" + json.dumps(schema, ensure_ascii=False)
    first, *rest = request.messages
    if first.get("role") in SYSTEM_ROLES:
        # Many servers accept only one system message.
        messages = [{**first, "content": joined(first.get("content"), text)}, *rest]
    else:
        messages = [{"role": "system", "content": text}, first, *rest]
    extra = {name: value for name, value in request.extra.items() if name != "response_format"}
    return replace(request, messages=messages, extra=extra)
