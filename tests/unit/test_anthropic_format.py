"""Conversations in OpenAI's chat format as Anthropic takes them, and its answers in that format."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from agent_runtime_core._core.codec.json import decode, encode
from agent_runtime_core.errors import InvalidArgument, NotSupported, ProviderUnavailable, RequestRefused
from agent_runtime_core.llm._anthropic_format import (
    conversation_of,
    default_max_tokens,
    limit_cache_marks,
    options_of,
    schema_prompt,
    tools_of,
)
from agent_runtime_core.llm._anthropic_response import Assembly, answer_of, parsed_input, usage_of
from agent_runtime_core.llm._openai_format import ids_in, incoming, outgoing
from tests.support.cases import for_each

HELLO = {"role": "user", "content": "hello"}
PNG = "data:image/png;base64,iVBORw0KGgo="


TOOLS = [{"type": "function", "function": {"name": "look"}}]


def call(arguments: Any, id: str = "toolu_1", name: str = "look") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def turns(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return conversation_of(messages)[1]


def answered(content: list[dict[str, Any]], stop: str = "end_turn", **more: Any) -> dict[str, Any]:
    return answer_of({"content": content, "stop_reason": stop}, **more)[0]


def results_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "tool", "tool_call_id": each["id"], "content": "x"} for each in message.get("tool_calls", ())]


def streamed(*events: dict[str, Any]) -> Assembly:
    assembly = Assembly()
    for event in events:
        assembly.add(event)
    return assembly


def test_all_system_messages_are_joined_in_order() -> None:
    system, rest = conversation_of(
        [
            {"role": "system", "content": "one"},
            HELLO,
            {"role": "developer", "content": [{"type": "text", "text": "two"}]},
            {"role": "system", "content": ""},
        ]
    )
    assert system == "one\n\ntwo"
    assert rest == [HELLO]


def test_a_cache_mark_survives() -> None:
    marked = {"type": "text", "text": "long", "cache_control": {"type": "ephemeral"}}
    system, rest = conversation_of([{"role": "system", "content": [marked]}, {"role": "user", "content": [marked]}])
    assert system == [marked]
    assert rest == [{"role": "user", "content": [marked]}]


def test_calls_become_blocks_with_parsed_input_and_their_results_one_message() -> None:
    assert turns(
        HELLO,
        said(call('{"at": "Köln"}'), call({"n": None}, "toolu_2", "count"), content="let me see"),
        {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "no such n", "metadata": {"is_error": True}},
        {"role": "user", "content": "and?"},
    ) == [
        HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "let me see"},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "Köln"}},
                {"type": "tool_use", "id": "toolu_2", "name": "count", "input": {"n": None}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"},
                {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such n", "is_error": True},
                {"type": "text", "text": "and?"},
            ],
        },
    ]


def test_results_of_two_turns_are_not_merged() -> None:
    one, two = ({"role": "tool", "tool_call_id": each, "content": each} for each in ("a", "b"))
    found = turns(said(call("{}", "a")), one, said(call("{}", "b")), two)
    assert [each["role"] for each in found] == ["assistant", "user", "assistant", "user"]


def test_a_call_as_the_agent_loop_writes_it() -> None:
    flat = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "name": "look", "arguments": {"x": 1}}]}
    assert turns(flat)[0]["content"] == [{"type": "tool_use", "id": "a", "name": "look", "input": {"x": 1}}]


@pytest.mark.parametrize("nothing", ["", "  ", None, "{}", {}])
def test_no_arguments_are_an_empty_input(nothing: Any) -> None:
    assert turns(said(call(nothing)))[0]["content"][0]["input"] == {}


@for_each(
    ("arguments", "sent"),
    [
        *(
            (each, each)
            for each in ["{", "[1]", '"x"', "null", "{'a': 1}", '{"a": NaN}', '{"a": 1e999}', "[" * 100_000]
        ),
        ([1], "[1]"),
        (5, "5"),
        ('{"a": "\ud83d', '{"a": "\\ud83d'),
    ],
    ids=range(11),
)
def test_arguments_that_are_no_object_go_back_as_text_with_the_error_as_result(arguments: Any, sent: str) -> None:
    result = {"role": "tool", "tool_call_id": "toolu_1", "content": "no JSON", "metadata": {"is_error": True}}
    found = turns(HELLO, said(call(arguments)), result)
    assert found[1]["content"] == [{**USE, "input": {"INVALID_JSON": sent}}]
    assert found[2]["content"][0]["content"] == "no JSON"
    json.dumps(found, ensure_ascii=False).encode()


def test_ids_of_other_providers_fit_and_still_belong_together() -> None:
    given = "functions.look:0"
    own = {"type": "tool_use", "id": given, "name": "look", "input": {}}
    for asked in (said(call("{}", given)), answered([own], "tool_use")):
        assistant, result = turns(asked, {"role": "tool", "tool_call_id": given, "content": "x"})
        assert assistant["content"][0]["id"] == result["content"][0]["tool_use_id"] == "functions_look_0"


@pytest.mark.parametrize("message", [{"role": "tool", "content": "x"}, said(call("{}", ""))])
def test_a_call_or_result_without_an_id_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused, match=r"tool call id of messages\[1\] must be a non-empty string, got"):
        turns(HELLO, message)


def test_images_and_documents() -> None:
    parts = [
        {"type": "text", "text": "what is it?"},
        {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
        {"type": "image_url", "image_url": "https://example.com/a.jpg"},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERg==", "filename": "a.pdf"}},
        {"type": "document", "source": {"type": "file", "file_id": "file_1"}},
    ]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    assert turns({"role": "user", "content": parts})[0]["content"] == [
        {"type": "text", "text": "what is it?"},
        image,
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.jpg"}},
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="},
            "title": "a.pdf",
        },
        {"type": "document", "source": {"type": "file", "file_id": "file_1"}},
    ]
    result = {"role": "tool", "tool_call_id": "a", "content": [parts[1]]}
    assert turns(said(call("{}", "a")), result)[1]["content"][0]["content"] == [image]


@pytest.mark.parametrize("url", ["http://example.com/a.png", "a.png", "data:image/png,x"])
def test_an_image_that_cannot_be_sent_is_refused(url: str) -> None:
    with pytest.raises(InvalidArgument, match=r"messages\[0\].content\[0\]: URL must be https, or data:image/"):
        turns({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})


def source_of(part: dict[str, Any]) -> dict[str, Any]:
    blocks = turns({"role": "user", "content": [part]})[0]["content"]
    found: dict[str, Any] = blocks[0]["source"]
    return found


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("image/jpg", "image/jpeg"),
        ("image/pjpeg", "image/jpeg"),
        ("image/JPEG", "image/jpeg"),
        ("image/jpeg;charset=utf-8", "image/jpeg"),
        ("IMAGE/X-PNG", "image/png"),
        ("image/webp", "image/webp"),
    ],
)
def test_other_names_of_media_types(given: str, sent: str) -> None:
    for part in (
        {"type": "image_url", "image_url": {"url": f"data:{given};base64,AAAA"}},
        {"type": "image_url", "image_url": {"url": f"DATA:{given};BASE64,AAAA"}},
        {"type": "input_image", "image_url": f"data:{given};base64,AAAA"},
        {"type": "image", "source": {"type": "base64", "media_type": given, "data": "AAAA"}},
    ):
        assert source_of(part) == {"type": "base64", "media_type": sent, "data": "AAAA"}


@pytest.mark.parametrize(
    ("given", "sent"),
    [("AA\r\nAA\n", "AAAA"), (" AAAA", "AAAA"), ("AA_-", "AA/+"), ("AA%3D%3D", "AA=="), ("AAA", "AAA=")],
)
def test_base64_in_other_forms(given: str, sent: str) -> None:
    for part in (
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{given}"}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": given}},
    ):
        assert source_of(part)["data"] == sent


def test_a_document_by_its_url_and_one_without_data() -> None:
    for part in (
        {"type": "file", "file": {"file_url": "https://a/b.pdf"}},
        {"type": "input_file", "file_url": "https://a/b.pdf"},
    ):
        assert source_of(part) == {"type": "url", "url": "https://a/b.pdf"}
    with pytest.raises(InvalidArgument, match="file_data, file_url or file_id"):
        source_of({"type": "file", "file": {"filename": "a.pdf"}})


def test_other_texts_are_documents_too() -> None:
    for kind in ("text/csv", "text/markdown", "text/x-python"):
        part = {"type": "file", "file": {"file_data": f"data:{kind};base64,aGk="}}
        assert source_of(part) == {"type": "text", "media_type": "text/plain", "data": "hi"}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://a/b.png", "cache_control": {"type": "ephemeral"}}},
        {"type": "file", "file": {"file_id": "f", "cache_control": {"type": "ephemeral"}}},
    ],
)
def test_a_cache_mark_within_the_data_of_a_part(part: dict[str, Any]) -> None:
    assert turns({"role": "user", "content": [part]})[0]["content"][0]["cache_control"] == {"type": "ephemeral"}


def test_media_types_of_documents() -> None:
    for given in ("application/pdf", "application/x-pdf", "Application/PDF;name=a.pdf"):
        for part in (
            {"type": "file", "file": {"file_data": f"data:{given};base64,AAAA"}},
            {"type": "input_file", "file_data": f"data:{given};base64,AAAA"},
            {"type": "document", "source": {"type": "base64", "media_type": given, "data": "AAAA"}},
        ):
            assert source_of(part) == {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
    text = {"type": "file", "file": {"file_data": "data:text/plain;charset=utf-8;base64,aMOk"}}
    assert source_of(text) == {"type": "text", "media_type": "text/plain", "data": "hä"}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:text/plain;base64,aGk="}},
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,aGk="}},
        {"type": "image_url", "image_url": {"url": "data:;base64,aGk="}},
        {"type": "image", "source": {"type": "base64", "media_type": "image/bmp", "data": "aGk="}},
        {"type": "file", "file": {"file_data": "data:application/zip;base64,aGk="}},
    ],
)
def test_a_media_type_that_anthropic_does_not_accept_is_named_with_its_part(part: dict[str, Any]) -> None:
    content = [{"type": "text", "text": "see"}, part]
    with pytest.raises(InvalidArgument, match=r"media type of messages\[1\].content\[1\] must be .* got '"):
        turns(HELLO, {"role": "user", "content": content})
    with pytest.raises(InvalidArgument, match=r"must be UTF-8 text in base64"):
        turns({"role": "user", "content": [{"type": "file", "file": {"file_data": "data:text/plain;base64,/w=="}}]})


MARK: dict[str, Any] = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "long"},
        {"type": "image_url", "image_url": {"url": PNG}},
        {"type": "file", "file": {"file_data": "data:application/pdf;base64,JVBERg==", "filename": "a.pdf"}},
        {"type": "file", "file": {"file_id": "file_1"}},
        {"type": "input_image", "image_url": PNG},
        {"type": "input_file", "file_id": "file_1"},
        {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
        {"type": "refusal", "refusal": "no"},
    ],
)
def test_a_cache_mark_survives_on_every_part_and_message(part: dict[str, Any]) -> None:
    plain, marked = ({"role": "user", "content": [each]} for each in (part, {**part, **MARK}))
    bare = turns(plain)[0]["content"]
    block = {"type": "text", "text": bare} if isinstance(bare, str) else bare[0]
    assert turns(marked)[0]["content"] == [{**block, **MARK}]
    assert turns({**plain, **MARK})[0]["content"] == [{**block, **MARK}]
    # On a result the mark is on the whole block.
    result = {"role": "tool", "tool_call_id": "a", "content": [{**part, **MARK}]}
    assert turns(said(call("{}", "a")), result)[1]["content"] == [
        {"type": "tool_result", "tool_use_id": "a", "content": bare, **MARK}
    ]
    result = {"role": "tool", "tool_call_id": "a", "content": [part], **MARK}
    assert turns(said(call("{}", "a")), result)[1]["content"][0]["cache_control"] == MARK["cache_control"]


def test_a_cache_mark_on_a_message_a_call_and_a_tool() -> None:
    assert conversation_of([{"role": "system", "content": "s", **MARK}, HELLO])[0] == [
        {"type": "text", "text": "s", **MARK}
    ]
    thinking = answered([THOUGHT, {"type": "text", "text": "a"}]) | MARK
    assert turns(thinking)[0]["content"] == [THOUGHT, {"type": "text", "text": "a", **MARK}]
    assert turns(said({**call("{}"), **MARK}))[0]["content"][0]["cache_control"] == MARK["cache_control"]
    inside, outside = tools_of(
        [
            {"type": "function", "function": {"name": "a", **MARK}},
            {"type": "function", "function": {"name": "a"}, **MARK},
        ]
    )
    assert inside == outside == {"name": "a", "input_schema": {"type": "object", "properties": {}}, **MARK}


def test_of_too_many_cache_marks_the_first_and_the_last_ones_are_sent() -> None:
    tools = [{"name": "a", **MARK}, {"name": "b", **MARK}]
    system = [{"type": "text", "text": "s", **MARK}]
    result = {"type": "tool_result", "content": [{"type": "text", "text": "r"}], **MARK}
    messages = [{"role": "user", "content": [{"type": "text", "text": str(n), **MARK}, result]} for n in range(2)]
    before = json.dumps([tools, system, messages])
    for reserved, kept in ((0, [0, 4, 5, 6]), (1, [0, 5, 6])):
        found = limit_cache_marks(tools, system, messages, reserved=reserved)
        blocks = [*found[0], *found[1], *found[2][0]["content"], *found[2][1]["content"]]
        assert [index for index, block in enumerate(blocks) if "cache_control" in block] == kept
    assert json.dumps([tools, system, messages]) == before
    assert limit_cache_marks(tools, system, "text") == (tools, system, "text")


def test_sound_and_unknown_roles_are_refused() -> None:
    with pytest.raises(RequestRefused, match="'input_audio'"):
        turns({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]})
    with pytest.raises(RequestRefused, match="'robot'"):
        turns({"role": "robot", "content": "x"})


def test_a_message_that_says_nothing_is_left_out() -> None:
    empty = {"role": "tool", "tool_call_id": "toolu_1", "content": ""}
    assert turns(
        HELLO,
        {"role": "assistant", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": " \n"}]},
        said(call("{}")),
        empty,
    ) == [
        HELLO,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}]},
    ]
    with pytest.raises(
        RequestRefused, match="messages must have a message with content besides the system prompt, got none"
    ):
        conversation_of([{"role": "system", "content": "be kind"}])


def test_a_dict_as_content_and_the_words_of_a_refusal() -> None:
    assert turns({"role": "user", "content": {"price": "3 €"}})[0]["content"] == '{"price": "3 €"}'
    refusal = {"role": "assistant", "content": None, "refusal": "I will not"}
    assert turns(refusal) == [{"role": "assistant", "content": "I will not"}]


# Answers, and sending them back.

THOUGHT = {"type": "thinking", "thinking": "hmm", "signature": "c2ln"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "Köln", "n": None}}


def test_a_plain_answer_needs_nothing_beside_openais_format() -> None:
    message = answered([{"type": "text", "text": "see", "citations": None}, {**USE, "caller": {"type": "direct"}}])
    assert message == {"role": "assistant", "content": "see", "tool_calls": [call('{"at": "Köln", "n": null}')]}
    assert turns(message)[0]["content"] == [{"type": "text", "text": "see"}, USE]


@pytest.mark.parametrize(
    "content",
    [
        [THOUGHT, {"type": "text", "text": "a"}, USE],
        [{"type": "redacted_thinking", "data": "xyz"}, {"type": "text", "text": "a"}],
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "citations": [{"cited_text": "c"}]}],
        [USE, {"type": "text", "text": "after"}],
        [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, {"type": "text", "text": "a"}],
        [{**USE, "caller": {"type": "code_execution_20260120", "tool_id": "s"}}],
    ],
)
def test_what_openais_format_cannot_say_is_sent_back_as_it_was(content: list[dict[str, Any]]) -> None:
    message = json.loads(json.dumps(answered(content, "tool_use")))
    assert turns(message)[0]["content"] == content


@pytest.mark.parametrize(
    "change",
    [
        {"content": "edited"},
        {"tool_calls": []},
        {"tool_calls": [call('{"at": "Bonn", "n": null}')]},
        {"provider_fields": {"openai": {"reasoning_content": "hmm"}}},
    ],
)
def test_an_edited_message_is_made_anew(change: dict[str, Any]) -> None:
    message = answered([THOUGHT, {"type": "text", "text": "a"}, USE], "tool_use")
    text = change.get("content", "a")
    found = turns({**message, **change})[0]["content"]
    assert "hmm" not in json.dumps(found)
    assert found == text or found[0] == {"type": "text", "text": text}


def test_arguments_written_another_way_are_no_edit() -> None:
    message = answered([THOUGHT, USE], "tool_use")
    message["tool_calls"] = [call({"n": None, "at": "Köln"})]
    message["content"] = ""
    assert turns(message)[0]["content"] == [THOUGHT, USE]


def test_blank_text_is_part_of_the_answer_but_not_sent_back() -> None:
    message = answered([{"type": "text", "text": "\n\n"}, USE], "tool_use")
    assert message["content"] == "\n\n"
    assert turns(message)[0]["content"] == [USE]
    thinking = answered([THOUGHT, {"type": "text", "text": "\n"}, USE], "tool_use")
    assert turns(thinking)[0]["content"] == [THOUGHT, USE]


@for_each(
    ("stop", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "refusal"),
        ("guardrail_intervened", "content_filter"),
        ("content_filter", "content_filter"),
        ("pause_turn", "pause_turn"),
        ("something_new", "something_new"),
    ],
)
def test_finish_reasons(stop: str, finish: str) -> None:
    assert answer_of({"content": [], "stop_reason": stop})[2] == finish


@pytest.mark.parametrize("stop", ["max_tokens", "model_context_window_exceeded", "stop_sequence"])
def test_a_call_at_the_end_of_a_cut_answer_is_left_out(stop: str) -> None:
    other = {**USE, "id": "toolu_2"}
    message = answered([{"type": "text", "text": "a"}, USE, other], stop)
    assert [each["id"] for each in message["tool_calls"]] == ["toolu_1"]
    assert len(answered([USE, other], stop, call_is_whole=True)["tool_calls"]) == 2
    flag = {"truncated_tool_call": True}
    assert answered([USE], stop) == {"role": "assistant", "content": "", "metadata": flag}
    assert message["metadata"] == flag
    assert "metadata" not in turns(message, *results_of(message))[0]
    assert "metadata" not in outgoing([message], "openai")[0]
    assert "metadata" not in answered([USE], stop, call_is_whole=True)


@pytest.mark.parametrize("stop", ["refusal", "content_filter"])
def test_a_refused_answer_calls_no_tool(stop: str) -> None:
    message = answered([{"type": "text", "text": "a"}, USE, {**USE, "id": "b"}], stop, call_is_whole=True)
    assert (message["content"], message.get("tool_calls"), message.get("metadata")) == ("a", None, None)


def test_a_refusal_has_the_words_that_there_are() -> None:
    def refusal(content: list[dict[str, Any]], details: Any = None) -> dict[str, Any]:
        return answer_of({"content": content, "stop_reason": "refusal", "stop_details": details})[0]

    explained = {"type": "refusal", "category": "bio", "explanation": "Not this."}
    assert refusal([], explained) == {"role": "assistant", "content": "", "refusal": "Not this."}
    assert refusal([{"type": "text", "text": "I can"}], explained)["refusal"] == "Not this."
    assert refusal([{"type": "text", "text": "I will not"}]) == {
        "role": "assistant",
        "content": "I will not",
        "refusal": "I will not",
    }
    assert refusal([], {"type": "refusal", "explanation": None}) == {"role": "assistant", "content": ""}
    assert turns(HELLO, refusal([{"type": "text", "text": "I will not"}]))[1]["content"] == "I will not"


def test_thoughts_at_the_end_are_left_out() -> None:
    unsigned = {"type": "thinking", "thinking": "hm"}
    assert answered([unsigned], "max_tokens") == {"role": "assistant", "content": ""}
    assert answered([{"type": "text", "text": "a"}, THOUGHT], "max_tokens") == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("unsigned", [{"type": "thinking", "thinking": "hm"}, {**THOUGHT, "signature": ""}])
def test_thoughts_without_a_signature_go_back_only_to_servers_that_sign_nothing(unsigned: dict[str, Any]) -> None:
    kept = answered([unsigned, {"type": "text", "text": "a"}])
    assert turns(kept) == [{"role": "assistant", "content": "a"}]
    assert conversation_of([kept], signed=False)[1][0]["content"] == [unsigned, {"type": "text", "text": "a"}]


def test_thoughts_of_other_providers_are_not_sent() -> None:
    message = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
            {"type": "reasoning", "summary": []},
            {"type": "text", "text": "a"},
        ],
        "reasoning_content": "hm",
        "thinking_blocks": [THOUGHT],
        "provider_fields": {"openai": {"reasoning": "hm"}},
    }
    assert turns(message) == [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("blank", ["", " \n"])
def test_thoughts_before_a_text_that_says_nothing_are_not_sent_back_without_it(blank: str) -> None:
    message = answered([{"type": "text", "text": "a"}, THOUGHT, {"type": "text", "text": blank}])
    assert message["content"] == "a" + blank
    assert turns(message)[0]["content"] == "a"
    message = answered([THOUGHT, {"type": "text", "text": blank}], "max_tokens")
    assert turns({"role": "user", "content": "hello"}, message) == [HELLO]


@pytest.mark.parametrize("block", [{**USE, "id": ""}, {"type": "tool_use", "id": "a", "input": {}}])
def test_a_call_nobody_could_answer_is_the_providers_fault(block: dict[str, Any]) -> None:
    with pytest.raises(ProviderUnavailable, match="without an id or a name"):
        answered([block], "tool_use")


def test_an_input_that_is_no_object_reaches_the_loop_as_it_is() -> None:
    message = answered([{**USE, "input": [1, 2]}], "tool_use")
    assert message["tool_calls"] == [call("[1, 2]")]
    assert turns(message)[0]["content"] == [{**USE, "input": {"INVALID_JSON": "[1, 2]"}}]


def test_usage_counts_cached_tokens_in() -> None:
    assert usage_of(
        {
            "input_tokens": 10,
            "output_tokens": 7,
            "cache_read_input_tokens": 100,
            "cache_creation_input_tokens": 20,
            "output_tokens_details": {"thinking_tokens": 5},
        }
    ) == {
        "prompt_tokens": 130,
        "completion_tokens": 7,
        "total_tokens": 137,
        "cached_tokens": 100,
        "cache_write_tokens": 20,
        "reasoning_tokens": 5,
    }
    assert usage_of({"input_tokens": "3", "output_tokens": "2"})["total_tokens"] == 5
    assert usage_of({}) == usage_of({"input_tokens": 0, "output_tokens": None}) == {}
    told = {"input_tokens": 1, "output_tokens": None, "cache_read_input_tokens": None, "output_tokens_details": None}
    assert usage_of(told) == {"prompt_tokens": 1}


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        (
            {"input_tokens": 1, "output_tokens": 2, "cache_creation": {"ephemeral_5m_input_tokens": 3, "x": 4}},
            {"prompt_tokens": 8, "completion_tokens": 2, "total_tokens": 10, "cache_write_tokens": 7},
        ),
        (
            {"input_tokens": 1, "output_tokens": 2, "output_tokens_details": {"thinking_tokens": 9}},
            {"prompt_tokens": 1, "completion_tokens": 11, "total_tokens": 12, "reasoning_tokens": 9},
        ),
        (
            {"prompt_tokens": 5, "completion_tokens": 2, "cache_read_input_tokens": 4},
            {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "cached_tokens": 4},
        ),
        (
            {"cache_read_input_tokens": 4, "output_tokens": 0},
            {"prompt_tokens": 4, "completion_tokens": 0, "total_tokens": 4, "cached_tokens": 4},
        ),
    ],
)
def test_usage_is_never_too_low(reported: dict[str, Any], usage: dict[str, int]) -> None:
    assert usage_of(reported) == usage


# Streams.

START = {"type": "message_start", "message": {"model": "m", "content": [], "usage": {"input_tokens": 3}}}
STOP = {"type": "message_stop"}


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def ending(stop: str | None, **usage: Any) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": stop, "stop_sequence": None}, "usage": usage}


def pieces(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "input_json_delta", "partial_json": text} for text in texts]


USING = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}


def test_a_stream_is_the_answer_it_would_have_been() -> None:
    assembly = streamed(
        START,
        *block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "h"},
            {"type": "thinking_delta", "thinking": "mm"},
            {"type": "signature_delta", "signature": "c2ln"},
        ),
        *block(
            1,
            {"type": "text", "text": "a"},
            {"type": "text_delta", "text": "b"},
            {"type": "citations_delta", "citation": {"cited_text": "c"}},
            {"type": "citations_delta", "citation": {"cited_text": "d"}},
        ),
        *block(2, USING, *pieces("", '{"at": "Kö', 'ln", "n"', ": null}")),
        {"type": "something_new", "index": 9},
        ending("tool_use", output_tokens=9, input_tokens=None),
        STOP,
    )
    whole, is_whole = assembly.whole()
    assert (assembly.complete, assembly.has_usage, is_whole) == (True, True, True)
    assert whole == {
        "model": "m",
        "stop_reason": "tool_use",
        "usage": {"input_tokens": 3, "output_tokens": 9},
        "content": [
            THOUGHT,
            {"type": "text", "text": "ab", "citations": [{"cited_text": "c"}, {"cited_text": "d"}]},
            USE,
        ],
    }


def test_interleaved_blocks_keep_apart() -> None:
    one, two = block(0, USING, *pieces('{"a"', ": 1}")), block(1, {**USING, "id": "b"}, *pieces('{"b": ', "2}"))
    mixed = [each for pair in zip(one, two, strict=True) for each in pair]
    content = streamed(START, *mixed, ending("tool_use"), STOP).whole()[0]["content"]
    assert [each["input"] for each in content] == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(
    ("events", "finished"),
    [
        ([START, ending("end_turn")], True),
        ([START, STOP], False),
        ([START, ending(None), STOP], False),
        ([START], False),
        ([], False),
        ([STOP], False),
    ],
)
def test_a_stream_is_finished_with_its_stop_reason(events: list[dict[str, Any]], finished: bool) -> None:
    assert streamed(*events).complete is finished


def test_a_streamed_call_cut_by_the_limit_is_left_out() -> None:
    for deltas, kept in ((['{"at": "K'], []), ([], []), (['{"at": "K"}'], ["toolu_1"])):
        assembly = streamed(START, *block(0, USING, *pieces(*deltas)), ending("max_tokens"), STOP)
        whole, is_whole = assembly.whole()
        message = answer_of(whole, call_is_whole=is_whole)[0]
        assert [each["id"] for each in message.get("tool_calls", ())] == kept


def test_arguments_nobody_can_parse_go_to_the_loop_and_back_unchanged() -> None:
    assembly = streamed(START, *block(0, USING, *pieces('{"at": ', "oops}")), ending("tool_use"), STOP)
    whole, is_whole = assembly.whole()
    message = json.loads(json.dumps(answer_of(whole, call_is_whole=is_whole)[0]))
    assert message["tool_calls"][0]["function"]["arguments"] == '{"at": oops}'
    assert turns(message)[0]["content"] == [{**USING, "input": {"INVALID_JSON": '{"at": oops}'}}]


DEEP = '{"at": ' + "[" * 90 + "]" * 90 + "}"


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(
    ("written", "given"),
    [
        ('{"at": 1e999}', '{"at": 1e999}'),
        ('{"at": "\\ud83d"}', '{"at": "\\ud83d"}'),
        ('{"at": "\ud83d"}', '{"at": "\\ud83d"}'),
        (DEEP, DEEP),
    ],
    ids=["a number", "an escape", "a lone surrogate", "deep"],
)
def test_an_input_that_cannot_be_kept_or_sent_goes_to_the_loop_as_text(written: str, given: str, thinks: bool) -> None:
    """Whether it can be run is the loop's to say; the next request can be sent, and the answer be recorded."""
    thought = block(0, {"type": "thinking", "thinking": "hm", "signature": "s"}) if thinks else []
    events = [*thought, *block(int(thinks), USING, *pieces(written)), ending("tool_use"), STOP]
    whole, is_whole = streamed(START, *events).whole()
    message = answer_of(whole, call_is_whole=is_whole)[0]
    assert message["tool_calls"][0]["function"]["arguments"] == given
    kept = decode(encode([[message]]))[0][0]  # type: ignore[index]
    assert turns(kept)[0]["content"][-1] == {**USING, "input": {"INVALID_JSON": given}}
    json.dumps(turns(kept), ensure_ascii=False).encode()


