"""Settings of model calls: attributes of agents, packs of personalities, and params of runs, from one table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, ToolCallingAgent, ToolRegistry, tool
from agent_runtime_core.errors import InvalidArgument, UnknownSetting
from agent_runtime_core.interfaces import AgentRuntime, RunResult
from agent_runtime_core.loop.model_settings import OF_AGENTS, OF_PERSONALITIES, OPTIONS, SETTINGS, meant_by
from agent_runtime_core.registry import Registry
from agent_runtime_core.testing import MockLLMClient
from agent_runtime_core.turns import PersonalityPackManager, Sampling
from tests.support.cases import for_each

HELLO = [{"role": "user", "content": "hello"}]
VALUES: dict[str, Any] = {
    "model": "m-1",
    "temperature": 0.5,
    "top_p": 0.9,
    "max_tokens": 100,
    "reasoning_effort": "low",
    "seed": 7,
    "stop": ["END"],
    "presence_penalty": 0.1,
    "frequency_penalty": -0.1,
    "service_tier": "flex",
    "tool_choice": "none",
    "parallel_tool_calls": False,
    "user": "u-1",
    "metadata": {"a": "b"},
}


@tool
def look() -> str:
    """Look."""
    return "seen"


def agent(client: MockLLMClient, **fields: Any) -> ToolCallingAgent:
    fields = {"key": "a", "system_prompt": "s", "tools": ToolRegistry(), **fields}
    kind: type[ToolCallingAgent] = type("A", (ToolCallingAgent,), {**fields, "get_llm_client": lambda self: client})
    return kind()


async def sent(params: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the options of the request that an agent with these attributes makes."""
    client = MockLLMClient()
    tools = ToolRegistry()
    tools.register(look)  # options about tools are not sent without any
    async with AgentRunner() as runner:
        result = await runner.execute(
            agent(client, tools=tools, **fields), input_data={"messages": HELLO, "params": params or {}}
        )
    if result.error is not None:
        raise {"UnknownSetting": UnknownSetting}.get(result.error.type, InvalidArgument)(result.error.message)
    [call] = client.get_calls()
    return {**call["kwargs"], **({"model": call["model"]} if call["model"] else {})}


def test_the_values_of_this_test_are_the_whole_table() -> None:
    assert VALUES.keys() == SETTINGS.keys()


@for_each("stream", [False, True])
@for_each("name", OF_AGENTS)
async def test_an_attribute_of_an_agent_is_sent(name: str, stream: bool) -> None:
    assert await sent(stream=stream, **{name: VALUES[name]}) == {name: VALUES[name]}


@for_each("name", SETTINGS)
async def test_a_run_sets_each_of_them(name: str) -> None:
    assert await sent({"model_settings": {name: VALUES[name]}}) == {name: VALUES[name]}


async def test_the_settings_of_a_run_replace_those_of_its_agent() -> None:
    own: dict[str, Any] = {"temperature": 0.5, "seed": 1, "model_settings": {"top_k": 40, "seed": 2}}
    assert await sent(**own) == {"temperature": 0.5, "seed": 1, "top_k": 40}
    run = {"model_settings": {"temperature": None, "seed": 3}}
    assert await sent(run, **own) == {"seed": 3, "top_k": 40}


async def test_an_agent_without_settings_sends_none() -> None:
    assert await sent() == {}


async def test_a_property_is_a_setting_and_a_method_is_the_users_own() -> None:
    assert await sent(max_tokens=property(lambda self: 5), stop=lambda self: None) == {"max_tokens": 5}


@for_each(
    ("fields", "words"),
    [
        ({"temperature": "hot"}, "agent 'a': temperature must be a number from 0 to 2, got 'hot'"),
        ({"max_tokens": 0}, "agent 'a': max_tokens must be an integer of at least 1, got 0"),
        ({"seed": True}, "agent 'a': seed must be a whole number, got True"),
        ({"stop": [""]}, "agent 'a': stop must be a text or a list of texts"),
        ({"model_settings": [1]}, "agent 'a': model_settings must be a dict or None"),
        ({"model_settings": {"tools": []}}, "must have only options of the model, got 'tools'"),
        ({"params": {"model_settings": 3}}, r"params\['model_settings'\] must be a dict, got 3"),
        ({"params": {"model_settings": {"seed": "x"}}}, "seed must be a whole number, got 'x'"),
        (
            {"params": {"model_settings": {"api_base": "http://evil"}}},
            r"params\['model_settings'\]: unknown setting 'api_base'",
        ),
        (
            {"params": {"model_settings": {"temprature": 1}}},
            r"params\['model_settings'\]: unknown setting 'temprature'\. Did you mean 'temperature'\?",
        ),
    ],
)
async def test_a_value_that_does_not_fit_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        await sent(fields.pop("params", None), **fields)


# -- names that were meant to be settings

