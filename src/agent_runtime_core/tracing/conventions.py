"""Map spans and their messages to the GenAI conventions of OpenTelemetry, for our own loop and for all frameworks.

The conventions are github.com/open-telemetry/semantic-conventions-genai, "Development", as of November 2026. The
constants of the Python package are deprecated, so the names are strings here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from .spans import Span

LONGEST: Final = 64 * 1024  # characters of a content attribute
SETTINGS: Final = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
}
USAGE: Final = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "cache_write_tokens": "gen_ai.usage.cache_write.input_tokens",
    "reasoning_tokens": "gen_ai.usage.reasoning.output_tokens",
}
#: The names that the conventions give providers, by the names in this library and in the frameworks.
PROVIDERS: Final = {
    "amazon_bedrock": "aws.bedrock", "bedrock": "aws.bedrock", "bedrock_converse": "aws.bedrock",
    "anthropic_bedrock": "aws.bedrock", "azure": "azure.ai.openai", "azure_openai": "azure.ai.openai",
    "azure_ai": "azure.ai.inference", "google": "gcp.gemini", "google_gla": "gcp.gemini", "google_genai": "gcp.gemini",
    "gemini": "gcp.gemini", "google_vertex": "gcp.vertex_ai", "google_vertexai": "gcp.vertex_ai",
    "google_anthropic_vertex": "gcp.vertex_ai", "vertex_ai": "gcp.vertex_ai", "mistral": "mistral_ai",
    "mistralai": "mistral_ai", "moonshot": "moonshot_ai", "moonshotai": "moonshot_ai", "grok": "x_ai", "xai": "x_ai",
    "watsonx": "ibm.watsonx.ai", "ibm": "ibm.watsonx.ai",
}  # fmt: skip
OPERATION: Final = "gen_ai.operation.name"
AGENT: Final = "invoke_agent"
WORKFLOW: Final = "invoke_workflow"

#: Finish reasons that have another name in the conventions than in OpenAI's chat format.
_FINISH: Final = {
    "tool_calls": "tool_call", "function_call": "tool_call", "pause_turn": "stop", "refusal": "content_filter",
    "malformed_tool_call": "error",
}  # fmt: skip
_TEXTS: Final = frozenset({"text", "input_text", "output_text"})
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")  # fields with the reasoning of an answer
_SYSTEM: Final = frozenset({"system", "developer"})
_DATA: Final = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[^,]*)?,")


# -- attributes


def attributes_of(span: Span) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the attributes of a span, without contents; None for an event, which is no span."""
    make = _ATTRIBUTES.get(span.kind)
    return None if make is None else make(span)


def contents_of(span: Span) -> dict[str, Any]:
    """Return the attributes with the contents of a span. Their values are JSON of at most 65,536 characters."""
    about = span.about
    if span.kind == "tool":
        return {
            "gen_ai.tool.call.arguments": _value(about.get("input")),
            "gen_ai.tool.call.result": None if span.failed else _value(about.get("output")),
        }
    if span.kind not in ("agent", "chat"):
        return {}
    instructions, given = separated(messages_of(about.get("input"), "user"))
    answers = output_messages(about.get("output"), about.get("finish_reason"))
    return {
        "gen_ai.system_instructions": _fitted(instructions) if instructions else None,
        "gen_ai.input.messages": None if about.get("input") is None else _fitted(given),
        "gen_ai.output.messages": _fitted(answers) if answers else None,
    }


def _agent(span: Span) -> tuple[str, dict[str, Any]]:
    about = span.about
    operation = about.get("operation") or AGENT
    attributes = {
        OPERATION: operation,
        "gen_ai.agent.name" if operation == AGENT else "gen_ai.workflow.name": span.name,
        "gen_ai.conversation.id": text_of(about.get("conversation_id")),
        "agent_runtime.run_id": span.run_id,
        "agent_runtime.tenant": text_of(about.get("tenant")),
        "agent_runtime.attempt": about.get("attempt"),
        "agent_runtime.outcome": text_of(about.get("outcome")),
    }
    return f"{operation} {span.name}", attributes | _usage(about.get("usage"))


def _chat(span: Span) -> tuple[str, dict[str, Any]]:
    about = span.about
    settings = about.get("model_parameters") or {}
    output = about.get("output")
    reasons = [finish_reason(about.get("finish_reason"), output)] if output or about.get("finish_reason") else None
    attributes = {
        OPERATION: "chat",
        "gen_ai.provider.name": provider_name(about.get("provider")),
        "gen_ai.request.model": text_of(settings.get("model") or about.get("model") or None),
        "gen_ai.response.model": None if about.get("error") else text_of(about.get("model") or None),
        "gen_ai.response.finish_reasons": reasons,
        "agent_runtime.cost_usd": _number(about.get("cost_usd")),
        "agent_runtime.step.id": text_of(about.get("step_id")),
        **_of_run(span),
    }
    attributes |= {name: _number(settings.get(key)) for key, name in SETTINGS.items()}
    return f"chat {span.name}", attributes | _usage(about.get("usage"))


