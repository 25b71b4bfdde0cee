"""Conversations in OpenAI's chat format as Anthropic takes them, and its answers in that format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent_runtime_core._core.codec.json import decode, encode
from agent_runtime_core.errors import NotSupported, ProviderUnavailable, RequestRefused
from agent_runtime_core.llm._anthropic_format import conversation_of
from agent_runtime_core.llm._anthropic_options import options_of, tools_of
from agent_runtime_core.llm._anthropic_response import Assembly, answer_of, usage_of
from agent_runtime_core.llm._openai_format import ids_in, incoming

HELLO = {"role": "user", "content": "hello"}
PNG = "data:image/png;base64,iVBORw0KGgo="


def call(arguments: Any, id: str = "toolu_1", name: str = "look") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(*calls: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def turns(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return conversation_of(messages)[1]


def answered(content: list[dict[str, Any]], stop: str = "end_turn", **more: Any) -> dict[str, Any]:
    return answer_of({"content": content, "stop_reason": stop}, **more)[0]


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
            ],
        },
        {"role": "user", "content": "and?"},
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


@pytest.mark.parametrize(
    "arguments", ["{", "[1]", '"x"', "null", "{'a': 1}", '{"a": NaN}', '{"a": 1e999}', [1], 5, "[" * 100_000]
)
def test_arguments_that_are_no_object_are_refused_by_name(arguments: Any) -> None:
    with pytest.raises(RequestRefused, match=r"messages\[1\].*'toolu_1' of tool 'look'.*Correct them"):
        turns(HELLO, said(call(arguments)))


def test_ids_of_other_providers_fit_and_still_belong_together() -> None:
    given = "functions.look:0"
    own = {"type": "tool_use", "id": given, "name": "look", "input": {}}
    for asked in (said(call("{}", given)), answered([own], "tool_use")):
        assistant, result = turns(asked, {"role": "tool", "tool_call_id": given, "content": "x"})
        assert assistant["content"][0]["id"] == result["content"][0]["tool_use_id"] == "functions_look_0"


@pytest.mark.parametrize("message", [{"role": "tool", "content": "x"}, said(call("{}", ""))])
def test_a_call_or_result_without_an_id_is_refused(message: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused, match=r"messages\[1\] has no tool call id"):
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


@pytest.mark.parametrize(
    "url", ["http://example.com/a.png", "a.png", "data:text/plain;base64,aGk=", "data:image/png,x"]
)
def test_an_image_that_cannot_be_sent_is_refused(url: str) -> None:
    with pytest.raises(RequestRefused, match=r"messages\[0\]: the URL must be https, or data:image/"):
        turns({"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]})


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
    with pytest.raises(RequestRefused, match="messages must have a non-empty one"):
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
    assert message == {
        "role": "assistant",
        "content": "see",
        "tool_calls": [call('{"at": "Köln", "n": null}')],
    }
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


@pytest.mark.parametrize(
    ("stop", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
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
    assert answered([USE], stop) == {"role": "assistant", "content": ""}


def test_a_refused_answer_calls_no_tool() -> None:
    assert answered([{"type": "text", "text": "a"}, USE, {**USE, "id": "b"}], "refusal", call_is_whole=True) == {
        "role": "assistant",
        "content": "a",
    }


def test_thoughts_at_the_end_are_left_out() -> None:
    unsigned = {"type": "thinking", "thinking": "hm"}
    assert answered([unsigned], "max_tokens") == {"role": "assistant", "content": ""}
    assert answered([{"type": "text", "text": "a"}, THOUGHT], "max_tokens") == {"role": "assistant", "content": "a"}
    # A server that signs nothing gets its thoughts back all the same.
    kept = answered([unsigned, {"type": "text", "text": "a"}])
    assert turns(kept)[0]["content"] == [unsigned, {"type": "text", "text": "a"}]


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
    told = {"input_tokens": 1, "output_tokens": None, "cache_read_input_tokens": None, "output_tokens_details": None}
    assert usage_of(told) == {"prompt_tokens": 1, "completion_tokens": 0, "total_tokens": 1}


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
    assert assembly.ended
    assert is_whole
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
    "events", [[START, ending("end_turn")], [START, STOP], [START, ending(None), STOP], [START], [], [STOP]]
)
def test_a_stream_without_its_end_has_not_ended(events: list[dict[str, Any]]) -> None:
    assert not streamed(*events).ended


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


# Tools and options.


def test_tools() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    native = {"type": "web_search_20250305", "name": "web_search"}
    full = {"name": "look", "description": "Looks.", "parameters": schema, "strict": True}
    assert tools_of(
        [{"type": "function", "function": full}, {"type": "function", "function": {"name": "go"}}, native]
    ) == [
        {"name": "look", "description": "Looks.", "input_schema": schema, "strict": True},
        {"name": "go", "input_schema": {"type": "object", "properties": {}}},
        native,
    ]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ("auto", {"type": "auto"}),
        ("none", {"type": "none"}),
        ("required", {"type": "any"}),
        ({"type": "function", "function": {"name": "look"}}, {"type": "tool", "name": "look"}),
        ({"type": "tool", "name": "look"}, {"type": "tool", "name": "look"}),
    ],
)
def test_tool_choice(given: Any, sent: dict[str, Any]) -> None:
    assert options_of({"tool_choice": given}, tools=True) == {"tool_choice": sent}
    alone = sent if given == "none" else {**sent, "disable_parallel_tool_use": True}
    assert options_of({"tool_choice": given, "parallel_tool_calls": False}, tools=True) == {"tool_choice": alone}


def test_one_tool_at_a_time() -> None:
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert options_of({"parallel_tool_calls": False}, tools=True) == {"tool_choice": one}
    assert options_of({"parallel_tool_calls": False}, tools=False) == {}
    assert options_of({"parallel_tool_calls": True}, tools=True) == {}
    with pytest.raises(RequestRefused, match=r"tool_choice must be .*'perhaps'"):
        options_of({"tool_choice": "perhaps"}, tools=True)


def test_a_schema_for_the_answer_with_every_object_closed() -> None:
    inner = {"type": "object", "properties": {"type": {"type": "string"}}}
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "array", "items": inner},
            "b": {"anyOf": [inner, {"type": "null"}]},
            "c": {"type": "object", "additionalProperties": {"type": "string"}},
            "d": {"$ref": "#/$defs/D"},
        },
        "$defs": {"D": inner},
    }
    before = json.dumps(schema)
    closed = {**inner, "additionalProperties": False}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert options_of({"response_format": wanted, "reasoning_effort": "low"}, tools=False) == {
        "output_config": {
            "format": {
                "type": "json_schema",
                "schema": {
                    "type": "object",
                    "properties": {
                        "a": {"type": "array", "items": closed},
                        "b": {"anyOf": [closed, {"type": "null"}]},
                        "c": {"type": "object", "additionalProperties": {"type": "string"}},
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


def test_a_format_without_a_schema_is_not_supported() -> None:
    assert options_of({"response_format": {"type": "text"}}, tools=False) == {}
    with pytest.raises(NotSupported, match=r"json_object.*Use a schema"):
        options_of({"response_format": {"type": "json_object"}}, tools=False)


def test_other_options() -> None:
    assert options_of({"stop": "END", "user": "u1", "thinking": {"type": "adaptive"}, "seed": None}, tools=False) == {
        "stop_sequences": ["END"],
        "metadata": {"user_id": "u1"},
        "thinking": {"type": "adaptive"},
    }
    assert options_of({"stop": ["A", "B"]}, tools=False) == {"stop_sequences": ["A", "B"]}


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
