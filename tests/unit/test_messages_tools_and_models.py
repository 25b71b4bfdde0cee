"""The messages of tools, model clients, the agent loop, tracing and the test helpers: one shape, the value, the fix."""

# mypy: disable-error-code="arg-type, call-arg, list-item, dict-item, call-overload, type-var"

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import RunLimits, ToolCallingAgent
from agent_runtime_core.errors import InvalidArgument, ModelNotFound, ProviderUnavailable
from agent_runtime_core.llm import Retries, Timeouts, get_llm_client
from agent_runtime_core.llm._anthropic_format import conversation_of, options_of
from agent_runtime_core.llm._client import explained
from agent_runtime_core.llm._client_per_loop import AnthropicConfigurationError, required_key
from agent_runtime_core.llm._retries import Breakers
from agent_runtime_core.loop import agent_tool, run_turn_loop
from agent_runtime_core.loop.model_settings import settings_of_run
from agent_runtime_core.registry import Registry
from agent_runtime_core.testing import (
    Cassette,
    MockLLMClient,
    MockRunContext,
    MockTool,
    ReplayLLMClient,
    VirtualClock,
    create_test_context,
)
from agent_runtime_core.tools import Tool, ToolRegistry, tool
from agent_runtime_core.tools.arguments import BadArguments, check_arguments
from agent_runtime_core.tools.calculator import CalculatorTool, calculate
from agent_runtime_core.tools.registry import unknown_tool
from agent_runtime_core.tools.structured_output import Output
from agent_runtime_core.tools.todo import TodoStoreTool
from agent_runtime_core.tracing import LangfuseTraceSink
from tests.support.cases import for_each
from tests.support.messages import Triggered, error_of, literal_messages, problems_of


@tool
def gw(city: str, days: int = 1) -> str:
    """Get the weather."""
    return f"{city} {days}"


@tool
def paint(colour: str, where: dict[str, int]) -> str:
    """Paint."""
    return colour


@dataclass
class Knot:
    next: Knot


async def calls(name: str, arguments: Any, *tools: Tool) -> Any:
    registry = ToolRegistry()
    for each in tools or (gw, paint):
        registry.register(each)
    return await registry.execute(name, arguments)


def positional(a: int, /) -> int:
    return a


def generated(n: int) -> Iterator[int]:
    yield n


def knotted(knot: Knot) -> None: ...


def of_bytes(data: bytes) -> None: ...


class Shop:
    def buy(self, n: int) -> int:
        return n


class Misspelled(ToolCallingAgent):
    key = "misspelled"
    system_prompt = "Answer."
    tools = ()
    max_output_tokens = 2_000


async def failed(answer: Any) -> None:
    """Raise the error of a ToolResult."""
    result = await answer
    raise InvalidArgument(result.error)


def problem(output: Output, text: str) -> None:
    raise InvalidArgument(f"the answer: {output.problem(text)}")


def raised(error: BaseException) -> None:
    raise error


def opened() -> None:
    breakers = Breakers(VirtualClock(), after=1)
    key = ("openai", "https://api.openai.com", "gpt-4o")
    breakers.enter(key).failed(ModelNotFound("x"))
    breakers.enter(key).failed(ProviderUnavailable("down", status=503))
    breakers.enter(key)