def _tool(span: Span) -> tuple[str, dict[str, Any]]:
    about = span.about
    attributes = {
        OPERATION: "execute_tool",
        "gen_ai.tool.name": span.name,
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": text_of(about.get("tool_call_id")),
        "agent_runtime.step.id": text_of(about.get("step_id")),
        **_of_run(span),
    }
    return f"execute_tool {span.name}", attributes


def _step(span: Span) -> tuple[str, dict[str, Any]]:
    about = span.about
    attributes: dict[str, Any] = {
        "agent_runtime.step.name": span.name,
        "agent_runtime.step.id": text_of(about.get("step_id")),
        "agent_runtime.step.attempt": about.get("attempt") or about.get("attempts"),
    }
    if span.name == "plan" and span.run.get("operation") == WORKFLOW:
        attributes[OPERATION] = "plan"
    return span.name, attributes


_ATTRIBUTES: Final[Mapping[str, Callable[[Span], tuple[str, dict[str, Any]]]]] = {
    "agent": _agent, "chat": _chat, "tool": _tool, "step": _step,
}  # fmt: skip


def _of_run(span: Span) -> dict[str, Any]:
    """Return the agent and the conversation of a span inside an execution."""
    is_agent = (span.run.get("operation") or AGENT) == AGENT
    return {
        "gen_ai.agent.name": text_of(span.run.get("agent_key")) if is_agent else None,
        "gen_ai.conversation.id": text_of(span.run.get("conversation_id")),
    }


def _usage(usage: Any) -> dict[str, Any]:
    given = usage if isinstance(usage, Mapping) else {}
    counts = {name: _number(given.get(key)) for key, name in USAGE.items()}
    cost = _number(given.get("cost_usd"))
    return counts if cost is None else counts | {"agent_runtime.cost_usd": cost}


def provider_name(name: Any) -> str | None:
    """Return the name of a provider in the conventions. Names that they do not know stay as they are."""
    text = text_of(name or None)
    return None if text is None else PROVIDERS.get(text.lower().replace("-", "_"), text)


def finish_reason(reason: Any, output: Any) -> str:
    """Return why an answer ended, in the words of the conventions.

    Args:
        reason: The reason in OpenAI's words; None if it is unknown.
        output: The answer. It says whether tools are called.
    """
    if not reason:
        return "tool_call" if isinstance(output, Mapping) and output.get("tool_calls") else "stop"
    return encodable(_FINISH.get(str(reason), str(reason)))


# -- messages


def messages_of(value: Any, role: str) -> list[dict[str, Any]]:
    """Return messages in the form of the conventions.

    Args:
        value: Messages in OpenAI's chat format. Any other value becomes a message with its JSON as text.
        role: The role of such a message.
    """
    if value is None:
        return []
    if isinstance(value, Sequence) and value and all(isinstance(each, Mapping) and "role" in each for each in value):
        return [_message(each) for each in value]
    return [{"role": role, "parts": [_text(value if isinstance(value, str) else _json(value))]}]


