"""Messages in spans: they validate against the published JSON schemas of the GenAI conventions, whatever they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("jsonschema")

from agent_runtime_core._core.ids import RunTrace
from agent_runtime_core.tracing.conventions import LONGEST, attributes_of, contents_of, provider_name
from agent_runtime_core.tracing.spans import Kind, Span, SpanError
from tests.support.gen_ai import messages_in

IMAGE = "data:image/png;base64,iVBORw0KGgo="


def span(about: dict[str, Any], kind: Kind = "chat", error: SpanError | None = None, **run: Any) -> Span:
    at = RunTrace("0192f000-0000-7000-8000-00000000000a").execution
    return Span("r", run, at, None, kind, "m", 0.0, 1.0, about, (), error, error is not None)


def valid_contents(about: dict[str, Any], kind: Kind = "chat") -> dict[str, Any]:
    """Return the content attributes of a span as values; each one validates against its schema."""
    found = contents_of(span(about, kind))
    assert all(len(text) <= LONGEST for text in found.values() if text is not None)
    return dict(messages_in(found))


def test_a_conversation_with_tools() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"city": "Bern"}'}}
    values = valid_contents(
        {
            "input": [
                {"role": "system", "content": "You know the weather."},
                {"role": "user", "content": "How is it?", "name": "ann"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "rainy"},
            ],
            "output": {"role": "assistant", "content": "It rains."},
            "finish_reason": "stop",
        }
    )
    assert values == {
        "gen_ai.system_instructions": [{"type": "text", "content": "You know the weather."}],
        "gen_ai.input.messages": [
            {"role": "user", "parts": [{"type": "text", "content": "How is it?"}], "name": "ann"},
            {
                "role": "assistant",
                "parts": [{"type": "tool_call", "id": "c1", "name": "look", "arguments": {"city": "Bern"}}],
            },
            {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "rainy"}]},
        ],
        "gen_ai.output.messages": [
            {"role": "assistant", "parts": [{"type": "text", "content": "It rains."}], "finish_reason": "stop"}
        ],
    }


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "text", "text": "hi"}, {"type": "text", "content": "hi"}),
        ("hi", {"type": "text", "content": "hi"}),
        (
            {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
            {"type": "uri", "modality": "image", "uri": "https://example.com/a.png"},
        ),
        (
            {"type": "image_url", "image_url": {"url": IMAGE}},
            {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "", "omitted_characters": 12},
        ),
        (
            {"type": "input_image", "image_url": IMAGE},
            {"type": "blob", "modality": "image", "mime_type": "image/png", "content": "", "omitted_characters": 12},
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "mp3"}},
            {"type": "blob", "modality": "audio", "mime_type": "audio/mp3", "content": "", "omitted_characters": 4},
        ),
        ({"type": "file", "file": {"file_id": "f-1"}}, {"type": "file", "modality": "document", "file_id": "f-1"}),
        ({"type": "thinking", "thinking": "hm"}, {"type": "reasoning", "content": "hm"}),
        ({"type": "search_result", "source": "x"}, {"type": "search_result", "source": "x"}),
        ({"text": "no type"}, {"type": "unknown", "text": "no type"}),
    ],
)
def test_the_parts_of_a_message(part: Any, expected: dict[str, Any]) -> None:
    values = valid_contents({"input": [{"role": "user", "content": [part]}]})
    assert values["gen_ai.input.messages"] == [{"role": "user", "parts": [expected]}]


@pytest.mark.parametrize(
    "answer",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"provider_fields": {"deepseek": {"reasoning_content": "hm"}}},
        {"provider_fields": {"anthropic": {"content": [{"type": "thinking", "thinking": "hm", "signature": "s"}]}}},
        {"content": [{"type": "thinking", "thinking": "hm"}]},
    ],
)
def test_the_reasoning_of_an_answer(answer: dict[str, Any]) -> None:
    values = valid_contents({"output": {"role": "assistant", **answer}})
    assert values["gen_ai.output.messages"][0]["parts"] == [{"type": "reasoning", "content": "hm"}]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("stop", "stop"),
        ("tool_calls", "tool_call"),
        ("function_call", "tool_call"),
        ("length", "length"),
        ("refusal", "content_filter"),
        ("malformed_tool_call", "error"),
        ("something_new", "something_new"),
        (None, "stop"),
    ],
)
def test_finish_reasons(reason: str | None, expected: str) -> None:
    about = {"output": {"role": "assistant", "content": "x"}, "finish_reason": reason}
    [answer] = valid_contents(about)["gen_ai.output.messages"]
    found = attributes_of(span(about))
    assert found is not None
    assert [answer["finish_reason"]] == found[1]["gen_ai.response.finish_reasons"] == [expected]


def test_an_answer_without_a_reason_that_calls_tools_has_that_reason() -> None:
    answer = {"role": "assistant", "tool_calls": [{"id": None, "function": {"name": "f", "arguments": "no JSON"}}]}
    [found] = valid_contents({"output": answer})["gen_ai.output.messages"]
    assert found == {
        "role": "assistant",
        "parts": [{"type": "tool_call", "name": "f", "arguments": "no JSON"}],
        "finish_reason": "tool_call",
    }


@pytest.mark.parametrize("given", ["a text", {"city": "Bern"}, [1, 2], [], [{"city": "Bern"}], 0, False, [None]])
@pytest.mark.parametrize("kind", ["agent", "chat"])
def test_values_that_are_no_messages_are_texts(given: Any, kind: Kind) -> None:
    values = valid_contents({"input": given, "output": given}, kind)
    text = given if isinstance(given, str) else json.dumps(given)
    assert values["gen_ai.input.messages"] == [{"role": "user", "parts": [{"type": "text", "content": text}]}]
    assert values["gen_ai.output.messages"][0]["parts"] == [{"type": "text", "content": text}]


def test_the_response_of_an_agent_is_its_answer() -> None:
    values = valid_contents({"input": [], "output": {"response": "sunny"}}, "agent")
    assert values["gen_ai.output.messages"][0]["parts"] == [{"type": "text", "content": "sunny"}]


def test_without_values_there_is_no_attribute() -> None:
    assert valid_contents({"input": None, "output": None}) == {}
    assert valid_contents({"output": None, "error": "E: x"}) == {}


def test_long_contents_stay_valid_and_keep_the_last_messages() -> None:
    long = [{"role": "user", "content": f"{number} " + "x" * 200_000} for number in range(3)]
    found = valid_contents({"input": long})["gen_ai.input.messages"]
    assert [each["parts"][0]["content"][:2] for each in found] == ["0 ", "1 ", "2 "]
    many = [{"role": "user", "content": f"{number} " + "z" * 200} for number in range(1000)]
    found = valid_contents({"input": many})["gen_ai.input.messages"]
    assert found[-1]["parts"][0]["content"] == many[-1]["content"]
    assert 100 < len(found) < 1000
    arguments = {"id": "c", "function": {"name": "f", "arguments": json.dumps({"a": ["y" * 100_000]})}}
    [answer] = valid_contents({"output": {"role": "assistant", "tool_calls": [arguments]}})["gen_ai.output.messages"]
    assert answer["parts"][0]["arguments"]["a"][0].endswith("y…")


def test_odd_values_cost_no_span() -> None:
    odd = {"role": "user", "content": [{"type": "x", "when": object(), ("a", "key"): 1, "lone": "\ud800"}]}
    [message] = valid_contents({"input": [odd]})["gen_ai.input.messages"]
    assert message["parts"][0]["lone"] == "?"
    assert valid_contents({"input": "\ud800"})["gen_ai.input.messages"][0]["parts"][0]["content"] == "?"


def test_a_tool_call_has_its_arguments_as_an_object() -> None:
    found = contents_of(span({"input": {"city": "Bern"}, "output": "rainy"}, "tool"))
    assert found == {"gen_ai.tool.call.arguments": '{"city": "Bern"}', "gen_ai.tool.call.result": "rainy"}
    failed = contents_of(span({"input": {}, "output": "Error: no"}, "tool", SpanError("failed", "Error: no")))
    assert failed["gen_ai.tool.call.result"] is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("openai", "openai"),
        ("google-gla", "gcp.gemini"),
        ("google_genai", "gcp.gemini"),
        ("bedrock", "aws.bedrock"),
        ("amazon_bedrock", "aws.bedrock"),
        ("azure", "azure.ai.openai"),
        ("mistralai", "mistral_ai"),
        ("xai", "x_ai"),
        ("MyClient", "MyClient"),
        (None, None),
        ("", None),
    ],
)
def test_providers_have_the_names_of_the_conventions(name: str | None, expected: str | None) -> None:
    assert provider_name(name) == expected


def test_calls_of_models_and_tools_name_their_agent_and_conversation() -> None:
    kinds: tuple[Kind, ...] = ("chat", "tool")
    for kind in kinds:
        found = attributes_of(span({}, kind, agent_key="clerk", conversation_id="c-1"))
        assert found is not None
        assert (found[1]["gen_ai.agent.name"], found[1]["gen_ai.conversation.id"]) == ("clerk", "c-1")