@pytest.mark.parametrize("given", [{"at": "\ud83d"}, {"\ud83d": 1}, json.loads(DEEP)])
def test_a_whole_answer_has_such_an_input_as_text_too(given: dict[str, Any]) -> None:
    message = answered([{"type": "thinking", "thinking": "hm", "signature": "s"}, {**USE, "input": given}], "tool_use")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == given
    json.dumps(turns(decode(encode(message))), ensure_ascii=False).encode()  # type: ignore[arg-type]


def test_a_part_of_a_block_that_never_began_is_the_providers_fault() -> None:
    with pytest.raises(ProviderUnavailable, match="content block 3 before its start"):
        streamed(START, {"type": "content_block_delta", "index": 3, "delta": pieces("{}")[0]})
    text = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
    assert streamed(START, text, text, ending("end_turn"), STOP).whole()[0]["content"] == [
        {"type": "text", "text": "aa"}
    ]


@for_each(
    ("start", "deltas", "given"),
    [
        ({"p": "x"}, [], {"p": "x"}),
        ({"p": "x"}, [""], {"p": "x"}),
        ({"p": "x"}, ["{}"], {"p": "x"}),
        ({"p": "x"}, ['{"p":', '"x"}'], {"p": "x"}),
        ({}, ["{}", '{"p":', '"x"}'], {"p": "x"}),
        ({}, ["{}"], {}),
        ({}, ['{"p":"x"}', "{}"], {"p": "x"}),
        ({}, ['{"p":"x"}', '{"p": "x"}'], {"p": "x"}),
        ({}, [{"p": "x"}], {"p": "x"}),
        ('{"p": "x"}', [], {"p": "x"}),
        ({}, ['{"p":"x"}', '{"p":"y"}'], {"INVALID_JSON": '{"p":"x"}{"p":"y"}'}),
    ],
)
def test_an_input_sent_in_an_odd_way(start: Any, deltas: list[Any], given: dict[str, Any]) -> None:
    assembly = streamed(START, *block(0, {**USING, "input": start}, *pieces(*deltas)), ending("tool_use"), STOP)
    whole, is_whole = assembly.whole()
    message = answer_of(whole, call_is_whole=is_whole)[0]
    assert turns(message)[0]["content"] == [{**USING, "input": given}]


