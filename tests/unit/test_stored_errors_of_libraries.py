"""Errors of other libraries, made by these libraries, are the same in the first execution and in a later one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent_runtime_core.errors import StepExecutionError
from tests.support.runs import Rig, twice_values

Raise = Callable[[], Any]

ANSWERS: dict[int, dict[str, Any]] = {
    status: {"error": {"message": f"answer {status}", "type": "kind", "code": "why", "param": "model"}}
    for status in (400, 401, 404, 429, 500, 503)
}
HEADERS = {"x-request-id": "req-1", "retry-after": "7", "set-cookie": "session=hunter2"}


async def in_both(fails: Raise, read: Callable[[BaseException], Any]) -> tuple[Any, Any]:
    """What `read` returns for the cause of the step's error, in the first execution and in the next one."""

    async def body(ctx: Any) -> Any:
        with pytest.raises(StepExecutionError) as caught:
            await ctx.step("call", fails)
        await ctx.step("after", lambda: 1)
        cause = caught.value.__cause__
        about = [caught.value.message, caught.value.error_type, caught.value.error_attributes]
        return [
            *about,
            None if cause is None else [type(cause), str(cause), cause.args, sorted(vars(cause)), read(cause)],
        ]

    async with Rig() as rig:
        return await twice_values(rig, body)


def transport(status: int | None) -> Any:
    """A transport of httpx2 without a network; with None it cannot connect."""
    httpx2 = pytest.importorskip("httpx2")

    def answer(request: Any) -> Any:
        if status is None:
            raise httpx2.ConnectError("no route", request=request)
        return httpx2.Response(status, json=ANSWERS[status], headers=HEADERS, request=request)

    return httpx2.MockTransport(answer)


@pytest.mark.parametrize("status", [*ANSWERS, None])
async def test_openai(status: int | None) -> None:
    openai = pytest.importorskip("openai")
    httpx2 = pytest.importorskip("httpx2")

    def fails() -> None:
        with httpx2.Client(transport=transport(status)) as http:
            client = openai.OpenAI(api_key="hunter2", base_url="http://provider", http_client=http, max_retries=0)
            client.chat.completions.create(model="m", messages=[])

    def read(error: Any) -> Any:
        cause = error.__cause__
        common = [error.message, error.body, error.code, error.type, type(cause), str(cause)]
        return common if status is None else [*common, error.status_code, error.request_id, error.param]

    first, again = await in_both(fails, read)
    assert first == again
    assert first[3][0].__module__ == "openai"
    assert "response" not in first[3][3]
    assert first[3][4][-3:] == ([status, "req-1", "model"] if status else first[3][4][-3:])


@pytest.mark.parametrize("status", [*ANSWERS, None])
async def test_anthropic(status: int | None) -> None:
    anthropic = pytest.importorskip("anthropic")
    http = pytest.importorskip(anthropic.APIStatusError.__init__.__annotations__["response"].partition(".")[0])

    def answer(request: Any) -> Any:
        if status is None:
            raise http.ConnectError("no route", request=request)
        return http.Response(status, json=ANSWERS[status], headers=HEADERS, request=request)

    def fails() -> None:
        with http.Client(transport=http.MockTransport(answer)) as session:
            client = anthropic.Anthropic(
                api_key="hunter2", base_url="http://provider", http_client=session, max_retries=0
            )
            client.messages.create(model="m", messages=[], max_tokens=1)

    def read(error: Any) -> Any:
        return [error.message, error.body, error.status_code if status else None, type(error.__cause__)]

    first, again = await in_both(fails, read)
    assert first == again
    assert first[3][0].__module__ == "anthropic"
    assert first[3][4][2] == status


@pytest.mark.parametrize("status", [*ANSWERS, None])
async def test_pydantic_ai(status: int | None) -> None:
    exceptions = pytest.importorskip("pydantic_ai.exceptions")
    chat = pytest.importorskip("pydantic_ai.models.openai")
    httpx2, openai = pytest.importorskip("httpx2"), pytest.importorskip("openai")
    from pydantic_ai import Agent
    from pydantic_ai.providers.openai import OpenAIProvider

    async def fails() -> None:
        async with httpx2.AsyncClient(transport=transport(status)) as http:
            client = openai.AsyncOpenAI(api_key="hunter2", base_url="http://provider", http_client=http, max_retries=0)
            await Agent(chat.OpenAIChatModel("m", provider=OpenAIProvider(openai_client=client))).run("hello")

    def read(error: Any) -> Any:
        return [error.model_name, getattr(error, "status_code", None), getattr(error, "body", None),
                getattr(error, "headers", None), type(error.__cause__), str(error.__cause__)]  # fmt: skip

    first, again = await in_both(fails, read)
    assert first == again
    assert issubclass(first[3][0], exceptions.ModelAPIError)
    assert first[3][4][:2] == ["m", status]
    if status:
        assert issubclass(first[3][0], exceptions.ModelHTTPError)
        assert first[3][4][3]["retry-after"] == "7"
    assert "hunter2" not in str(first)


@pytest.mark.parametrize("status", [404, 503, None])
async def test_httpx2(status: int | None) -> None:
    httpx2 = pytest.importorskip("httpx2")

    def fails() -> None:
        with httpx2.Client(transport=transport(status)) as http:
            http.get("http://provider/a").raise_for_status()

    first, again = await in_both(fails, lambda error: None)
    assert first == again
    assert first[3][0] is (httpx2.HTTPStatusError if status else httpx2.ConnectError)


async def test_an_error_of_pydantic_cannot_be_built_and_is_described() -> None:
    pydantic = pytest.importorskip("pydantic")

    def fails() -> None:
        pydantic.TypeAdapter(int).validate_python("x")

    first, again = await in_both(fails, lambda error: None)
    assert first == again
    assert first[3] is None
    assert first[1] == "pydantic_core._pydantic_core.ValidationError"
    assert "valid integer" in first[0]
