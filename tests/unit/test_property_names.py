"""Names of properties that Claude refuses are mapped in requests, and mapped back in answers."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_runtime_core.errors import ProviderError
from agent_runtime_core.llm import ChatClient
from agent_runtime_core.llm._client import renamed_tools, with_real_names, with_sent_names
from agent_runtime_core.llm._provider import Completion, ProviderAdapter, Request, Timeouts
from agent_runtime_core.llm._schemas import property_names

CLAUDE = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
NAMES = st.one_of(
    st.sampled_from(["filter[name]", "filter_name_", "filter(name)", "$top", "_top", "a b", "a_b", "a.b", "", "π"]),
    st.text(st.characters(codec="utf-8"), max_size=5),
    st.just("x" * 65),
    st.just("x" * 60 + "["),
)
LEAVES = st.sampled_from([{"type": "string", "description": "said"}, {"type": "integer"}, {}])
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, max_size=4).map(
            lambda found: {"type": "object", "properties": found, "required": list(found)}
        ),
        inner.map(lambda each: {"type": "array", "items": each}),
        inner.map(lambda each: {"anyOf": [each, {"type": "null"}]}),
    ),
    max_leaves=8,
)
OBJECTS = st.dictionaries(NAMES, SCHEMAS, min_size=1, max_size=4).map(
    lambda found: {"type": "object", "properties": found, "required": list(found)}
)


def tool_of(parameters: dict[str, Any], name: str = "list_apps") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Lists.", "parameters": parameters}}


def calling(arguments: Any, name: str = "list_apps") -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def arguments_in(message: dict[str, Any]) -> Any:
    return json.loads(message["tool_calls"][0]["function"]["arguments"])


def example(schema: dict[str, Any]) -> Any:
    """Return a value with every property of the schema."""
    if "anyOf" in schema:
        return example(schema["anyOf"][0])
    if schema.get("type") == "array":
        return [example(schema["items"])]
    if "properties" in schema:
        return {name: example(each) for name, each in schema["properties"].items()}
    return "x"


@settings(deadline=None)
@given(OBJECTS)
def test_every_name_is_accepted_and_maps_back(parameters: dict[str, Any]) -> None:
    before = json.dumps(parameters)
    tools, names = renamed_tools([tool_of(parameters)], "anthropic", "m")
    assert tools is not None
    sent = tools[0]["function"]["parameters"]
    assert all(CLAUDE.fullmatch(name) for name in property_names(sent))
    assert len(property_names(sent)) == len(property_names(parameters))
    assert sent["required"] == list(sent["properties"])
    message = calling(example(parameters))
    (asked,) = with_sent_names([message], names)
    assert arguments_in(asked) == example(sent)
    assert arguments_in(with_real_names(asked, names)) == example(parameters)
    assert json.dumps(parameters) == before


FILTERED = {
    "type": "object",
    "properties": {"filter[name]": {"type": "string", "description": "The name."}, "$top": {"type": "integer"}},
    "required": ["filter[name]"],
}


@pytest.mark.parametrize(
    ("provider", "model", "mapped"),
    [
        ("anthropic", "glm-5", True),
        ("litellm", "bedrock/us.anthropic.claude-sonnet-5-5-v1:0", True),
        ("openai", "anthropic/Claude-Sonnet-5-5", True),
        ("openai", "gpt-5", False),
        ("litellm", "mistral/large", False),
    ],
)
def test_whose_names_are_mapped(provider: str, model: str, mapped: bool) -> None:
    tools, names = renamed_tools([tool_of(FILTERED)], provider, model)
    assert bool(names) is mapped
    assert tools is not None
    sent = tools[0]["function"]["parameters"]
    if not mapped:
        assert sent is FILTERED
        return
    assert sent["required"] == ["filter_name_"]
    assert sent["properties"]["filter_name_"]["description"] == "The name.\n\n{name: filter[name]}"
    assert names == {"list_apps": {"filter[name]": "filter_name_", "$top": "_top"}}


class Echoing(ProviderAdapter):
    """Calls the tool with the first of its properties, and keeps what it is asked."""

    provider = "anthropic"
    remote = False

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.counted: list[Any] = []

    async def request(self, request: Request) -> Completion:
        self.asked.append(request)
        first = next(iter((request.tools or ())[0]["function"]["parameters"]["properties"]))
        return Completion(calling({first: "x"}), {}, request.model, "tool_calls")

    async def stream(self, request: Request) -> Any:
        raise NotImplementedError
        yield

    async def count_tokens(self, messages: Any, tools: Any, model: str, timeouts: Timeouts) -> int:
        self.counted.append((list(messages), list(tools)))
        return 1

    def translate(self, error: Exception, model: str) -> ProviderError | None:
        return None


async def test_the_caller_sees_only_the_real_names() -> None:
    wire = Echoing()
    client = ChatClient(wire, default_model="m")
    ask = [{"role": "user", "content": "hi"}]
    tools = [tool_of(FILTERED), tool_of({"type": "object", "properties": {"x": {}}}, "plain")]
    response = await client.generate(ask, tools=tools)
    assert arguments_in(response.message) == {"filter[name]": "x"}
    history = [*ask, response.message, {"role": "tool", "tool_call_id": "c1", "content": "3"}]
    await client.generate(history, tools=tools)
    assert arguments_in(dict(wire.asked[1].messages[1])) == {"filter_name_": "x"}
    assert arguments_in(response.message) == {"filter[name]": "x"}
    await client.count_tokens(history, tools)
    assert wire.counted == [(list(wire.asked[1].messages), list(wire.asked[1].tools or ()))]