def test_an_empty_object_before_a_cut_input_is_not_a_whole_call() -> None:
    assembly = streamed(START, *block(0, USING, *pieces("{}")), ending("max_tokens"), STOP)
    whole, is_whole = assembly.whole()
    assert answer_of(whole, call_is_whole=is_whole)[0].get("tool_calls") is None


@pytest.mark.parametrize("index", [0, None])
def test_blocks_that_all_have_one_index_are_kept(index: int | None) -> None:
    events = [
        {**each, "index": index}
        for each in (
            *block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": "a"}),
            *block(0, USING, *pieces('{"p": 1}')),
            *block(0, {**USING, "id": "b"}, *pieces('{"p": 2}')),
        )
    ]
    content = streamed(START, *events, ending("tool_use"), STOP).whole()[0]["content"]
    assert [each.get("text") or each["input"] for each in content] == ["a", {"p": 1}, {"p": 2}]


def test_a_count_that_one_of_the_events_reports_as_0_is_not_lost() -> None:
    start = {"input_tokens": 10, "cache_read_input_tokens": 5, "output_tokens": 1}
    for first, last in (
        (start, {"input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 7}),
        ({"input_tokens": 0, "output_tokens": 0}, {**start, "output_tokens": 7}),
        (start, {"output_tokens": 7}),
    ):
        message = {"type": "message_start", "message": {"content": [], "usage": first}}
        whole = streamed(message, ending("end_turn", **last), STOP).whole()[0]
        usage = {"prompt_tokens": 15, "completion_tokens": 7, "total_tokens": 22, "cached_tokens": 5}
        assert answer_of(whole)[1] == usage


def test_unreported_output_tokens_are_unknown() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 10, "output_tokens": 1}}}
    words = block(0, {"type": "text", "text": "many words"})
    for usage in ({}, {"output_tokens": None}):
        assert answer_of(streamed(start, *words, ending("end_turn", **usage), STOP).whole()[0])[1] == {
            "prompt_tokens": 10
        }
    zero = {"content": [{"type": "text", "text": "a"}], "usage": {"input_tokens": 10, "output_tokens": 0}}
    assert answer_of({**zero, "stop_reason": "end_turn"})[1] == {"prompt_tokens": 10}