def separated(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the parts of the system messages that a request begins with, and its other messages."""
    count = next((n for n, each in enumerate(messages) if each["role"] not in _SYSTEM), len(messages))
    return [part for each in messages[:count] for part in each["parts"]], messages[count:]


def output_messages(output: Any, reason: Any) -> list[dict[str, Any]]:
    """Return an answer in the form of the conventions: of a model, or the result of a run."""
    if isinstance(output, Mapping) and output.keys() == {"response"}:  # the result of a `ToolCallingAgent`
        output = output["response"]
    answers = [output] if isinstance(output, Mapping) and "role" in output else output
    return [each | {"finish_reason": finish_reason(reason, output)} for each in messages_of(answers, "assistant")]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = str(message["role"]), message.get("content")
    made: dict[str, Any] = {"role": role}
    if role == "tool":
        is_parts = isinstance(content, list) and all(isinstance(each, Mapping) and "type" in each for each in content)
        response = [*_parts(content)] if is_parts else content
        made["parts"] = [
            {"type": "tool_call_response", **_id(message.get("tool_call_id")), "response": _plain(response)}
        ]
    else:
        reasoning = [{"type": "reasoning", "content": text} for text in _reasoning(message)]
        refusal = [{"type": "refusal", "content": str(message["refusal"])}] if message.get("refusal") else []
        calls = [_call(each) for each in message.get("tool_calls") or () if isinstance(each, Mapping)]
        made["parts"] = [*reasoning, *_parts(content), *refusal, *calls]
    if isinstance(message.get("name"), str):
        made["name"] = message["name"]
    return made


def _reasoning(message: Mapping[str, Any]) -> list[str]:
    """Return the reasoning of an answer, which providers put into fields and blocks with different names."""
    fields = message.get("provider_fields")
    for own in (message, *(fields.values() if isinstance(fields, Mapping) else ())):
        if not isinstance(own, Mapping):
            continue
        for name in _REASONING:
            if isinstance(text := own.get(name), str) and text:
                return [text]
        blocks = own.get("content") if own is not message else None
        found = [each.get("thinking") for each in blocks if isinstance(each, Mapping)] if type(blocks) is list else []
        if texts := [text for text in found if isinstance(text, str) and text]:
            return texts
    return []


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    named = function if isinstance(function, Mapping) else call
    arguments = named.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # the model wrote no JSON
            arguments = json.loads(arguments)
    name = str(named.get("name") or "")
    return {"type": "tool_call", **_id(call.get("id")), "name": name, "arguments": _plain(arguments)}


def _id(value: Any) -> dict[str, str]:
    return {} if value is None else {"id": str(value)}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def _parts(content: Any) -> Iterator[dict[str, Any]]:
    if isinstance(content, str):
        if content:
            yield _text(content)
        return
    for part in content if isinstance(content, list) else [] if content is None else [content]:
        yield _part(part) if isinstance(part, Mapping) else _text(part if isinstance(part, str) else _json(part))


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(part.get("type") or "unknown")
    if kind in _TEXTS:
        return _text(str(part.get("text") or ""))
    if kind in ("thinking", "reasoning"):
        return {"type": "reasoning", "content": str(part.get("thinking") or part.get("text") or "")}
    inner = part.get(kind)
    if kind == "image_url":
        url = inner.get("url") if isinstance(inner, Mapping) else inner
        return _referred(str(url or ""), "image")
    if kind == "input_image" and part.get("image_url"):
        return _referred(str(part["image_url"]), "image")
    if kind == "input_audio" and isinstance(inner, Mapping):
        return _blob("audio", f"audio/{inner.get('format') or 'wav'}", str(inner.get("data") or ""))
    if kind == "file" and isinstance(inner, Mapping):
        if inner.get("file_id"):
            return {"type": "file", "modality": "document", "file_id": str(inner["file_id"])}
        return _referred(str(inner.get("file_data") or ""), "document")
    return {**_plain(part), "type": kind}


def _referred(url: str, modality: str) -> dict[str, Any]:
    if (data := _DATA.match(url)) is not None:
        return _blob(modality, data[1], url[data.end() :])
    return {"type": "uri", "modality": modality, "uri": url}


def _blob(modality: str, mime_type: str | None, data: str) -> dict[str, Any]:
    """Return a file without its bytes, which are too large for a span."""
    known = {} if mime_type is None else {"mime_type": mime_type}
    return {"type": "blob", "modality": modality, **known, "content": "", "omitted_characters": len(data)}


# -- values


def _value(value: Any) -> str | None:
    """Return arguments or a result as an attribute: a text as it is, and other values as JSON."""
    if value is None:
        return None
    return text_of(value) if isinstance(value, str) else _fitted(_plain(value))


def _fitted(value: Any) -> str:
    """Return a value as JSON that is not too long: first its texts are shortened, then the oldest items are omitted."""
    for most in (None, LONGEST // 4, LONGEST // 16, LONGEST // 64, 256):
        text = _json(value if most is None else _cut(value, most))
        if len(text) <= LONGEST:
            return text
    if not isinstance(value, list) or not value:
        return _json(None)
    texts = [_json(_cut(each, 256)) for each in value]
    room, kept = LONGEST - 2, len(texts)
    while kept and (room := room - len(texts[kept - 1]) - 2) >= 0:
        kept -= 1
    return f"[{', '.join(texts[kept:])}]"


def _cut(value: Any, most: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= most else f"{value[:most]}…"
    if isinstance(value, dict):
        return {name: _cut(each, most) for name, each in value.items()}
    return [_cut(each, most) for each in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return a value as plain JSON values, so that it can be shortened."""
    return json.loads(_json(value))


def _json(value: Any) -> str:
    return encodable(json.dumps(value, ensure_ascii=False, skipkeys=True, default=str))


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def text_of(value: Any) -> str | None:
    """Return a value as the text of an attribute; None stays None."""
    return None if value is None else encodable(str(value)[:LONGEST])


def encodable(text: str) -> str:
    """Return the text without lone surrogates, with which a whole batch could not be sent."""
    return text.encode("utf-8", "replace").decode("utf-8")
