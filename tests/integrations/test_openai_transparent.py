"""In a run, agents of OpenAI Agents behave as with the SDK alone: errors, streams, failed tools, classes of models."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

pytest.importorskip("agents")

import httpx2
import openai
import pydantic
from agents import (
    Agent,
    GuardrailFunctionOutput,
    ModelRetrySettings,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OutputGuardrail,
    RunConfig,
    Runner,
    function_tool,
    retry_policies,
    set_tracing_disabled,
)
from agents.exceptions import ModelBehaviorError, UserError
from agents.items import ModelResponse
from agents.memory import SessionSettings
from agents.models.interface import Model, ModelTracing
from agents.models.multi_provider import MultiProvider
from agents.retry import ModelRetryAdvice, ModelRetryAdviceRequest
from agents.testing import assistant_message, function_call
from openai.types.responses import ResponseErrorEvent, ResponseFailedEvent, ResponseIncompleteEvent

from agent_runtime_core import current_run
from agent_runtime_core.integrations.openai_agents import (
    ConversationSession,
    DurableModel,
    DurableModelProvider,
    durable,
    durable_config,
    run_agent,
)
from tests.integrations.test_openai_agents import in_run
from tests.support.openai_models import FakeModel, results

set_tracing_disabled(True)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "runs.db"


def rate_limited(**headers: str) -> openai.RateLimitError:
    response = httpx2.Response(429, headers=headers, request=httpx2.Request("POST", "https://example.org"))
    return openai.RateLimitError("slow down", response=response, body=None)


class Failing(FakeModel):
    """Raises these errors first, in `get_response` and while it streams. Keeps the requests for advice."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__(lambda items: [assistant_message("fine")])
        self.errors = list(errors)
        self.advised: list[ModelRetryAdviceRequest] = []

    async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
        if self.errors:
            raise self.errors.pop(0)
        return await super().get_response(*args, **kwargs)

    async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        if self.errors:
            raise self.errors.pop(0)
        async for event in super().stream_response(*args, **kwargs):
            yield event

    def get_retry_advice(self, request: ModelRetryAdviceRequest) -> ModelRetryAdvice | None:
        self.advised.append(request)
        return ModelRetryAdvice(suggested=True, retry_after=0.0, replay_safety="safe")


SETTINGS: list[Any] = [ModelSettings(), [], None, [], ModelTracing.DISABLED]  # the arguments after the input
NO_STATE: dict[str, Any] = {"previous_response_id": None, "conversation_id": None, "prompt": None}


async def go_on() -> None:
    """Record a step, so that a resumed run gets the recorded error of the call before it."""
    ctx = current_run()
    assert ctx is not None
    await ctx.step("later", lambda: None)


async def ignore(event: Any) -> None:
    pass


# -- errors


class Odd(Exception):
    """An error that cannot be rebuilt from its record."""

    def __init__(self, *, response: object) -> None:
        super().__init__("odd")
        self.response = response


@pytest.mark.parametrize("on_event", [None, ignore], ids=["whole", "streamed"])
async def test_an_error_of_the_model_is_the_object_that_it_raised(store: Path, on_event: Any) -> None:
    class Local(Exception):
        pass

    for number, error in enumerate((rate_limited(**{"x-request-id": "req_1"}), Odd(response=object()), Local("here"))):

        async def work(error: Exception = error) -> BaseException:
            with pytest.raises(type(error)) as raised:
                await run_agent(Agent(name="failing", model=Failing(error)), "Hi!", on_event=on_event)
            return raised.value

        found = await in_run(store.with_suffix(f".{number}"), work)
        assert found is error


async def test_an_error_of_a_tool_is_the_cause_that_the_sdk_names(store: Path) -> None:
    error = Odd(response=object())

    def fail() -> str:
        raise error

    async def work() -> BaseException | None:
        tool = function_tool(fail, failure_error_function=None)
        model = FakeModel(lambda items: [function_call("fail", {}, call_id="c")])
        with pytest.raises(UserError) as raised:
            await run_agent(Agent(name="failing", model=model, tools=[tool]), "Fail!")
        return raised.value.__cause__

    assert await in_run(store, work) is error


async def test_an_error_of_a_session_is_the_object_that_its_store_raised(store: Path) -> None:
    error = Odd(response=object())

    class Broken:
        async def get(self, *args: Any) -> Any:
            raise error

    async def work() -> BaseException:
        session = ConversationSession("room", store=Broken())  # type: ignore[arg-type]
        with pytest.raises(Odd) as raised:
            await run_agent(Agent(name="failing", model=Failing()), "Hi!", session=session)
        return raised.value

    assert await in_run(store, work) is error


@pytest.mark.parametrize("on_event", [None, ignore], ids=["whole", "streamed"])
async def test_policies_of_the_sdk_read_the_headers_of_an_error(store: Path, on_event: Any) -> None:
    errors = [rate_limited(**{"retry-after": "0"}), rate_limited(**{"retry-after-ms": "0"})]
    model = Failing(*errors)

    async def work() -> Any:
        retry = ModelRetrySettings(max_retries=2, policy=retry_policies.retry_after())
        agent = Agent(name="retrying", model=model, model_settings=ModelSettings(retry=retry))
        return (await run_agent(agent, "Hi!", on_event=on_event)).final_output

    assert await in_run(store, work, crash=True) == await in_run(store, work) == "fine"
    assert [request.error for request in model.advised] == errors
    assert len(model.asked) == 1