# History.


def test_results_directly_follow_their_calls() -> None:
    one, two = ({"role": "tool", "tool_call_id": each, "content": each} for each in ("a", "b"))
    asked = said(call("{}", "a"), call("{}", "b"))
    found = turns(HELLO, asked, two, {"role": "user", "content": "quick"}, {"role": "assistant", "content": "yes"}, one)
    assert [each["role"] for each in found] == ["user", "assistant", "user", "assistant"]
    assert [each.get("tool_use_id", each.get("text")) for each in found[2]["content"]] == ["a", "b", "quick"]


def test_a_call_without_a_result_gets_an_error_and_a_result_without_a_call_is_left_out() -> None:
    orphan = {"role": "tool", "tool_call_id": "gone", "content": "old"}
    assert turns(orphan, HELLO, said(call("{}"), content="a"), {"role": "user", "content": "and?"}) == [
        HELLO,
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": "No result: the call was interrupted.",
                    "is_error": True,
                },
                {"type": "text", "text": "and?"},
            ],
        },
    ]
    with pytest.raises(
        RequestRefused, match="messages must have a message with content besides the system prompt, got none"
    ):
        turns(orphan)


def test_the_last_of_several_results_counts_and_an_error_has_content() -> None:
    results: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": "toolu_1", "content": "waiting"},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "", "metadata": {"is_error": True}},
    ]
    assert turns(said(call("{}")), *results)[1]["content"] == [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Error", "is_error": True}
    ]


