"""Requests that are sent once more without a part that their server rejects."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("openai")

from agent_runtime_core.errors import ProviderUnavailable, RequestRefused
from agent_runtime_core.llm import OpenAIClient, Retries
from agent_runtime_core.llm._fallbacks import openai_fallbacks
from agent_runtime_core.llm._provider import Request
from agent_runtime_core.llm._retries import RETRY_BUDGET, RetryBudget
from tests.support.cases import for_each
from tests.support.provider_server import Script, WireServer, script, serving, stream

KEY = "sk-canary-0123456789"
ASK = [{"role": "user", "content": "How warm is it in Oslo?"}]
CALL = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
THOUGHTS = {"reasoning": "I think", "reasoning_details": [{"type": "reasoning.text", "text": "I think"}]}
RESULT = {"role": "tool", "tool_call_id": "a", "content": "4"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
GROQ = (
    "'messages.1' : for 'role:assistant' the following must be satisfied"
    "[('messages.1' : property 'reasoning' is unsupported)]"
)


def called(**fields: Any) -> dict[str, Any]:
    """An answer with a tool call and fields of its provider."""
    return {"role": "assistant", "content": None, "tool_calls": [CALL], "provider_fields": {"openai": fields}}


def refused(message: str, status: int = 400) -> Script:
    return script({"error": {"message": message, "type": "invalid_request_error"}}, status=status)


def answered(asked: dict[str, Any], text: str = "done") -> Script:
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    rest = {"id": "c", "created": 1, "model": "m"}
    if asked.get("stream"):
        choice["delta"] = {"content": text}
        return stream({**rest, "object": "chat.completion.chunk", "choices": [choice]})
    choice["message"] = {"role": "assistant", "content": text}
    return script({**rest, "object": "chat.completion", "choices": [choice]})


def over(server: WireServer, **options: Any) -> OpenAIClient:
    return OpenAIClient(KEY, "m", base_url=server.url, **{"retries": Retries(tries=1), **options})


def extra_fields(asked: dict[str, Any]) -> set[str]:
    known = {"role", "content", "tool_calls", "tool_call_id"}
    return {name for message in asked["messages"] for name in message.keys() - known}


@for_each("streamed", [False, True], ids=["whole", "streamed"])
@for_each(
    ("status", "message"),
    [
        (400, GROQ),
        (400, "property 'reasoning_details' is not supported for assistant messages"),
        (422, "body.messages.1.assistant.reasoning: Extra inputs are not permitted"),
        (400, "Additional properties are not allowed ('reasoning' was unexpected) - 'messages.1'"),
        (400, "Please remove the reasoning from your message to reduce network traffic."),
        (400, 'Invalid JSON payload received. Unknown name "reasoning" at messages[1]: Cannot find field.'),
        (422, "Extra inputs are not permitted"),
        (400, "Unrecognized request argument supplied"),
    ],
)
async def test_fields_that_a_server_rejects_are_sent_once(status: int, message: str, streamed: bool) -> None:
    def answer(asked: dict[str, Any]) -> Script:
        return refused(message, status) if extra_fields(asked) else answered(asked)

    history = [*ASK, called(**THOUGHTS), RESULT]
    async with serving(answer) as server:
        client = over(server)
        budget = RETRY_BUDGET.set(RetryBudget(0))
        try:
            for _ in range(2):
                assert (await client.generate(history, stream=streamed)).message["content"] == "done"
        finally:
            RETRY_BUDGET.reset(budget)
        await client.close()
    assert [extra_fields(asked) for asked in server.asked] == [set(THOUGHTS), set(), set()]
    assert [len(asked["messages"]) for asked in server.asked] == [3, 3, 3]


async def test_a_stream_of_chunks_is_sent_once_more_too() -> None:
    async with serving(lambda asked: refused(GROQ) if extra_fields(asked) else answered(asked)) as server:
        client = over(server)
        chunks = [each.delta async for each in client.stream([*ASK, called(**THOUGHTS), RESULT])]
        await client.close()
    assert ("".join(chunks), len(server.asked)) == ("done", 2)


async def test_requests_at_the_same_time_are_each_sent_once_more() -> None:
    async with serving(lambda asked: refused(GROQ) if extra_fields(asked) else answered(asked)) as server:
        client = over(server)
        history = [*ASK, called(**THOUGHTS), RESULT]
        found = await asyncio.gather(*[client.generate(history) for _ in range(3)])
        await client.close()
    assert [each.message["content"] for each in found] == ["done"] * 3


async def test_the_attempts_of_other_failures_stay() -> None:
    answers = [refused(GROQ), script({"error": {"message": "busy"}}, status=500), answered({})]
    async with serving(*answers) as server:
        client = over(server, retries=Retries(tries=2, base=0))
        assert (await client.generate([*ASK, called(**THOUGHTS), RESULT])).message["content"] == "done"
        await client.close()
    assert [extra_fields(asked) for asked in server.asked] == [set(THOUGHTS), set(), set()]


@pytest.mark.parametrize(
    "message",
    [
        "The `reasoning_content` in the thinking mode must be passed back to the API.",
        "thinking is enabled but reasoning_content is missing in assistant tool call message at index 1",
        "temperature must be at most 2",
    ],
)
async def test_an_error_about_something_else_is_raised(message: str) -> None:
    async with serving(refused(message)) as server:
        client = over(server)
        with pytest.raises(RequestRefused):
            await client.generate([*ASK, called(reasoning_content="I think"), RESULT])
        await client.close()
    assert len(server.asked) == 1


async def test_a_change_that_did_not_help_is_not_remembered() -> None:
    async with serving(refused(GROQ)) as server:
        client = over(server)
        for _ in range(2):
            with pytest.raises(RequestRefused):
                await client.generate([*ASK, called(**THOUGHTS), RESULT])
        await client.close()
    assert [extra_fields(asked) for asked in server.asked] == [set(THOUGHTS), set()] * 2


async def test_each_model_of_a_client_has_its_own_changes() -> None:
    def answer(asked: dict[str, Any]) -> Script:
        return refused(GROQ) if extra_fields(asked) and asked["model"] == "m" else answered(asked)

    history = [*ASK, called(**THOUGHTS), RESULT]
    async with serving(answer) as server:
        client = over(server)
        for model in ("m", "other", "m"):
            await client.generate(history, model=model)
        await client.close()
    assert [bool(extra_fields(asked)) for asked in server.asked] == [True, False, True, False]


@pytest.mark.parametrize(("option", "sent"), [(True, [True]), (None, [True, False]), (False, [False])])
async def test_an_option_says_whether_reasoning_is_sent(option: bool | None, sent: list[bool]) -> None:
    async with serving(lambda asked: refused(GROQ) if extra_fields(asked) else answered(asked)) as server:
        client = over(server, send_reasoning=option)
        try:
            await client.generate([*ASK, called(**THOUGHTS), RESULT])
        except RequestRefused:
            assert option is True
        await client.close()
    assert [bool(extra_fields(asked)) for asked in server.asked] == sent


async def test_fields_of_calls_are_kept_unless_they_are_rejected() -> None:
    signature = {"tool_calls": {"a": {"extra_content": {"google": {"thought_signature": "s"}}}}}
    history = [*ASK, called(**THOUGHTS, **signature), RESULT]

    def without_reasoning(asked: dict[str, Any]) -> Script:
        return refused(GROQ) if extra_fields(asked) else answered(asked)

    def without_extra(asked: dict[str, Any]) -> Script:
        own = asked["messages"][1]["tool_calls"][0].keys() - CALL.keys()
        return (
            refused("messages.1.tool_calls.0.extra_content: Extra inputs are not permitted")
            if own
            else (answered(asked))
        )

    async with serving(without_reasoning) as server:
        client = over(server)
        await client.generate(history)
        await client.close()
    assert server.asked[-1]["messages"][1]["tool_calls"][0]["extra_content"]
    async with serving(without_extra) as server:
        client = over(server)
        await client.generate(history)
        await client.close()
    assert server.asked[-1]["messages"][1] == {"role": "assistant", "content": None, "tool_calls": [CALL], **THOUGHTS}


@for_each(
    ("endpoint", "model", "sent"),
    [
        ("https://api.groq.com/openai/v1", "m", False),
        ("https://api.cerebras.ai/v1", "m", False),
        ("https://api.mistral.ai/v1", "m", False),
        ("https://api.openai.com/v1", "m", False),
        ("https://me.openai.azure.com/openai/v1", "m", False),
        ("https://api.deepseek.com", "m", True),
        ("https://openrouter.ai/api/v1", "groq/m", True),
        ("https://notgroq.com/v1", "m", True),
        ("", "groq/m", False),
        ("", "deepseek/m", True),
    ],
)
def test_servers_that_are_known_to_reject_reasoning(endpoint: str, model: str, sent: bool) -> None:
    fallbacks = openai_fallbacks("openai", endpoint, send_reasoning=None, schema_in_prompt=None, by_prefix=True)
    top = {"role": "assistant", "content": "x", "reasoning_content": "I think"}
    request = fallbacks.known(Request([*ASK, called(**THOUGHTS), RESULT, top], model))
    assert bool(request.messages[1]["provider_fields"]["openai"]) is sent
    assert ("reasoning_content" in request.messages[3]) is sent


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "json mode cannot be combined with tool/function calling"),
        (400, "Function calling with a response mime type: 'application/json' is unsupported"),
        (400, "This response_format type is unavailable now"),
        (400, "This model does not support response format `json_schema`. See supported models"),
        (400, "Invalid parameter: 'response_format' of type 'json_schema' is not supported with this model."),
        (400, "You cannot specify response format and function call at the same time"),
        (422, "body.response_format.type: Input should be 'text'"),
        (400, "'response_format.type' must be 'json_schema' or 'text'"),
        (404, "No endpoints found that support structured outputs with tools"),
        (400, "The specified schema produces a constraint that has too many states for serving."),
    ],
)
async def test_a_schema_that_a_server_rejects_is_described_in_the_prompt(
    status: int, message: str, streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(asked: dict[str, Any]) -> Script:
        return refused(message, status) if "response_format" in asked else answered(asked, '{"a": "x"}')

    async with serving(answer) as server:
        client = over(server)
        with caplog.at_level(logging.WARNING, logger="agent_runtime_core"):
            for _ in range(2):
                answer_text = (await client.generate(ASK, stream=streamed, response_format=FORMAT)).message["content"]
                assert answer_text == '{"a": "x"}'
        await client.close()
    assert ["response_format" in asked for asked in server.asked] == [True, False, False]
    system, *rest = server.asked[-1]["messages"]
    assert system["role"] == "system"
    assert '"properties": {"a": {"type": "string"}}' in system["content"]
    assert rest == ASK
    assert [each.getMessage() for each in caplog.records if "schema_in_prompt=True" in each.getMessage()]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}], None])
async def test_the_schema_is_a_part_of_the_one_system_message(content: Any) -> None:
    async with serving(answered({})) as server:
        client = over(server, schema_in_prompt=True)
        await client.generate([{"role": "system", "content": content}, *ASK], response_format={"type": "json_object"})
        await client.close()
    (asked,) = server.asked
    assert "response_format" not in asked
    assert [message["role"] for message in asked["messages"]] == ["system", "user"]
    assert "must be a JSON object" in str(asked["messages"][0]["content"])
    assert ("Be brief." in str(asked["messages"][0]["content"])) is bool(content)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schema_in_prompt": False}, "json mode cannot be combined with tool/function calling"),
        ({}, "Invalid schema for response_format 'answer': schema must have a 'type' key."),
        ({}, "messages must alternate"),
    ],
)
async def test_a_schema_is_not_described_against_the_will_of_its_author(options: dict[str, Any], message: str) -> None:
    async with serving(refused(message)) as server:
        client = over(server, **options)
        with pytest.raises(RequestRefused):
            await client.generate(ASK, response_format=FORMAT)
        await client.close()
    assert len(server.asked) == 1


async def test_usage_of_a_stream_is_not_asked_for_if_the_server_rejects_that() -> None:
    def answer(asked: dict[str, Any]) -> Script:
        return (
            refused("stream_options: Extra inputs are not permitted")
            if "stream_options" in asked
            else (answered(asked))
        )

    async with serving(answer) as server:
        client = over(server)
        for _ in range(2):
            assert (await client.generate(ASK, stream=True)).usage == {}
        await client.close()
    assert ["stream_options" in asked for asked in server.asked] == [True, False, False]


@pytest.mark.parametrize("tries", [1, 3])
@pytest.mark.parametrize(
    "failed",
    [
        {"message": "Failed to call a function. Please adjust your prompt.", "code": "tool_use_failed"},
        {"message": "Failed to generate JSON. Please adjust your prompt.", "code": "json_validate_failed"},
        {"message": "Tool call validation failed: attempted to call tool 'x' which was not in request.tools"},
        {"message": "Model produced invalid sequence as part of ToolUse."},
    ],
)
async def test_an_unreadable_call_is_asked_for_again(failed: dict[str, Any], tries: int) -> None:
    async with serving(script({"error": failed}, status=400)) as server:
        client = over(server, retries=Retries(tries=tries, base=0))
        # More than opens the circuit of a provider that fails.
        for _ in range(6):
            with pytest.raises(RequestRefused):
                await client.generate(ASK)
        await client.close()
    assert len(server.asked) == 6 * tries


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("reason", ["function_call_filter: MALFORMED_FUNCTION_CALL", "malformed_function_call"])
async def test_an_answer_that_is_only_a_malformed_call_is_asked_for_again(reason: str, streamed: bool) -> None:
    def malformed(asked: dict[str, Any]) -> Script:
        if len(server.asked) > 1:
            return answered(asked)
        choice = {"index": 0, "finish_reason": reason, "delta" if streamed else "message": {"content": ""}}
        body = {"id": "c", "created": 1, "model": "m", "choices": [choice], "object": "chat.completion"}
        return stream(body) if streamed else script(body)

    async with serving(malformed) as server:
        client = over(server, retries=Retries(base=0))
        assert (await client.generate(ASK, stream=streamed)).message["content"] == "done"
        await client.close()
    assert len(server.asked) == 2


async def test_a_server_that_fails_gets_the_same_request() -> None:
    async with serving(script({"error": {"message": "reasoning is unsupported"}}, status=500)) as server:
        client = over(server)
        with pytest.raises(ProviderUnavailable):
            await client.generate([*ASK, called(**THOUGHTS), RESULT])
        await client.close()
    assert len(server.asked) == 1


def by_template(*, system: bool = True, tools: bool = True) -> Callable[[dict[str, Any]], str | None]:
    """Return the check of a strict chat template: it returns its complaint about the roles of the messages."""

    def complaint(asked: dict[str, Any]) -> str | None:
        roles = [each["role"] for each in asked["messages"]]
        if not system and "system" in roles:
            return "System role not supported"
        if "system" in roles[1:]:
            return "System message must be at the beginning."
        pairs = list(pairwise(roles))
        if any(first == second != "tool" for first, second in pairs):
            return "Conversation roles must alternate user/assistant/user/assistant/..."
        return None if tools or ("tool", "user") not in pairs else "Unexpected role 'user' after role 'tool'"

    return complaint


PART = {"type": "text", "text": "And in Rome?"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
BRIEF = {"role": "system", "content": "Be brief."}
LATER = {"role": "system", "content": "Answer now."}
EMPTY = {"role": "assistant", "content": ""}
STRICT: list[tuple[dict[str, bool], list[dict[str, Any]], list[dict[str, Any]], int]] = [
    (
        {},
        [*ASK, {"role": "user", "content": "Please."}],
        [{"role": "user", "content": f"{ASK[0]['content']}\n\nPlease."}],
        1,
    ),
    ({}, [*ASK, EMPTY, *ASK], [{"role": "user", "content": f"{ASK[0]['content']}\n\n{ASK[0]['content']}"}], 1),
    (
        {},
        [*ASK, {"role": "user", "content": [PART, IMAGE]}],
        [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}, PART, IMAGE]}],
        1,
    ),
    (
        {},
        [*ASK, {"role": "assistant", "content": "Let me see."}, called(), RESULT],
        [*ASK, {**called(), "content": "Let me see."}, RESULT],
        1,
    ),
    ({}, [BRIEF, *ASK, LATER], [{"role": "system", "content": "Be brief.\n\nAnswer now."}, *ASK], 1),
    (
        {},
        [BRIEF, *ASK, LATER, *ASK],
        [
            {"role": "system", "content": "Be brief.\n\nAnswer now."},
            {"role": "user", "content": "\n\n".join([ASK[0]["content"]] * 2)},
        ],
        2,
    ),
    ({"system": False}, [BRIEF, *ASK], [{"role": "user", "content": f"Be brief.\n\n{ASK[0]['content']}"}], 1),
    (
        {"tools": False},
        [*ASK, called(), RESULT, *ASK],
        [*ASK, called(), RESULT, {"role": "assistant", "content": "OK."}, *ASK],
        1,
    ),
]


@for_each("streamed", [False, True], ids=["whole", "streamed"])
@for_each(("template", "messages", "sent", "rejections"), STRICT, ids=range(len(STRICT)))
async def test_messages_are_arranged_for_a_strict_chat_template(
    template: dict[str, bool], messages: list[Any], sent: list[Any], rejections: int, streamed: bool
) -> None:
    check = by_template(**template)
    before = copy.deepcopy(messages)

    def answer(asked: dict[str, Any]) -> Script:
        return refused(words, 500 if streamed else 400) if (words := check(asked)) else answered(asked)

    async with serving(answer) as server:
        client = over(server)
        for _ in range(2):
            assert (await client.generate(messages, stream=streamed)).message["content"] == "done"
        await client.close()
    assert [check(asked) is None for asked in server.asked] == [False] * rejections + [True, True]
    wanted = [{name: value for name, value in each.items() if name != "provider_fields"} for each in sent]
    assert server.asked[-1]["messages"] == server.asked[-2]["messages"] == wanted
    assert messages == before


@pytest.mark.parametrize(
    "message",
    [
        "After the optional system message, conversation roles must alternate user and assistant roles",
        'messages: roles must alternate between "user" and "assistant", but found multiple "user" roles in a row',
        "A conversation must alternate between user and assistant roles.",
        "After the (optional) system message(s), user and assistant roles should be alternating.",
        "Expected last role User or Tool (or Assistant with prefix True) for serving but got assistant",
        "Unexpected role 'user' after role 'user'",
        "deepseek-reasoner does not support successive user or assistant messages (messages[1] and messages[2])",
        "the role of message with even index in the messages must be assistant",
    ],
)
async def test_servers_have_many_words_for_alternating_roles(message: str) -> None:
    async with serving(lambda asked: refused(message) if asked["messages"][1:] else answered(asked)) as server:
        client = over(server)
        assert (await client.generate([*ASK, *ASK])).message["content"] == "done"
        with pytest.raises(RequestRefused):  # nothing can be joined
            await client.generate([*ASK, {"role": "assistant", "content": "4"}, *ASK])
        await client.close()
    assert [len(asked["messages"]) for asked in server.asked] == [2, 1, 3]


@pytest.mark.parametrize(
    "message",
    [
        "System message must be at the beginning",
        "only one system message is allowed",
        "Multiple system messages are not supported",
        "system message must be the first message",
        "Unexpected role 'system' after role 'user'",
    ],
)
async def test_servers_have_many_words_for_one_system_message(message: str) -> None:
    messages = [BRIEF, *ASK, {"role": "assistant", "content": "4"}, LATER]
    async with serving(lambda asked: refused(message) if asked["messages"][3:] else answered(asked)) as server:
        client = over(server)
        assert (await client.generate(messages)).message["content"] == "done"
        await client.close()
    assert [[each["role"] for each in asked["messages"]] for asked in server.asked] == [
        ["system", "user", "assistant", "system"],
        ["system", "user", "assistant"],
    ]


@pytest.mark.parametrize(
    "message",
    [
        "System role not supported",
        "Developer instruction is not enabled for models/gemma-3-27b-it",
        "Unsupported value: 'messages[0].role' does not support 'system' with this model.",
    ],
)
async def test_a_schema_in_the_prompt_of_a_model_without_system_messages(message: str) -> None:
    def answer(asked: dict[str, Any]) -> Script:
        if any(each["role"] == "system" for each in asked["messages"]):
            return refused(message)
        return refused("json mode is not supported") if "response_format" in asked else answered(asked)

    async with serving(answer) as server:
        client = over(server)
        for _ in range(2):
            await client.generate([BRIEF, *ASK], response_format={"type": "json_object"})
        await client.close()
    assert len(server.asked) == 4
    (last,) = server.asked[-1]["messages"]
    assert last["content"].startswith("Be brief.\n\n")
    assert "must be a JSON object" in last["content"]


@pytest.mark.parametrize(
    ("options", "message", "changed"),
    [
        (
            {"temperature": 0.2},
            "Unsupported value: 'temperature' does not support 0.2 with this model. Only the default (1) is supported.",
            {},
        ),
        ({"temperature": 0.2}, "`temperature` is deprecated for this model.", {}),
        (
            {"max_tokens": 9},
            "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead.",
            {"max_completion_tokens": 9},
        ),
    ],
)
async def test_parameters_that_a_reasoning_model_rejects(
    options: dict[str, Any], message: str, changed: dict[str, Any]
) -> None:
    def sent(asked: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in asked.items() if name not in ("messages", "model")}

    async with serving(lambda asked: refused(message) if options.keys() & asked.keys() else answered(asked)) as server:
        client = over(server)
        for _ in range(2):
            assert (await client.generate(ASK, **options)).message["content"] == "done"
        await client.close()
    assert [sent(asked) for asked in server.asked] == [options, changed, changed]


async def test_a_temperature_out_of_range_is_the_caller_s_mistake() -> None:
    async with serving(lambda asked: refused("invalid temperature: must be between 0 and 2")) as server:
        client = over(server)
        with pytest.raises(RequestRefused, match="between 0 and 2"):
            await client.generate(ASK, temperature=3)
        await client.close()
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "message",
    [
        "Missing `reasoning_content` field in the assistant message at message index 1",
        "The reasoning_content in the thinking mode must be passed back to the API.",
        "thinking is enabled but reasoning_content is missing in assistant tool call message at index 1",
    ],
)
async def test_reasoning_that_a_server_demands_is_sent_for_answers_that_have_none(message: str) -> None:
    def answer(asked: dict[str, Any]) -> Script:
        answers = [each for each in asked["messages"] if each["role"] == "assistant"]
        return answered(asked) if all(each.get("reasoning_content") for each in answers) else refused(message)

    history = [*ASK, called(), RESULT, *ASK, called(reasoning_content="I think"), RESULT]
    async with serving(answer) as server:
        client = over(server)
        assert (await client.generate(history)).message["content"] == "done"
        await client.close()
    first, second = server.asked
    assert [each.get("reasoning_content") for each in first["messages"] if each["role"] == "assistant"] == [
        None,
        "I think",
    ]
    assert [each.get("reasoning_content") for each in second["messages"] if each["role"] == "assistant"] == [
        " ",
        "I think",
    ]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_chat_template_may_complain_in_an_answer_with_status_200(streamed: bool) -> None:
    words = {"error": {"message": "Error rendering prompt: Conversation roles must alternate user/assistant"}}

    def answer(asked: dict[str, Any]) -> Script:
        if asked["messages"][1:]:
            return stream(words) if streamed else script(words)
        return answered(asked)

    async with serving(answer) as server:
        client = over(server)
        assert (await client.generate([*ASK, *ASK], stream=streamed)).message["content"] == "done"
        await client.close()
    assert [len(asked["messages"]) for asked in server.asked] == [2, 1]


async def test_a_failure_of_a_server_is_no_complaint_about_roles() -> None:
    async with serving(script({"error": {"message": "busy"}}, status=500)) as server:
        client = over(server)
        with pytest.raises(ProviderUnavailable):
            await client.generate([*ASK, *ASK])
        await client.close()
    assert len(server.asked) == 1
