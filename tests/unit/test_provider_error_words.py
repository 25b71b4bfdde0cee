"""What a server says in an error: its words, and whether the request was too long."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("openai")

from agent_runtime_core.errors import ContextOverflow, ProviderError, RateLimited, RequestRefused
from agent_runtime_core.llm import OpenAIClient, Retries
from agent_runtime_core.llm._provider_errors import is_too_long, of_status, without_keys, words_of
from agent_runtime_core.llm.anthropic import error_of
from tests.support.cases import for_each
from tests.support.provider_server import Script, script, serving

KEY = "sk-canary-0123456789"
ASK = [{"role": "user", "content": "hello"}]
PAGE = (
    b"<!DOCTYPE html><html><head><title>502 Bad Gateway</title><style>body{color:red}</style>"
    b"<script>var a = 1;</script></head><body><h1>The words</h1></body></html>"
)


async def failure(answer: Script, *, streamed: bool = False) -> ProviderError:
    async with serving(answer) as server:
        client = OpenAIClient(KEY, "m", base_url=server.url, retries=Retries(tries=1))
        with pytest.raises(ProviderError) as caught:
            await client.generate(ASK, stream=streamed)
        await client.close()
    return caught.value


@for_each("streamed", [False, True], ids=["whole", "streamed"])
@for_each(
    "body",
    [
        {"error": {"message": "The words", "type": "x", "code": None}},
        {"error": "The words"},
        {"detail": "The words"},
        {"detail": [{"loc": ["body", "messages"], "msg": "The words", "input": "a customer's text"}]},
        {"message": "The words"},
        {"Message": "The words"},
        {"object": "error", "message": "The words", "type": "BadRequestError", "code": 400},
        {"errors": ["The words"]},
        {"success": False, "errors": [{"code": 7000, "message": "The words"}], "result": None},
        {"errors": {"model": ["The words"]}},
        [{"error": {"code": 400, "message": "The words", "status": "INVALID_ARGUMENT"}}],
        {"error": {"message": json.dumps({"error": {"message": "The words"}})}},
        {"error": {"message": "Provider returned error", "metadata": {"raw": '{"detail": "The words"}'}}},
        {"type": "about:blank", "title": "Bad Request", "status": 400, "detail": "The words"},
        {"error": "Bad Request", "message": "The words", "statusCode": 400},
        {"error": "invalid_request", "error_description": "The words"},
        {"fault": {"faultstring": "The words"}},
        {"base_resp": {"status_code": 2013, "status_msg": "The words"}},
        "The words",
    ],
)
async def test_the_words_of_a_server_are_in_the_error(body: Any, streamed: bool) -> None:
    error = await failure(script(body, status=400), streamed=streamed)
    assert type(error) is RequestRefused
    assert "The words" in str(error)
    assert "customer" not in str(error)


@pytest.mark.parametrize(
    "answer",
    [
        Script(b"The words", status=400, content_type="text/plain"),
        Script(PAGE, status=502, content_type="text/html"),
        Script(b'{"detail": "The words"}', status=400, content_type="text/plain"),
        script({"detail": "The words"}),
        script({"error": {"detail": "The words"}}),
    ],
)
async def test_the_words_of_a_body_that_is_not_json_or_not_an_error(answer: Script) -> None:
    text = str(await failure(answer))
    assert "The words" in text
    assert "color" not in text
    assert "var a" not in text


@pytest.mark.parametrize("body", [f"no access for {KEY} " + "x" * 5000, {"a": {"b": "y" * 5000}}, "\x1b[31m\u202ered"])
async def test_words_have_a_length_no_keys_and_no_control_characters(body: Any) -> None:
    text = str(await failure(script({"detail": body}, status=400)))
    assert len(text) < 500
    assert text.isprintable()
    assert KEY not in text


@pytest.mark.parametrize("body", [None, {}, [], "", 5, {"a": 1}, "<" * 50_000, "[" * 50_000, {"error": None}])
def test_a_body_without_words(body: Any) -> None:
    assert isinstance(words_of(body), str)


@pytest.mark.parametrize(
    "key", ["gsk_abcdefgh12345678", "hf_abcdefgh12345678", "xai-abcdefgh12345678", "AIzaSyA0123456789abcdef"]
)
def test_keys_of_other_providers_are_removed(key: str) -> None:
    assert without_keys(f"wrong key {key}.") == "wrong key (key)" or key not in without_keys(f"wrong key {key}.")


TOO_LONG = {
    "OpenAI": "This model's maximum context length is 8192 tokens. However, your messages resulted in 9000 tokens.",
    "OpenAI, input": "Your input exceeds the context window of this model. Please adjust your input and try again.",
    "OpenAI, gpt-5": "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 300000.",
    "OpenAI, text": "Invalid 'messages[1].content': string too long. Expected a string with maximum length 10485760.",
    "Anthropic": "prompt is too long: 208310 tokens > 200000 maximum",
    "Anthropic, limit": "input length and `max_tokens` exceed context limit: 190000 + 20000 > 200000",
    "Bedrock": "Input is too long for requested model.",
    "Bedrock, tokens": "Input Tokens Exceeded: Number of input tokens exceeds maximum length.",
    "Bedrock, Titan": "400 Bad Request: Too many input tokens. Max input tokens: 8192, request input token count: 9000",
    "Gemini": "The input token count (1048577) exceeds the maximum number of tokens allowed (1048576).",
    "Vertex": "the input token count is 1100000 but model only supports up to 1048576",
    "Mistral": "Prompt contains 40000 tokens and 0 draft tokens, too large for model with 32768 maximum context length",
    "Groq": "Please reduce the length of the messages or completion.",
    "vLLM": "This model's maximum context length is 8192 tokens. However, you requested 9000 tokens",
    "vLLM, decoder": "The decoder prompt (length 9000) is longer than the maximum model length of 8192.",
    "llama.cpp": "the request exceeds the available context size. try increasing the context size",
    "llama.cpp, new": "request (9000 tokens) exceeds the available context size (8192 tokens), try increasing it",
    "Ollama": "the input length exceeds the context length",
    "Ollama, new": "prompt too long; exceeded max context length by 12 tokens",
    "Cohere": "too many tokens: total number of tokens in the prompt cannot exceed 4081 - received 5000.",
    "Cohere, old": "total number of tokens (prompt and prediction) cannot exceed 4081",
    "Together": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 8193. Given: 9000 and 512",
    "TGI": "Input validation error: `inputs` must have less than 1024 tokens. Given: 2000",
    "DeepSeek": "This model's maximum context length is 65536 tokens. However, you requested 70000 tokens",
    "xAI": "This model's maximum prompt length is 131072 but the request contains 537812 tokens.",
    "Cerebras": "Please reduce the length of the messages or completion. Current length is 9000 while limit is 8192",
    "LM Studio": "Trying to keep the first 9000 tokens when context the overflows. The model is loaded with context "
    "length of only 4096 tokens",
    "OpenRouter": "This endpoint's maximum context length is 8192 tokens. However, you requested about 9000 tokens",
    "Copilot": "prompt token count of 130000 exceeds the limit of 128000",
    "GitHub Models": "Request body too large for gpt-4o model. Max size: 8000 tokens.",
    "Zhipu": "Prompt exceeds max length",
    "DashScope": "Range of input length should be [1, 30720]",
    "Moonshot": "Invalid request: Your request exceeded model token limit: 8192",
    "MiniMax": "invalid params, context window exceeds limit (2013)",
    "Fireworks": "The prompt is too long: 140000, model maximum context length: 131071",
    "SGLang": "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
    "TensorRT-LLM": "Prompt length (9000) exceeds maximum input length (8192). Set log level to info",
    "Moonshot, new": "Messages have 300000 tokens, which exceeds the max limit of 262144 tokens.",
    "Hugging Face": "Expected input length to be at most 4096",
    "Stepfun": "Token limit exceeded: 9000 > 8192",
    "proxies": "Conversation too long",
    "proxies, prompt": "The number of tokens in the prompt exceeds the limit",
    "proxies, model": "The request exceeds the model's context",
    "watsonx": "the number of input tokens 5000 cannot exceed the total tokens limit 4096 for this model",
}


@for_each("message", TOO_LONG.values(), ids=TOO_LONG)
def test_every_server_has_its_own_words_for_a_context_overflow(message: str) -> None:
    for status in (None, 400, 413, 422, 500):
        assert is_too_long(status, f"400 invalid_request_error {message}")
    assert not is_too_long(401, message)


@for_each(
    "message",
    [
        "max_tokens is too large: 100000. This model supports at most 16384 completion tokens, whereas you provided it",
        "max_tokens: 100000 > 64000, which is the maximum allowed number of output tokens for claude",
        "The maximum tokens you requested exceeds the model limit of 4096. Try again with a lower value.",
        "`max_tokens` must be less than or equal to `8192`, the maximum value for `max_tokens` is less than the "
        "`context_window` for this model",
        "Input validation error: `max_new_tokens` must be <= 4096. Given: 9000",
        "Range of max_tokens should be [1, 8192]",
        "Invalid input: temperature exceeds 2",
        "Invalid 'tools[0].function.description': string too long. Expected a string with maximum length 1024",
        "Invalid schema for function 'label'",
        "Invalid 'messages[0].name': string too long. Expected a string with maximum length 64",
    ],
)
def test_a_limit_of_the_answer_is_not_a_context_overflow(message: str) -> None:
    assert not is_too_long(400, message)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"message": "Input is too long for requested model."}, ContextOverflow),
        (500, {"error": "the input length exceeds the context length"}, ContextOverflow),
        (422, {"error": TOO_LONG["TGI"], "error_type": "validation"}, ContextOverflow),
        (400, {"error": {"code": 400, "message": "no", "type": "exceed_context_size_error"}}, ContextOverflow),
        (200, {"error": {"message": TOO_LONG["LM Studio"]}}, ContextOverflow),
        (
            429,
            {"error": {"message": "Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 50000. "
            "The input or output tokens must be reduced in order to run successfully."}},
            ContextOverflow,
        ),
        (429, {"error": {"message": "Rate limit reached for gpt-4o on tokens per min (TPM)"}}, RateLimited),
    ],
)  # fmt: skip
async def test_a_context_overflow_is_not_retried(status: int, body: Any, kind: type[ProviderError]) -> None:
    for streamed in (False, True):
        error = await failure(script(body, status=status), streamed=streamed)
        assert type(error) is kind
        assert error.retriable is (kind is RateLimited)


USED_UP = {
    "Anthropic": "You have reached your specified API usage limits. You will regain access on 2026-12-01 at 00:00 UTC.",
    "Anthropic, spend": "You've hit your monthly spend limit",
    "Anthropic, balance": "Your credit balance is too low to access the Anthropic API",
    "OpenAI": "Billing hard limit has been reached",
    "Gemini": "Your project has exceeded its monthly spending cap. Please go to AI Studio to manage it.",
    "xAI": "Your team has either used all available credits or reached its monthly spending limit.",
    "GitHub": "You have exceeded your monthly quota (Request ID: F278)",
    "Volcengine": "You have exceeded the monthly usage quota. It will reset at 2026-08-29 23:59:59 +0800 CST.",
    "OpenRouter": "Key limit exceeded (monthly limit). Manage it in your settings",
    "OpenRouter, credits": "Insufficient credits. Add more",
    "Zhipu": "Weekly/Monthly Limit Exhausted. Your limit will reset at 2026-12-01",
    "Zhipu, balance": "余额不足或无可用资源包,请充值。",
    "Moonshot": "Your account is suspended due to insufficient balance, please recharge your account",
    "Kimi": "You've reached your usage limit for this billing cycle. Your quota will be refreshed in the next cycle.",
    "Cohere": "You are using a Trial key, which is limited to 1000 API calls / month.",
    "a gateway": "quota_exceeded: the budget of this key for this month is used",
    "another gateway": "monthly_cost_limit_exceeded: monthly cost limit reached",
}
TRANSIENT = {
    "OpenAI": "Rate limit reached for gpt-4o on requests per min (RPM): Limit 3, Used 3, Requested 1.",
    "Groq": "Rate limit reached for model `x` on tokens per minute (TPM): Limit 6000, Used 5900. Try again in 2s. "
    "Need more tokens? Upgrade to Dev Tier today at https://console.groq.com/settings/billing",
    "an offer": "Too many requests per minute. Upgrade to Pro for $20 per month",
    "Gemini": "Quota exceeded for metric generate_content_requests_per_minute, limit: 10. Please retry in 12s.",
    "Azure": "Requests to the operation have exceeded call rate limit of your current pricing tier. Retry after 26 s.",
    "Anthropic": "This request would exceed your organization's rate limit of 50,000 input tokens per minute.",
    "Cohere": "You are using a Trial key, which is limited to 40 API calls / minute.",
    "overloaded": "Overloaded",
}


@for_each("message", USED_UP.values(), ids=USED_UP)
def test_what_is_used_up_for_a_month_is_not_asked_for_again(message: str) -> None:
    for headers in ({}, {"x-should-retry": "true"}, {"retry-after": "1"}):
        assert not of_status(429, message, message, "openai", "m", headers=headers).retriable
        body = {"type": "error", "error": {"type": "rate_limit_error", "message": message}}
        for status in (429, 200):
            error = error_of(body, status, "m", headers=headers)
            assert (type(error), error.retriable) == (RateLimited, False)


@pytest.mark.parametrize("message", TRANSIENT.values(), ids=TRANSIENT)
def test_a_limit_by_the_minute_is_asked_for_again(message: str) -> None:
    assert of_status(429, message, message, "openai", "m").retriable


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
async def test_a_monthly_limit_is_asked_for_once(streamed: bool) -> None:
    body = {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED", "message": USED_UP["Gemini"]}}
    async with serving(script(body, status=429)) as server:
        client = OpenAIClient(KEY, "m", base_url=server.url, retries=Retries(max_attempts=3, base=0.001))
        with pytest.raises(RateLimited, match="monthly spending cap"):
            await client.generate(ASK, stream=streamed)
        await client.close()
        assert len(server.asked) == 1