def test_turns_alternate_and_do_not_end_in_whitespace() -> None:
    empty = {"role": "assistant", "content": ""}
    assert turns(
        HELLO, empty, HELLO, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b \n"}
    ) == [
        {"role": "user", "content": [{"type": "text", "text": "hello"}] * 2},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]


# Tools and options.


def test_tools() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 1}}}
    native = {"type": "web_search_20250305", "name": "web_search"}
    full = {"name": "look", "description": "Looks.", "parameters": schema}
    found = tools_of([{"type": "function", "function": full}, {"type": "function", "function": {"name": "go"}}, native])
    assert found == [
        {"name": "look", "description": "Looks.", "input_schema": schema},
        {"name": "go", "input_schema": {"type": "object", "properties": {}}},
        native,
    ]


def test_a_strict_tool_has_a_schema_that_anthropic_accepts() -> None:
    open_schema = {"type": "object", "properties": {"x": {"type": "object"}}}
    for schema, strict in (
        ({"type": "object", "properties": {"x": {"type": "integer"}}}, {"additionalProperties": False}),
        (open_schema, None),
    ):
        function = {"name": "look", "parameters": schema, "strict": True}
        found = tools_of([{"type": "function", "function": function}])[0]
        assert found == (
            {"name": "look", "input_schema": schema}
            if strict is None
            else {"name": "look", "input_schema": {**schema, **strict}, "strict": True}
        )


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("auto", {"type": "auto"}),
        ("none", {"type": "none"}),
        ("required", {"type": "any"}),
        ({"type": "function", "function": {"name": "look"}}, {"type": "tool", "name": "look"}),
        ({"type": "tool", "name": "look"}, {"type": "tool", "name": "look"}),
        ({"type": "function", "name": "look"}, {"type": "tool", "name": "look"}),
        ("look", {"type": "tool", "name": "look"}),
    ],
)
def test_tool_choice(given: Any, sent: dict[str, Any]) -> None:
    assert options_of({"tool_choice": given}, tools=TOOLS) == {"tool_choice": sent}
    alone = sent if given == "none" else {**sent, "disable_parallel_tool_use": True}
    assert options_of({"tool_choice": given, "parallel_tool_calls": False}, tools=TOOLS) == {"tool_choice": alone}