def said(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


async def loop(**options: Any) -> Any:
    ctx = MockRunContext(said("hi"))
    return await run_turn_loop(ctx, MockLLMClient(["hello"]), **{"tools": ToolRegistry(), **options})


async def late_call(mock: MockTool) -> Any:
    await mock.handler()
    return await mock.handler()


CASES = [
    # -- calls of tools
    Triggered(lambda: calls("gx", {}), "unknown tool 'gx'. Known: gw, paint."),
    Triggered(lambda: calls("functions.gw", {}), "unknown tool 'functions.gw'. Did you mean 'gw'?"),
    Triggered(
        lambda: calls("gw", {"town": "Oslo"}),
        "tool 'gw': missing required argument 'city' (string); unexpected argument 'town'",
        about="tool 'gw'",
        fix="missing required argument 'city' (string)",
    ),
    Triggered(
        lambda: calls("gw", {"city": "Oslo", "dayz": 2}),
        "tool 'gw': unexpected argument 'dayz'. Did you mean 'days'?",
        about="tool 'gw'",
        fix="Did you mean 'days'?",
    ),
    Triggered(
        lambda: calls("gw", {"city": "Oslo", "zzz": 2}),
        "tool 'gw': unexpected argument 'zzz' (known: 'city', 'days')",
        about="tool 'gw'",
        fix="(known: 'city', 'days')",
    ),
    Triggered(lambda: calls("gw", {"city": 3}), "tool 'gw': city must be a string, got 3"),
    Triggered(
        lambda: calls("paint", {"colour": "red", "where": {"x": "1"}}),
        "tool 'paint': where.x must be an integer, got '1'",
    ),
    Triggered(
        lambda: calls("gw", "{bad"),
        "tool 'gw': invalid JSON arguments: Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1), got text that ends with '{bad'",
        about="tool 'gw'",
        fix="invalid JSON arguments: Expecting property name",
    ),
    Triggered(
        lambda: calls("gw", "[1]"),
        "tool 'gw': arguments must be a JSON object, got '[1]'. Send an object such as {\"name\": \"value\"}",
    ),
    Triggered(lambda: calls("gw", 3), "tool 'gw': arguments must be a dict or its JSON text, got 3"),
    Triggered(
        lambda: calls("gw", '{"city": NaN}'),
        "tool 'gw': invalid JSON arguments: NaN is not a JSON number. Use null or a string",
        about="tool 'gw'",
        fix="Use null or a string",
    ),
    Triggered(
        lambda: calls("gw", '{"city": "a", "city": "b"}'),
        "tool 'gw': arguments must have unique keys, got 'city' twice in one object",
    ),
    Triggered(
        lambda: calls("gw", {"city": "\ud800"}),
        "tool 'gw': city must not contain a lone surrogate, got '\\ud800'. Remove it",
    ),
    Triggered(
        lambda: calls("gw", {"city": "a", "days": 1e400}),
        "tool 'gw': days must be a JSON number, got inf. Use null or a string",
    ),
    Triggered(
        lambda: calls("gw", f'{{"city": {"[" * 120}{"]" * 120}}}'),
        f"tool 'gw': {('city' + '[0]' * 30)[:60]}… must be nested at most 98 levels deep, got more. "
        "Send a flatter value",
    ),
    # -- definitions of tools
    Triggered(
        lambda: Tool.from_function(3), "fn must be a function, got 3. Pass the function itself, without calling it."
    ),
    Triggered(lambda: Tool.from_function(lambda: None), "a tool must have a name, got a function. Pass name="),
    Triggered(
        lambda: Tool.from_function(generated),
        "a tool must return its result, got the generator generated. Return a list in place of yield.",
    ),
    Triggered(
        lambda: Tool.from_function(positional),
        "parameter 'a' of positional must accept an argument by name, got a positional-only parameter. A "
        "model passes all arguments by name.",
    ),
    Triggered(
        lambda: Tool.from_function(Shop.buy),
        "Shop.buy must be a method of an object, got the function of a class. Pass it from an instance, "
        "as in Tool.from_function(shop.buy)",
    ),
    Triggered(
        lambda: Tool.from_function(knotted),
        "parameter 'knot' of knotted: Knot must not contain itself, got a field of its own type. The "
        "JSON Schema of a tool cannot express that. Use dict.",
    ),
    Triggered(
        lambda: Tool.from_function(of_bytes),
        "parameter 'data' of of_bytes must have a type with a JSON Schema, got bytes. Use str, int, "
        "float, bool, list, dict, Literal, an Enum, a dataclass, a TypedDict or a model of pydantic, or "
        "pass a JSON Schema (a tool's parameters=, a dict as output_type)",
    ),
    Triggered(
        lambda: Tool.from_function(gw.handler, name="fs.read"),
        "tool name must have 1 to 64 characters of a-z, A-Z, 0-9, '_' and '-', got 'fs.read'. Model "
        "providers reject others. Pass name='fs_read_4074bc02'",
    ),
    Triggered(
        lambda: Tool.from_function(gw.handler, timeout=0),
        "tool 'gw': timeout must be a number of seconds above 0, or None for no limit, got 0.",
    ),
    Triggered(
        lambda: Tool.from_function(gw.handler, retries=-1),
        "tool 'gw': retries must be an integer of at least 0, got -1.",
    ),
    Triggered(
        lambda: Tool.from_function(gw.handler, retry_on="timeout"),
        "tool 'gw': retry_on must be an exception class, a tuple of them or a function of the error, got 'timeout'.",
    ),
    Triggered(
        lambda: ToolRegistry().register(gw.handler),
        "tool must be a Tool or a BaseTool object, got a function. Create one with Tool.from_function(fn)",
    ),
    # -- the tools of the library
    Triggered(lambda: calculate(""), "expression must be a string like '(3 + 4) * 2', got ''."),
    Triggered(lambda: calculate("1 +"), "expression '1 +' must have a number or '(' at character 4, got its end."),
    Triggered(lambda: calculate("1 / 0"), "division by zero: the divisor must be other than 0, got 0."),
    Triggered(lambda: calculate("9" * 301), "a number must have at most 300 digits, got 301."),
    Triggered(
        lambda: failed(CalculatorTool().execute("pow", 1, 2)),
        "operation must be one of add, subtract, multiply, divide, got 'pow'.",
    ),
    Triggered(lambda: failed(CalculatorTool().execute("add", 1)), "add must have both numbers, got a=1, b=None."),
    Triggered(lambda: failed(TodoStoreTool().execute("get", todo_id="9")), "unknown to-do '9'. None exist."),
    Triggered(lambda: failed(TodoStoreTool().execute("add")), "text must be the text of the new to-do, got None."),
    # -- answers of models
    Triggered(
        lambda: problem(Output({"type": "array", "minItems": 2}), "[1]"),
        "the answer: $ must have at least 2 items, got 1",
    ),
    Triggered(
        lambda: problem(Output({"type": "string", "enum": ["a", "b"]}), '"c"'),
        "the answer: $ must be one of 'a', 'b', got 'c'",
    ),
    # -- model clients
    Triggered(
        lambda: get_llm_client("gemini"),
        "unknown model provider 'gemini'. Known: anthropic, litellm, openai. Write "
        "'package.module:Class' for a custom one.",
    ),
    Triggered(
        lambda: get_llm_client("opnai"),
        "unknown model provider 'opnai'. Did you mean 'openai'? Write 'package.module:Class' for a custom one.",
    ),
    Triggered(lambda: Retries(max_attempts=0), "max_attempts must be an integer of at least 1, got 0."),
    Triggered(lambda: Retries(tries=0), "tries must be an integer of at least 1, got 0."),
    Triggered(lambda: Timeouts(total=0), "total must be a number of seconds above 0, or math.inf, got 0."),
    Triggered(
        lambda: MockLLMClient([3]),
        "a mock response must be a MockLLMResponse, an LLMResponse, a message dict, a str or an exception, got 3.",
    ),
    Triggered(
        lambda: conversation_of([{"role": "boss", "content": "x"}]),
        "role of messages[0] must be system, developer, user, assistant or tool, got 'boss'.",
    ),
    Triggered(
        lambda: conversation_of([{"role": "system", "content": "x"}]),
        "messages must have a message with content besides the system prompt, got none.",
    ),
    Triggered(
        lambda: conversation_of(said([{"type": "image_url", "image_url": "http://a.png"}])),
        "messages[0].content[0]: URL must be https, or data:image/…;base64,…, got 'http://a.png'.",
    ),
    Triggered(
        lambda: conversation_of(said([{"type": "file", "file": {}}])),
        "messages[0].content[0] must have file_data, file_url or file_id, got none of them. Add one.",
    ),
    Triggered(
        lambda: conversation_of(said([{"type": "input_audio"}])),
        "messages[0].content[0]: a part must be text, an image or a document, got 'input_audio'.",
    ),
    Triggered(
        lambda: conversation_of([{"role": "tool", "content": "x"}]),
        "tool call id of messages[0] must be a non-empty string, got None. A call and its result need the same id.",
    ),
    Triggered(
        lambda: options_of({"thinking": "yes"}, tools=None),
        "thinking must be a dict such as {'type': 'adaptive'}, got 'yes'. See Anthropic's documentation "
        "for the types that a model supports.",
    ),
    Triggered(
        lambda: options_of({"service_tier": "gold"}, tools=None),
        "service_tier must be 'auto' or 'standard_only' for Anthropic, got 'gold'.",
    ),
    Triggered(
        lambda: required_key(None, AnthropicConfigurationError, "AnthropicClient", "anthropic", "https://a.example"),
        "AnthropicClient has no API key. Pass api_key=, configure(anthropic_api_key=...) or ANTHROPIC_API_KEY",
        about="AnthropicClient",
        fix="Pass api_key=, configure(anthropic_api_key=...) or ANTHROPIC_API_KEY",
    ),
    Triggered(
        lambda: required_key("ä", AnthropicConfigurationError, "AnthropicClient", "anthropic", "https://a.example"),
        "API key for anthropic must have only printable ASCII characters, got others. Copy it again",
    ),
    Triggered(
        lambda: raised(explained(ModelNotFound("no such model"), "openai", "gpt-9")),
        "openai, model 'gpt-9': no such model. Check model=, the client's default_model= and "
        "configure(default_model=...)",
        about="openai, model 'gpt-9'",
        fix="Check model=, the client's default_model= and configure(default_model=...)",
    ),
    Triggered(
        opened,
        "circuit breaker open for openai, model 'gpt-4o': 1 failure in a row (last: ProviderUnavailable "
        "503). Retry in 30 s",
        about="openai, model 'gpt-4o'",
        fix="Retry in 30 s",
    ),
    # -- the agent loop
    Triggered(lambda: RunLimits(max_cost=1), "unknown limit 'max_cost'. Did you mean 'max_cost_usd'?"),
    Triggered(
        lambda: RunLimits(max_turns=0), "max_turns must be an integer of at least 1, or None for no limit, got 0."
    ),
    Triggered(
        lambda: loop(max_tokens=0),
        "max_tokens must be an integer of at least 1, or None for the client's default, got 0.",
    ),
    Triggered(
        lambda: loop(tools=[gw]),
        "tools must be a ToolRegistry, got [Tool(name='gw', description='Get the weather.', "
        "parameters={'type': 'object', …. Register each tool with ToolRegistry().register(tool)",
    ),
    Triggered(lambda: loop(on_truncated="ignore"), "on_truncated must be 'fail' or 'accept', got 'ignore'."),
    Triggered(lambda: agent_tool(3), "agent must be an agent or the key of one, got 3."),
    Triggered(lambda: settings_of_run({"model_settings": 3}), "params['model_settings'] must be a dict, got 3."),
    Triggered(
        lambda: settings_of_run({"model_settings": {"temprature": 1}}),
        "params['model_settings']: unknown setting 'temprature'. Did you mean 'temperature'?",
    ),
    Triggered(
        lambda: Registry().register(Misspelled()),
        "class Misspelled of a ToolCallingAgent: unknown setting 'max_output_tokens'. Did you mean 'max_tokens'?",
    ),
    # -- tracing
    Triggered(
        lambda: LangfuseTraceSink(),
        "LangfuseTraceSink has no public_key and no secret_key. Pass public_key=, "
        "configure(langfuse_public_key=...) or AGENT_RUNTIME_LANGFUSE_PUBLIC_KEY and secret_key=, "
        "configure(langfuse_secret_key=...) or AGENT_RUNTIME_LANGFUSE_SECRET_KEY",
        about="LangfuseTraceSink",
        fix="configure(langfuse_public_key=...)",
    ),
    # -- test helpers
    Triggered(
        lambda: Cassette.load("gone.json"),
        "cassette must be an existing file, got 'gone.json'. Record one with RecordingLLMClient.",
    ),
    Triggered(lambda: ReplayLLMClient(3), "cassette must be a Cassette, a list of exchanges or a path, got 3."),
    Triggered(
        lambda: ReplayLLMClient([{"request": {}}]),
        'exchange 0 must have a "request" with a list of "messages", got {}.',
    ),
    Triggered(
        lambda: VirtualClock().advance(-1), "seconds must be at least 0, got -1. Use set_wall to move wall() back."
    ),
    Triggered(
        lambda: MockTool("fetch", result=1, results=[2]),
        "MockTool 'fetch' must have at most one of result=, results= and fn=, got result and results. "
        "Pass one of them.",
    ),
    Triggered(
        lambda: late_call(MockTool("fetch", results=[1])),
        "MockTool 'fetch' must have a result for each call, got 1 for 2 calls. Add more to results=",
    ),
    Triggered(lambda: MockRunContext().emit("own", 3), "payload must be a dict, got 3."),
    Triggered(
        lambda: MockRunContext().step("pay", 3),
        "fn must be a function, got 3. Write ctx.step('pay', f), without calling f.",
    ),
    Triggered(
        lambda: create_test_context("hi", input_messages=[]),
        "input_messages must be None if message is passed, got []. Pass one of them.",
    ),
]


@for_each("row", CASES, ids=lambda row: row.message[:60])
async def test_a_triggered_error_has_the_shape_the_value_and_the_fix(
    row: Triggered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PUBLIC_KEY", "SECRET_KEY"):
        monkeypatch.delenv(f"LANGFUSE_{name}", raising=False)
    error = await error_of(row)
    assert (str(error), problems_of(row)) == (row.message, [])


def test_many_problems_of_one_call_are_one_line() -> None:
    with pytest.raises(BadArguments) as caught:
        check_arguments(gw.parameters, {"cty": 1, "dayz": 2})
    assert str(caught.value) == (
        "missing required argument 'city' (string); unexpected argument 'cty'. Did you mean 'city'? "
        "Also unexpected argument 'dayz'. Did you mean 'days'?"
    )


def test_a_list_of_known_tools_has_at_most_five_names() -> None:
    tools = [Tool.from_function(gw.handler, name=f"tool_{n}") for n in range(8)]
    assert str(unknown_tool("zzz", tools)) == (
        "unknown tool 'zzz'. Known: tool_0, tool_1, tool_2, tool_3, tool_4 and 3 more."
    )
    assert str(unknown_tool("zzz", [])) == "unknown tool 'zzz': no tools are registered"


def test_a_problem_ends_before_the_request_for_another_answer() -> None:
    output = Output({"type": "object", "properties": {"name": {}}, "additionalProperties": False})
    assert output.repair(str(output.problem('{"nam": 1}'))).startswith(
        "Your answer cannot be used: $: unexpected property 'nam'. Did you mean 'name'? Answer again "
    )


# -- every raise

PACKAGES = ("agents.py", "llm", "loop", "testing", "tools", "tracing")
#: Messages that are not made by `must` or `unknown`, each with the reason.
ALLOWED = {
    (
        "loop/model_settings.py",
        "{where}: unknown setting {name!r}. Did you mean {meant!r}?",
    ): "the names may differ much",
    ("tools/annotations.py", "{where}: {error.reason}"): "names the argument in an error of the codec",
    ("tools/registry.py", "Tool not found: {(name if isinstance(name, str) else brief(name))}"): "the words of 0.5.2",
    ("tools/schema.py", "missing required argument {name!r}"): "a call is named by the tool",
}


def test_every_message_about_a_value_is_made_by_must_or_unknown() -> None:
    assert set(literal_messages(lambda package: package in PACKAGES)) == ALLOWED.keys()