USUAL = [
    "name", "description", "steps", "step", "token", "tokens", "models", "model_client", "limit", "seeds", "users",
    "user_id", "stops", "tool", "toolset", "prompts", "system_prompts", "output_types", "temperatures",
    "tool_choices", "iterations", "max_steps", "max_retries", "max_turns", "retries", "timeout", "topics", "metadata",
    "meta_data", "config", "settings", "options", "llm", "api_key", "base_url", "memory", "state", "context",
    "version", "min_tokens", "token_limit", "total_tokens", "used_tokens", "input_type", "output", "output_schema",
    "reasoning", "penalty", "tier", "instructions", "language", "tone", "style", "max_length", "max_results",
    "max_size", "top_n", "topk", "streams", "streaming", "cache", "logger", "lock", "budget",
    "max_parallel_tool_calls",
]  # fmt: skip


@for_each("name", [*USUAL, *SETTINGS, "max_iterations", "output_type", "on_truncated", "stream", "limits"])
def test_usual_names_are_the_users_own(name: str) -> None:
    assert meant_by(name) is None or name in OF_AGENTS or hasattr(ToolCallingAgent, name)
    if not hasattr(ToolCallingAgent, name):
        Registry().register(agent(MockLLMClient(), **{name: 1}))


async def test_an_option_that_is_no_setting_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    for name in sorted(OPTIONS):
        caplog.clear()
        assert meant_by(name) is None
        made = agent(MockLLMClient(), **{name: 5})
        for _ in range(2):
            Registry().register(made)
        [record] = caplog.records
        assert record.levelname == "WARNING"
        assert f"the attribute '{name}' is not sent to the model" in record.getMessage()
        assert f"model_settings = {{'{name}': ...}}" in record.getMessage()


@pytest.mark.parametrize("further", [{"top_k": 5}, property(lambda self: {"top_k": 5})])
def test_an_option_that_is_passed_on_is_not_reported(further: Any, caplog: pytest.LogCaptureFixture) -> None:
    Registry().register(agent(MockLLMClient(), top_k=5, model_settings=further))
    assert caplog.records == []


@for_each(
    ("name", "meant"),
    [
        ("max_output_tokens", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max_completion_tokens", "max_tokens"),
        ("model_name", "model"),
        ("stop_sequences", "stop"),
        ("max_token", "max_tokens"),
        ("temprature", "temperature"),
        ("temparature", "temperature"),
        ("tempurature", "temperature"),
        ("max_iteration", "max_iterations"),
        ("max_iteratons", "max_iterations"),
        ("frequence_penalty", "frequency_penalty"),
        ("parallel_tool_call", "parallel_tool_calls"),
        ("reasoning_efort", "reasoning_effort"),
        ("ouput_type", "output_type"),
        ("response_format", "output_type"),
        ("model_setting", "model_settings"),
        ("modelSettings", "model_settings"),
    ],
)
async def test_a_misspelled_setting_is_rejected_when_the_agent_is_registered(name: str, meant: str) -> None:
    made = agent(MockLLMClient(), **{name: 5})
    with pytest.raises(
        UnknownSetting, match=f"class A of a ToolCallingAgent: unknown setting '{name}'. Did you mean '{meant}'"
    ):
        Registry().register(made)
    async with AgentRunner() as runner:
        with pytest.raises(UnknownSetting, match=name):
            await runner.execute(made, input_data={"messages": HELLO})


def test_only_values_of_classes_are_examined() -> None:
    class Mixin:
        max_token = 5

    class WithMixin(Mixin, ToolCallingAgent):
        key = "m"
        system_prompt = "s"
        tools = ToolRegistry()

    with pytest.raises(UnknownSetting, match=r"class Mixin of a ToolCallingAgent: unknown setting 'max_token'"):
        Registry().register(WithMixin())

    class Own(ToolCallingAgent):
        key = "o"
        system_prompt = "s"
        tools = ToolRegistry()
        _max_token = 5

        def __init__(self) -> None:
            self.model_name = "m"

        @property
        def max_output_tokens(self) -> int:
            return 5

        def model_id(self) -> str:
            return "m"

        @staticmethod
        def temprature() -> int:
            return 1

    Registry().register(Own())

    class Other(AgentRuntime):
        key = "x"
        max_token = 5

        async def run(self, ctx: Any) -> RunResult:
            return RunResult()

    Registry().register(Other())


# -- personalities


@pytest.mark.parametrize("name", OF_PERSONALITIES)
def test_a_pack_sets_each_sampling_option(name: str, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir()
    value = VALUES[name]
    text = f'"{value}"' if isinstance(value, str) else str(value).replace("'", '"')
    (tmp_path / "p" / "pack.toml").write_text(f'name = "p"\n{name} = {text}\n', encoding="utf-8")
    assert PersonalityPackManager(tmp_path).get("p").sampling.options() == {name: value}


def test_a_personality_without_the_new_options_keeps_its_digest(tmp_path: Path) -> None:
    """Recorded digests, and those of workers with an earlier version, stay equal."""
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "pack.toml").write_text('name = "p"\ntemperature = 0.5\n', encoding="utf-8")
    digest = PersonalityPackManager(tmp_path).get("p").digest
    assert digest == DIGEST
    assert Sampling().options() == {}


DIGEST = "212ec564b0455dad6b47c8392dd8aac6deaa03c5118825bbc9244917b6aec79b"