def test_one_tool_at_a_time() -> None:
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert options_of({"parallel_tool_calls": False}, tools=TOOLS) == {"tool_choice": one}
    assert options_of({"parallel_tool_calls": False}, tools=None) == {}
    assert options_of({"parallel_tool_calls": True}, tools=TOOLS) == {}
    assert options_of({"tool_choice": "auto"}, tools=None) == options_of({"tool_choice": "none"}, tools=None) == {}
    with pytest.raises(InvalidArgument, match=r"tool_choice must be .*'perhaps'"):
        options_of({"tool_choice": "perhaps"}, tools=TOOLS)


def test_a_schema_for_the_answer_with_every_object_closed() -> None:
    inner = {"type": "object", "properties": {"type": {"type": "string"}}}
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": inner},
            "b": {"anyOf": [inner, {"type": "null"}]},
            "d": {"$ref": "#/$defs/D"},
        },
        "$defs": {"D": inner},
    }
    before = json.dumps(schema)
    closed = {**inner, "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert options_of({"response_format": wanted, "reasoning_effort": "low"}, tools=None) == {
        "output_config": {
            "format": {
                "type": "json_schema",
                "schema": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "array", "items": closed},
                        "b": {"anyOf": [closed, {"type": "null"}]},
                        "d": {"$ref": "#/$defs/D"},
                    },
                    "$defs": {"D": closed},
                    "additionalProperties": False,
                },
            },
            "effort": "low",
        }
    }
    assert json.dumps(schema) == before