# -- streams


def ended(kind: str, response: Any) -> Any:
    if kind == "response.failed":
        return ResponseFailedEvent.construct(type=kind, response=response, sequence_number=9)
    if kind == "response.incomplete":
        return ResponseIncompleteEvent.construct(type=kind, response=response, sequence_number=9)
    return ResponseErrorEvent.construct(type=kind, message="broken", code=None, param=None, sequence_number=9)


class Ending(FakeModel):
    """Its stream ends with another event than `response.completed`, or with none. Only its own task can close it."""

    def __init__(self, kind: str | None) -> None:
        super().__init__(lambda items: [assistant_message("Never.")])
        self.kind = kind
        self.streams: list[Any] = []
        self.tasks: list[Any] = []

    def stream_response(self, *args: Any, **kwargs: Any) -> Any:
        stream = self._events(super().stream_response(*args, **kwargs))
        self.streams.append(stream)  # so that no garbage collector closes it
        return stream

    async def _events(self, events: AsyncIterator[Any]) -> AsyncIterator[Any]:
        self.tasks.append(asyncio.current_task())
        try:
            async for event in events:
                if event.type != "response.completed":
                    yield event
                elif self.kind is not None:
                    yield ended(self.kind, event.response)
        finally:
            self.tasks.append(asyncio.current_task())


@pytest.mark.parametrize("kind", ["response.failed", "response.incomplete", "error", None])
async def test_a_failed_stream_ends_as_with_the_sdk_alone(store: Path, kind: str | None) -> None:
    async def tried(run: Callable[[Any], Any]) -> tuple[list[str], str]:
        seen: list[str] = []

        async def on_event(event: Any) -> None:
            if event.type == "raw_response_event":
                seen.append(event.data.type)

        with pytest.raises(ModelBehaviorError) as raised:
            await run(on_event)
        return seen, str(raised.value)

    async def alone(on_event: Any) -> None:
        async for event in Runner.run_streamed(Agent(name="ending", model=Ending(kind)), "Hi!").stream_events():
            await on_event(event)

    model = Ending(kind)

    async def work() -> Any:
        found = await tried(lambda on_event: run_agent(Agent(name="ending", model=model), "Hi!", on_event=on_event))
        await go_on()
        return found

    seen, error = await tried(alone)
    # Without a last event, the SDK drops those that it has not delivered when it finds the error.
    assert await in_run(store, work, crash=True) == (seen if kind else ANY, error)
    assert len(model.tasks) == 2
    assert model.tasks[0] is model.tasks[1]
    assert await in_run(store, work) == ([kind] if kind else [], error)  # the events before it are not recorded
    assert len(model.streams) == 1


async def test_a_stream_that_is_left_is_closed(store: Path) -> None:
    """In a run and outside of one, and in the task that opened it."""
    for inside in (False, True):
        model = Ending("response.failed")

        async def work(model: Ending = model) -> None:
            stream: Any = DurableModel(model).stream_response(None, "Hi!", *SETTINGS, **NO_STATE)
            await anext(stream)
            await stream.aclose()

        await (in_run(store, work) if inside else work())
        assert len(model.tasks) == 2
        assert model.tasks[0] is model.tasks[1]


