"""Tool results with images: what is recorded, and what each provider is sent."""

from __future__ import annotations

from typing import Any

from agent_runtime_core import ToolRegistry, tool
from agent_runtime_core.interfaces import ToolCallDict
from agent_runtime_core.llm._anthropic_format import conversation_of
from agent_runtime_core.llm._openai_format import outgoing
from agent_runtime_core.tools import ContentParts, answer_call

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
TEXT = {"type": "text", "text": "here"}


def call(name: str) -> ToolCallDict:
    return ToolCallDict({"id": "1", "function": {"name": name, "arguments": "{}"}})


async def test_parts_are_the_content_and_the_result() -> None:
    tools = ToolRegistry()

    @tool
    def look() -> ContentParts:
        return ContentParts([TEXT, IMAGE])

    @tool
    def listed() -> list[dict[str, Any]]:
        return [TEXT]

    @tool
    def large() -> ContentParts:
        return ContentParts([{"type": "text", "text": "x" * 2**20}])

    for each in (look, listed, large):
        tools.register(each)
    answer = await answer_call(tools, call("look"), None)
    assert (answer.content, answer.parts, answer.result) == ("here\n[image_url]", [TEXT, IMAGE], [TEXT, IMAGE])
    plain = await answer_call(tools, call("listed"), None)
    assert (plain.content, plain.parts) == ('[{"type": "text", "text": "here"}]', None)
    answer = await answer_call(tools, call("large"), None)
    assert answer.ok
    assert answer.parts is None
    assert "ran, but its result" in answer.content


def test_openai_is_sent_images_after_the_last_result_of_the_turn() -> None:
    look = {"id": "2", "type": "function", "function": {"name": "look", "arguments": '{"at": "door"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [look]},
        {"role": "tool", "tool_call_id": "1", "content": [TEXT, IMAGE]},
        {"role": "tool", "tool_call_id": "2", "content": [IMAGE]},
        {"role": "tool", "tool_call_id": "3", "content": "plain"},
        {"role": "assistant", "content": "I see."},
        {"role": "tool", "tool_call_id": "4", "content": [IMAGE]},
    ]
    _, *sent = outgoing(messages, "openai")
    assert [each["role"] for each in sent] == ["tool", "tool", "tool", "user", "assistant", "tool", "user"]
    assert [each["content"] for each in sent[:3]] == [
        [TEXT],
        "(The result of the call 2 is in the next message of the user.)",
        "plain",
    ]
    assert sent[3]["content"] == [
        {"type": "text", "text": "What the tools returned besides text:"},
        {"type": "text", "text": "Result of the call 1:"},
        IMAGE,
        {"type": "text", "text": 'Result of the call 2, look({"at": "door"}):'},
        IMAGE,
    ]
    assert messages[1]["content"] == [TEXT, IMAGE]


def test_anthropic_is_sent_images_in_the_result() -> None:
    call = {"id": "1", "function": {"name": "look", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [TEXT, IMAGE]},
    ]
    _, sent = conversation_of(messages)
    (result,) = sent[-1]["content"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}}
    assert (result["type"], result["content"]) == ("tool_result", [TEXT, image])