def test_a_schema_that_anthropic_cannot_enforce_is_asked_for_in_the_prompt() -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert options_of({"response_format": wanted}, tools=None) == {}
    instruction = schema_prompt(wanted)
    assert instruction == f"Answer with nothing but JSON that fits this schema: {json.dumps(schema)}"
    assert conversation_of([{"role": "system", "content": "s"}, HELLO], instruction=instruction)[0] == (
        f"s\n\n{instruction}"
    )
    plain = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string"}}}
    assert schema_prompt(plain) is schema_prompt(None) is schema_prompt({"type": "text"}) is None


def test_a_format_without_a_schema_is_not_supported() -> None:
    assert options_of({"response_format": {"type": "text"}}, tools=None) == {}
    with pytest.raises(NotSupported, match=r"must have a schema for Anthropic, got .*json_object.*Pass"):
        options_of({"response_format": {"type": "json_object"}}, tools=None)


def test_other_options() -> None:
    assert options_of({"stop": "END", "user": "u1", "thinking": {"type": "adaptive"}, "seed": None}, tools=None) == {
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u1"},
        "thinking": {"type": "adaptive"},
    }
    assert options_of({"stop": ["A", "B"]}, tools=None) == {"stop_sequences": ["A", "B"]}
    for given, sent in (
        ({"stop_sequences": "A"}, {"stop_sequences": ["A"]}),
        ({"stop": []}, {}),
        ({"stream_options": {"include_usage": True}}, {}),
        ({"metadata": {"user_id": "u"}}, {"metadata": {"user_id": "u"}}),
        ({"safety_identifier": "u"}, {"metadata": {"user_id": "u"}}),
        ({"service_tier": "default"}, {"service_tier": "standard_only"}),
        ({"service_tier": "auto"}, {"service_tier": "auto"}),
        ({"reasoning_effort": "minimal"}, {"output_config": {"effort": "low"}}),
        ({"reasoning_effort": "xhigh"}, {"output_config": {"effort": "xhigh"}}),
        ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}),
    ):
        assert options_of(given, tools=None) == sent


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"metadata": {"order": "1"}}, "metadata must be a dict with only user_id"),
        ({"service_tier": "flex"}, "service_tier must be 'auto' or 'standard_only' for Anthropic, got 'flex'"),
        ({"thinking": True}, "thinking must be a dict such as .* got True"),
    ],
)
def test_an_option_without_an_equivalent_is_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        options_of(given, tools=None)


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        ("claude-sonnet-5-5", 20_000),
        ("claude-opus-4-1-20250805", 20_000),
        ("claude-3-7-sonnet-latest", 20_000),
        ("us.anthropic.claude-haiku-4-5-20251001-v1:0", 20_000),
        ("claude-3-5-sonnet-20241022", 8192),
        ("anthropic/claude-3.5-haiku", 8192),
        ("claude-3-haiku-20240307", 4096),
        ("claude-2.1", 4096),
        ("kimi-k2", 4096),
    ],
)
def test_the_default_limit_fits_the_model(model: str, limit: int) -> None:
    assert default_max_tokens(model) == limit


