"""Stored messages as chat messages and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from agent_runtime_core.persistence.chat_format import RAW, chat_of, message_of, same_chat
from agent_runtime_core.persistence.message_tree import copies
from agent_runtime_core.persistence.model_codec import model_of, text_of
from agent_runtime_core.persistence.models import ConversationMessage, ToolCall, new_id

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"x"}'}}


@pytest.mark.parametrize(
    "chat",
    [
        {"role": "user", "content": "hello"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "u"}}],
        },
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "assistant", "content": "x", "reasoning": {"opaque": [1, 2]}},
        {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "no json"}}]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "result", "name": "look"},
        {"role": "user"},
    ],
)
def test_a_chat_message_comes_back_as_it_was(chat: dict[str, Any]) -> None:
    given = copy.deepcopy(chat)
    stored = model_of(ConversationMessage, text_of(message_of(chat, new_id())))
    assert chat_of(stored) == given == chat


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": NaN}',
        '{"x": -Infinity}',
        '{"x": 1e999}',
        '{"x": "\\ud83d"}',
        '{"x": 1, "x": 2}',
        '{"x":' + "[" * 97 + "]" * 97 + "}",
        '{"x":' + "[" * 5000 + "]" * 5000 + "}",
        {"x": 1},
        None,
    ],
    ids=lambda arguments: repr(arguments)[:20],
)
def test_arguments_that_no_message_can_hold_are_kept_as_the_model_wrote_them(arguments: Any) -> None:
    """They went back to the model, and the conversation goes on with that."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    chat = {"role": "assistant", "content": "", "tool_calls": [call]}
    stored = model_of(ConversationMessage, text_of(message_of(chat, new_id())))
    assert chat_of(stored) == chat


def test_a_call_without_a_function_is_kept_as_the_model_wrote_it() -> None:
    chat = {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "function": "look"}]}
    assert chat_of(message_of(chat, new_id())) == chat


def test_what_the_model_has_fields_for_is_kept_in_them_alone() -> None:
    message = message_of({"role": "assistant", "content": "", "tool_calls": [CALL]}, new_id())
    [call] = message.tool_calls
    assert (call.id, call.name, call.arguments) == ("c1", "look", {"at": "x"})
    assert RAW not in message.metadata


def test_what_it_gives_back_is_nobody_elses() -> None:
    message = message_of({"role": "user", "content": "x", "more": {"a": []}}, new_id())
    chat_of(message)["more"]["a"].append(1)
    assert chat_of(message)["more"] == {"a": []}


def test_what_was_changed_in_a_stored_message_is_what_is_given_back() -> None:
    stored = message_of({"role": "user", "content": "my PIN is 1234", "name": "Ada"}, new_id())
    stored.content = "..."
    assert chat_of(stored) == {"role": "user", "content": "...", "name": "Ada"}
    stored = message_of({"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}, new_id())
    stored.tool_calls[0].arguments = {"at": "y"}
    [call] = chat_of(stored)["tool_calls"]
    assert call == {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"y"}'}}
    stored.tool_calls = []
    assert chat_of(stored) == {"role": "assistant", "content": None, "refusal": None}


@pytest.mark.parametrize("own", [{"id": 7, "type": "private"}, {"role": "owner"}, {}, "room 7"])
def test_metadata_of_the_callers_own_under_that_name_is_no_message(own: Any) -> None:
    assert chat_of(ConversationMessage(role="user", content="hi", metadata={RAW: own})) == {
        "role": "user",
        "content": "hi",
    }


def test_a_message_somebody_else_stored_is_a_chat_message() -> None:
    call = ToolCall(id="c1", name="look", arguments={"at": "x"})
    assert chat_of(ConversationMessage(role="assistant", content="", tool_calls=[call])) == {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALL],
    }


def test_metadata_of_a_database_may_be_null() -> None:
    message = ConversationMessage(role="user", content="x", metadata=None)  # type: ignore[arg-type]
    assert chat_of(message) == {"role": "user", "content": "x"}
    assert copies([message])[0].metadata == {"forked_from": str(message.id)}


def test_messages_are_the_same_by_what_was_said() -> None:
    said = {"role": "user", "content": "x"}
    assert same_chat(said, {**said, "metadata": {"seen": True}})
    assert not same_chat(said, {**said, "content": "y"})
    assert not same_chat(said, {**said, "role": "assistant"})
    assert same_chat(
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "type": "x"}]},
    )
    assert not same_chat(
        {"role": "assistant", "tool_calls": [CALL]}, {"role": "assistant", "tool_calls": [{**CALL, "id": "c2"}]}
    )


CONTENTS: list[Any] = ["said", [{"type": "text", "text": "see"}], {"in": "content"}, {"a": {"b": 1}}, "", None, [], 5]


@pytest.mark.parametrize("content", CONTENTS, ids=repr)
def test_the_content_of_a_message_with_more_fields_is_kept_once(content: Any) -> None:
    chat = {"role": "assistant", "content": content, "provider_fields": {"x": {"y": 1}}}
    stored = model_of(ConversationMessage, text_of(message_of(chat, new_id())))
    assert chat_of(stored) == chat
    assert list(chat_of(stored)) == list(chat)
    if content and content != 5:
        assert stored.metadata[RAW]["content"] == {"in": "content"}
    for other in ("", "changed", [{"type": "text", "text": "changed"}]):
        stored.content = other
        if other or (content and content != 5):
            assert chat_of(stored) == {**chat, "content": other}


def test_an_answer_of_ten_mebibytes_with_more_fields_can_be_kept() -> None:
    chat = {"role": "assistant", "content": "x" * (10 << 20), "provider_fields": {"x": {"reasoning": "so"}}}
    assert chat_of(model_of(ConversationMessage, text_of(message_of(chat, new_id())))) == chat


@pytest.mark.parametrize("content", CONTENTS, ids=repr)
def test_a_message_of_an_earlier_version_which_has_its_content_twice_is_read(content: Any) -> None:
    chat = {"role": "assistant", "content": content, "provider_fields": {"x": {"y": 1}}}
    here = content if isinstance(content, str | list | dict) else ""
    stored = ConversationMessage(role="assistant", content=here, metadata={RAW: chat})
    assert chat_of(stored) == chat
    stored.content = "changed"
    assert chat_of(stored) == {**chat, "content": "changed"}