async def test_events_of_a_stream_are_the_objects_of_the_model(store: Path) -> None:
    sent: list[Any] = []

    class Sending(FakeModel):
        async def stream_response(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            async for event in super().stream_response(*args, **kwargs):
                if event.type == "response.completed":
                    event.response._request_id = "req_1"
                sent.append(event)
                yield event

    model = Sending(lambda items: [assistant_message("Hello.")])
    seen: list[Any] = []

    async def work() -> Any:
        async def on_event(event: Any) -> None:
            if event.type == "raw_response_event":
                seen.append(event.data)

        result = await run_agent(Agent(name="greeter", model=model), "Hi!", on_event=on_event)
        return [each.request_id for each in result.raw_responses]

    assert await in_run(store, work, crash=True) == ["req_1"]
    assert all(a is b for a, b in zip(seen, sent, strict=True))
    assert await in_run(store, work) == ["req_1"]
    assert len(model.asked) == 1


async def test_an_answer_is_the_object_of_the_model(store: Path) -> None:
    sent: list[Any] = []

    class Sending(FakeModel):
        async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
            sent.append(await super().get_response(*args, **kwargs))
            answer: ModelResponse = sent[-1]
            return answer

    async def work() -> Any:
        result = await run_agent(Agent(name="greeter", model=Sending(lambda items: [assistant_message("Hi.")])), "Hi!")
        return result.raw_responses[0].output[0]

    first = await in_run(store, work, crash=True)
    assert first is sent[0].output[0]
    assert await in_run(store, work) == first
    assert len(sent) == 1


# -- tools with an output type


class Offer(pydantic.BaseModel):
    price: int


@pytest.mark.parametrize("fault", ["timeout", "error"])
async def test_a_typed_tool_that_fails_tells_the_model(store: Path, fault: str) -> None:
    ran: list[str] = []

    async def offer() -> Offer:
        ran.append(fault)
        if fault == "error":
            raise ValueError("sold out")
        await asyncio.sleep(3600)
        raise AssertionError

    def agent() -> Agent[Any]:
        tool = function_tool(offer, output_type=Offer, timeout=0.001 if fault == "timeout" else None)
        model = FakeModel(
            lambda items: (
                [assistant_message(str(found[0]))]
                if (found := results(items))
                else [function_call("offer", {}, call_id="c")]
            )
        )
        return Agent(name="seller", model=model, tools=[tool])

    async def work() -> Any:
        return (await run_agent(agent(), "Offer!")).final_output

    expected = (await Runner.run(agent(), "Offer!")).final_output
    assert ("timed out" if fault == "timeout" else "An error occurred") in expected
    ran.clear()
    assert await in_run(store, work, crash=True) == expected
    assert await in_run(store, work) == expected
    assert ran == [fault]


# -- the classes of models and providers


def chat_model() -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel("gpt-5.4-nano", openai.AsyncOpenAI(api_key="none"))


async def test_a_durable_model_looks_like_its_model() -> None:
    inner = chat_model()
    model = DurableModel(inner)
    for kind in (DurableModel, OpenAIChatCompletionsModel, Model):
        assert isinstance(model, kind)
    assert not isinstance(model, FakeModel)
    assert model.model == "gpt-5.4-nano"
    assert not hasattr(model, "no_such_attribute")
    assert copy.copy(model).model == inner.model
    assert DurableModel(inner) == model == inner
    assert DurableModel(chat_model()) != model
    assert len({model, DurableModel(inner)}) == 1
    assert isinstance(durable_config(RunConfig(model=model)).model, DurableModel)


async def test_a_durable_provider_looks_like_its_provider() -> None:
    inner = MultiProvider(openai_api_key="none")
    provider = DurableModelProvider(inner)
    assert isinstance(provider, MultiProvider)
    assert isinstance(provider, DurableModelProvider)
    assert provider.openai_provider is inner.openai_provider
    assert isinstance(provider.get_model("gpt-5.4-nano"), DurableModel)


async def test_a_configuration_may_be_a_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the SDK alone, a provider is closed by whoever made it."""
    closed: list[object] = []

    async def aclose(self: MultiProvider) -> None:
        closed.append(self)

    monkeypatch.setattr(MultiProvider, "aclose", aclose)
    agent = Agent(name="chat", model=FakeModel(lambda items: [assistant_message("fine")]))
    given = MultiProvider(openai_api_key="none")
    for config in (None, {"workflow_name": "mine"}, {"model_provider": given}, RunConfig(model_provider=given)):
        assert (await run_agent(agent, "Hi!", run_config=config)).final_output == "fine"
    assert len(closed) == 2
    assert given not in closed


async def test_checks_of_the_sdk_see_the_model(store: Path) -> None:
    """Only chat completions accept output guardrails with a previous response."""

    def check(context: Any, agent: Any, output: Any) -> GuardrailFunctionOutput:
        return GuardrailFunctionOutput(output_info=None, tripwire_triggered=False)

    class Chat(OpenAIChatCompletionsModel):
        async def get_response(self, *args: Any, **kwargs: Any) -> ModelResponse:
            return await FakeModel(lambda items: [assistant_message("fine")]).get_response(*args, **kwargs)

    async def work() -> Any:
        model = Chat("gpt-5.4-nano", openai.AsyncOpenAI(api_key="none"))
        agent = Agent(name="chat", model=model, output_guardrails=[OutputGuardrail(check)])
        return (await run_agent(agent, "Hi!", previous_response_id="r1")).final_output

    assert await in_run(store, work) == "fine"


async def test_an_agent_that_is_durable_has_the_settings_of_its_model() -> None:
    agent = Agent(name="chat", model=DurableModel(chat_model()))
    assert agent.model_settings == Agent(name="chat", model=chat_model()).model_settings
    assert durable(agent).clone().model_settings == agent.model_settings


# -- sessions


async def test_a_session_limits_what_it_returns(store: Path) -> None:
    asked: list[int] = []

    def answer(items: list[dict[str, Any]]) -> list[Any]:
        asked.append(len(items))
        return [assistant_message("fine")]

    async def work() -> Any:
        session = ConversationSession("room", session_settings={"limit": 3})
        assert isinstance(session.session_settings, SessionSettings)
        for number in range(3):
            await run_agent(Agent(name="chat", model=FakeModel(answer)), f"Hi {number}!", session=session)
        config = RunConfig(session_settings=SessionSettings(limit=1))
        await run_agent(Agent(name="chat", model=FakeModel(answer)), "Hi!", session=session, run_config=config)
        return len(await session.get_items()), len(await session.get_items(limit=5))

    assert await in_run(store, work) == (3, 5)
    assert asked == [1, 3, 4, 2]