def test_calls_of_a_server_that_counts_each_answers_calls_anew_have_ids_of_their_own() -> None:
    function = {"name": "look", "arguments": "{}"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    for _ in range(2):
        told = {"content": None, "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
        messages.append(incoming(told, "openai", "tool_calls", ids_in(messages)))
        messages.append({"role": "tool", "tool_call_id": "call_0", "content": "seen"})
    _, turns = conversation_of(messages)
    blocks = [block for turn in turns if isinstance(turn["content"], list) for block in turn["content"]]
    asked = [block["id"] for block in blocks if block["type"] == "tool_use"]
    answered = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
    assert asked == answered
    assert len(set(asked)) == 2  # Anthropic: "`tool_use` ids must be unique"


MESSAGES: list[dict[str, Any]] = [
    HELLO,
    {"role": "user", "content": [{"type": "text", "text": ""}]},
    {"role": "assistant", "content": ""},
    {"role": "assistant", "content": "a "},
    said(call("{broken", "a"), call("{}", "b"), content=" "),
    answered([THOUGHT, {**USE, "id": "a"}], "tool_use"),
    answered([{**THOUGHT, "signature": ""}, {"type": "text", "text": "so"}]),
    answered([{"type": "text", "text": "so"}, {**USE, "id": "cut"}], "max_tokens"),
    {"role": "tool", "tool_call_id": "a", "content": ""},
    {"role": "tool", "tool_call_id": "b", "content": "x", "metadata": {"is_error": True}},
]


def rejections(found: list[dict[str, Any]]) -> Iterator[str]:
    """Yield why Anthropic would reject the turns."""
    pending: list[str] = []
    seen: set[str] = set()
    for index, turn in enumerate(found):
        if turn.keys() != {"role", "content"}:
            yield f"fields {turn.keys()}"
        if index and turn["role"] == found[index - 1]["role"]:
            yield "roles must alternate"
        content = turn["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not blocks or any(each["type"] == "text" and not each["text"].strip() for each in blocks):
            yield "empty"
        if any(each["type"] == "thinking" and not each.get("signature") for each in blocks):
            yield "signature: Field required"
        if [each["tool_use_id"] for each in blocks if each["type"] == "tool_result"] != pending:
            yield "a call without its result directly after it, or a result without a call"
        if pending and any(each["type"] != "tool_result" for each in blocks[: len(pending)]):
            yield "results must be first"
        pending = [each["id"] for each in blocks if each["type"] == "tool_use"]
        if seen & set(pending):
            yield "ids must be unique"
        seen |= set(pending)
        if any(not isinstance(each["input"], dict) for each in blocks if each["type"] == "tool_use"):
            yield "input must be an object"
    if pending:
        yield "a call without a result"
    if found[-1]["role"] == "assistant" and str(found[-1]["content"]).endswith(" "):
        yield "trailing whitespace"


def test_every_history_is_sent_as_anthropic_accepts_it() -> None:
    for length in range(4):
        for history in itertools.product(MESSAGES, repeat=length):
            found = turns(HELLO, *history)
            assert (list(rejections(found)), history) == ([], history)


@pytest.mark.parametrize(
    ("written", "read"),
    [("null", {}), (r'"{\"a\": 1}"', {"a": 1}), ('{}{"a": 1}', {"a": 1}), ('"a"', None), ("[1]", None)],
)
def test_the_input_that_other_servers_write(written: str, read: dict[str, Any] | None) -> None:
    assert parsed_input(written) == read
