"""Approvals of tool calls: who is asked, which answers count, and what runs and is told afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime_core import AgentRunner, RunContext, RunnerConfig, SyncRunContext, Tool, ToolCallingAgent
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.interfaces import AgentRuntime, RunResult
from agent_runtime_core.loop import prepared_calls
from agent_runtime_core.planning import Plan, execute_plan
from agent_runtime_core.planning.plan import PlanStep
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import ApprovalRequest
from agent_runtime_core.status import RunStatus
from agent_runtime_core.testing import MockRunContext, crash_everywhere
from agent_runtime_core.tools.base import BaseTool, ToolResult
from agent_runtime_core.tools.confirmation import answer_schema, decision_of, misfit_of_answer
from agent_runtime_core.tools.registry import ToolRegistry
from tests.support.cases import for_each
from tests.support.command_line import Commands
from tests.support.runs import Rig
from tests.support.scripted_model import Scripted, asks, call

HELLO = {"messages": [{"role": "user", "content": "pay"}]}
SHOWN = {"amount": 4100}
PARKED = RunnerConfig(park_after=0, max_retries=1)

#: Answers that nobody can carry out: none of them may approve the original call.
UNREADABLE: list[Any] = [
    "yes", "no", None, 1, [], {}, {"arguments": {"amount": 37}},
    {"approved": "yes"}, {"approved": 1}, {"approved": None},
    {"approved": True, "arguments": '{"amount": 37}'}, {"approved": True, "tool_args": '{"amount": 37}'},
    {"approved": True, "arguments": None}, {"approved": True, "arguments": [37]}, {"approved": True, "arguments": {}},
    {"approved": True, "arguments": {"amount": "37"}}, {"approved": True, "arguments": {"amount": None}},
    {"approved": True, "arguments": {"amont": 37}}, {"approved": True, "arguments": {"amount": 37, "currency": "EUR"}},
    {"approved": True, "arguments": {"amount": 37}, "tool_args": SHOWN},
    {"approved": True, "amount": 37}, {"approved": True, "args": {"amount": 37}}, {"approved": True, "argument": 37},
]  # fmt: skip

#: Answers that count, and with what the tool runs.
READABLE: list[tuple[Any, list[float]]] = [
    (True, [4100]), ({"approved": True}, [4100]), ({"approved": True, "reason": "fine"}, [4100]),
    ({"approved": True, "arguments": {"amount": 37}}, [37]), ({"approved": True, "tool_args": {"amount": 37}}, [37]),
    (False, []), ({"approved": False}, []), ({"approved": False, "reason": "too much"}, []),
]  # fmt: skip


class Paying(ToolCallingAgent):
    """Calls `pay` as the scripted model asks, and answers with what was paid."""

    key = "paying"
    system_prompt = "You pay."
    tools = ToolRegistry()

    def __init__(
        self, calls: list[dict[str, Any]], confirmation: Any = True, *, fn: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.paid: list[float] = []
        self.client = Scripted(say=lambda messages: self._says(messages, calls))

        def pay(amount: float) -> str:
            self.paid.append(amount)
            return "done"

        self.tools = ToolRegistry()
        made = {"has_side_effects": True, **options}
        self.tools.register(Tool.from_function(fn or pay, name="pay", requires_confirmation=confirmation, **made))

    @staticmethod
    def _says(messages: Any, calls: list[dict[str, Any]]) -> Any:
        return "ok" if messages[-1]["role"] == "tool" else asks(*calls)

    def get_llm_client(self) -> Any:
        return self.client


class Planned(AgentRuntime):
    """Pays as a plan says."""

    key = "planned"

    def __init__(self, confirmation: Any = True) -> None:
        self.paying = Paying([], confirmation)
        self.paid = self.paying.paid

    async def run(self, ctx: RunContext) -> RunResult:
        plan = Plan([PlanStep.from_dict({"step_number": 1, "tool_name": "pay", "tool_input": SHOWN})])
        return RunResult({"value": (await execute_plan(ctx, plan, self.paying.tools)).result})


def pays(amount: float, id: str = "c1") -> dict[str, Any]:
    return call("pay", {"amount": amount}, id)


@asynccontextmanager
async def running(agent: AgentRuntime, place: Path | None, config: RunnerConfig = PARKED) -> AsyncIterator[AgentRunner]:
    agents = Registry()
    agents.register(agent)
    async with AgentRunner.open(place or "memory://", registry=agents, config=config) as runner:
        await runner.submit(agent.key, HELLO, run_id="r")
        yield runner


async def asked(runner: AgentRunner, count: int = 1) -> list[ApprovalRequest]:
    """Execute the run until it is parked, and return its open questions."""
    assert await runner.run_once()
    info = await runner.get_run("r")
    found = await runner.approvals()
    assert (info.status, len(found)) == (RunStatus.WAITING, count)
    return found


async def ended(runner: AgentRunner) -> RunResult:
    assert await runner.run_once()
    return await runner.wait("r", timeout=0)


# -- answers


@pytest.mark.parametrize("agent", [lambda: Paying([pays(4100)]), Planned])
@pytest.mark.parametrize("answer", UNREADABLE, ids=json.dumps)
async def test_an_unreadable_answer_is_rejected_and_leaves_the_question_open(
    answer: Any, agent: Callable[[], Any], place: Path | None
) -> None:
    made = agent()
    async with running(made, place) as runner:
        [question] = await asked(runner)
        assert question.details["tool_args"] == SHOWN
        with pytest.raises(
            InvalidArgument, match=r'Known answers: true, false, .* \{"approved": true, "arguments": \{…\}\}'
        ):
            await runner.approve("r", "tool:pay", answer)
        assert await runner.approvals() == [question]
        assert await runner.approve("r", "tool:pay", {"approved": True, "arguments": {"amount": 37}})
        assert (await ended(runner)).status is RunStatus.SUCCEEDED
    assert made.paid == [37]


@pytest.mark.parametrize("agent", [lambda: Paying([pays(4100)]), Planned])
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("answer", UNREADABLE, ids=json.dumps)
async def test_an_answer_that_nothing_has_checked_is_checked_by_the_run(
    answer: Any, early: bool, agent: Callable[[], Any], place: Path | None
) -> None:
    made = agent()
    async with running(made, place) as runner:
        if early:  # before the question
            assert await runner.approve("r", "tool:pay", answer)
        [question] = await asked(runner)
        if not early:
            assert question.problem is None
            await runner.signal("r", "tool:pay", answer)
            [again] = await asked(runner)
            assert (again.request_id, again.details) == (question.request_id, question.details)
            question = again
        assert question.problem is not None
        assert "Known answers: true, false" in question.problem
        assert made.paid == []
        assert await runner.approve("r", "tool:pay", False, request_id=question.request_id)
        await ended(runner)
    assert made.paid == []


@pytest.mark.parametrize(("answer", "paid"), READABLE, ids=json.dumps)
@pytest.mark.parametrize("way", ["approve", "early", "signal"])
@pytest.mark.parametrize("agent", [lambda: Paying([pays(4100)]), Planned])
async def test_a_readable_answer_counts_in_every_way(
    answer: Any, paid: list[float], way: str, agent: Callable[[], Any], place: Path | None
) -> None:
    made = agent()
    async with running(made, place) as runner:
        if way == "early":
            await runner.approve("r", "tool:pay", answer)
        else:
            await asked(runner)
            await (runner.approve if way == "approve" else runner.signal)("r", "tool:pay", answer)
        result = await ended(runner)
        assert await runner.approvals() == []
    assert made.paid == paid
    if not paid and isinstance(made, Paying):
        reason = answer.get("reason", "denied") if isinstance(answer, dict) else "denied"
        assert result.final_messages[2]["content"] == f"Error: a person refused this call: {reason}"


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=3,
)
_NAMES = st.sampled_from(["approved", "arguments", "tool_args", "reason", "amount", "args"])
_OBJECTS = st.dictionaries(st.sampled_from(["amount", "note", "x"]), st.integers() | st.text(max_size=3), max_size=3)


@given(_JSON | st.dictionaries(_NAMES, _JSON | _OBJECTS | st.just(True), max_size=4))
def test_an_answer_that_fits_means_what_it_says(answer: Any) -> None:
    """An approval without arguments names none, under no name; an approval with arguments has valid ones."""
    parameters = Tool.from_function(lambda amount, note="": None, name="pay").parameters
    if misfit_of_answer(answer, answer_schema(parameters)) is not None:
        return
    decision = decision_of(answer)
    given = answer if isinstance(answer, dict) else {"approved": answer}
    assert (decision.rejection is None) is (given["approved"] is True)
    assert given.keys() <= {"approved", "reason", "arguments", "tool_args"}
    if decision.rejection is None:
        edits = [given[name] for name in ("arguments", "tool_args") if name in given]
        assert ([] if decision.arguments is None else [decision.arguments]) == edits
        assert all("amount" in each and each.keys() <= {"amount", "note"} for each in edits)


@pytest.mark.parametrize(
    ("parameters", "fits", "misfits"),
    [
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}, {"a": 1}, {"a": "1"}),
        ({"properties": {"n": {"type": "array", "items": {"$ref": "#"}}}}, {"n": [{"n": []}]}, {"n": [{"m": []}]}),
        ({"properties": {"a": {}}, "patternProperties": {"^x": {}}}, {"x": 1}, None),
        ({"properties": {"a": {}}, "additionalProperties": True}, {"b": 1}, None),
        ({}, {"anything": 1}, "text"),
    ],
)
def test_the_schema_of_an_answer_has_the_whole_schema_of_the_arguments(
    parameters: Any, fits: Any, misfits: Any
) -> None:
    schema = answer_schema({"type": "object", **parameters})
    assert misfit_of_answer({"approved": True, "arguments": fits}, schema) is None
    if misfits is not None:
        assert misfit_of_answer({"approved": True, "tool_args": misfits}, schema) is not None


@pytest.mark.parametrize(
    ("old", "paid"),
    [
        (True, [4100]), (False, []), (None, None), ("too much", None), ({"approved": "no", "reason": "x"}, None),
        ({"approved": True, "arguments": {"amount": 37}}, [37]), ({"approved": True, "by": "ann"}, None),
        ({"approved": True, "arguments": '{"amount": 37}'}, None),
    ],
)  # fmt: skip
async def test_a_question_of_the_last_release_is_answered_or_asked_again(
    old: Any, paid: list[float] | None, place: Path | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Paying([pays(4100)])
    async with running(made, place) as runner:
        with monkeypatch.context() as release:
            release.setattr(prepared_calls, "answer_schema", lambda parameters: None)
            [first] = await asked(runner)
        assert first.schema is None
        assert await runner.approve("r", "tool:pay", old)
        if paid is None:  # the last release stored any answer
            [again] = await asked(runner)
            assert again.schema is not None
            assert again.problem is not None
            assert made.paid == []
            assert not await runner.approve("r", "tool:pay", True, request_id=first.request_id)
            assert await runner.approve("r", "tool:pay", False)
        await ended(runner)
    assert made.paid == (paid or [])


@pytest.mark.parametrize("old", ["too much", {"approved": True, "arguments": '{"amount": 37}'}, {"approved": "no"}])
def test_a_recorded_answer_that_does_not_fit_approves_nothing(old: Any) -> None:
    assert decision_of(old).rejection is not None


# -- conditions


def above_100(arguments: dict[str, Any], ctx: Any) -> bool:
    return bool(arguments["amount"] > 100)


async def async_above_100(arguments: dict[str, Any], ctx: Any) -> bool:
    await asyncio.sleep(0)
    return above_100(arguments, ctx)


class Above100:
    async def __call__(self, arguments: dict[str, Any], ctx: Any) -> bool:
        return above_100(arguments, ctx)


@pytest.mark.parametrize("agent", [lambda amount, condition: Paying([pays(amount)], condition)])
@pytest.mark.parametrize(
    "condition", [above_100, async_above_100, Above100(), lambda arguments, ctx: above_100(arguments, ctx)]
)
async def test_a_condition_decides_who_is_asked(condition: Any, agent: Any, place: Path | None) -> None:
    small = Paying([pays(100)], condition)
    async with running(small, place) as runner:
        await ended(runner)
        events = [each.event_type for each in await runner.event_bus.get_events("r")]
    assert "approval.requested" not in events
    assert small.paid == [100]
    large = Paying([pays(101)], condition)
    async with running(large, place and place.with_name("large.db")) as runner:
        await asked(runner)
        assert await runner.approve("r", "tool:pay", {"approved": True, "arguments": {"amount": 5000}})
        await ended(runner)
    assert large.paid == [5000], "the edit is not asked about"


async def test_the_condition_of_a_plan(place: Path | None) -> None:
    for condition, wanted in ((lambda arguments, ctx: False, [4100]), (above_100, [])):
        made = Planned(condition)
        async with running(made, place and place.with_name(f"{len(wanted)}.db")) as runner:
            if wanted:
                await ended(runner)
            else:
                await asked(runner)
        assert made.paid == wanted


def _raises(arguments: dict[str, Any], ctx: Any) -> Any:
    raise KeyError("amount")


@pytest.mark.parametrize(
    ("condition", "text"),
    [(_raises, None), (lambda a, c: None, None), (lambda a, c: 0, None), (lambda a, c: [], None),
     (lambda a, c: "", None), (lambda a, c: True, None), (lambda a, c: f"Pay {a['amount']}?", "Pay 50?"),
     (lambda: True, None)],
)  # fmt: skip
async def test_a_condition_without_a_clear_no_asks(condition: Any, text: str | None, place: Path | None) -> None:
    made = Paying([pays(50)], condition)
    async with running(made, place) as runner:
        [question] = await asked(runner)
        assert question.details.get("question") == text
        await runner.approve("r", "tool:pay", True)
        await ended(runner)
    assert made.paid == [50]


async def test_a_condition_is_evaluated_once_on_what_the_hook_made_of_the_arguments(place: Path | None) -> None:
    seen: list[Any] = []

    def condition(arguments: dict[str, Any], ctx: Any) -> bool:
        seen.append((dict(arguments), isinstance(ctx, SyncRunContext)))
        arguments["amount"] = 0  # its own copy
        return False

    class Hooked(Paying):
        async def on_tool_call(self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]) -> Any:
            seen.append("hook")
            return {**tool_args, "amount": tool_args["amount"] + 1}

    made = Hooked([pays(4100)], condition)
    async with running(made, place) as runner:
        seen.clear()
        assert await runner.run_once()
        assert await runner.approvals() == []
        assert seen == ["hook", ({"amount": 4101}, True)]
        assert made.paid == [4101]


async def test_what_a_condition_decided_is_recorded(place: Path | None) -> None:
    decided: list[int] = []

    def condition(arguments: dict[str, Any], ctx: Any) -> bool:
        decided.append(1)
        return True

    made = Paying([pays(1)], condition)
    async with running(made, place) as runner:
        await asked(runner)
        await runner.approve("r", "tool:pay", True)
        await ended(runner)
    assert (decided, made.paid) == ([1], [1])


def test_a_condition_is_shown_as_a_word_and_a_bool_stays_a_bool() -> None:
    from agent_runtime_core._views.overview import _agent

    for confirmation, shown in ((True, True), (False, False), (above_100, "conditional")):
        made = Paying([], confirmation)
        assert made.tools.list_tools()[0].requires_confirmation is confirmation
        assert _agent("paying", made, {})["tools"][0]["requires_confirmation"] == shown


@pytest.mark.parametrize("wrong", [None, 1, "yes", {}])
def test_another_confirmation_is_rejected(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"tool 'pay': requires_confirmation must be True, False or a function"):
        Paying([], wrong)


async def test_a_class_may_decide_by_a_method() -> None:
    class Pay(BaseTool):
        def name(self) -> str:
            return "pay"

        def description(self) -> str:
            return "Pays."

        def parameters(self) -> dict[str, Any]:
            return {"type": "object", "properties": {"amount": {"type": "number"}}, "required": ["amount"]}

        def requires_confirmation(self, arguments: dict[str, Any], ctx: Any) -> bool:
            return above_100(arguments, ctx)

        async def execute(self, amount: float) -> ToolResult:
            return ToolResult(True, amount)

    made = Paying([pays(140), pays(20, "c2")])
    made.tools.register(Pay())
    async with running(made, None) as runner:
        [question] = await asked(runner)
        assert question.details["tool_args"] == {"amount": 140}


# -- several questions


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
async def test_the_questions_of_an_answer_are_asked_together_and_answered_in_any_order(
    order: tuple[int, ...], place: Path | None
) -> None:
    made = Paying([pays(100 + n, f"c{n}") for n in range(3)])
    async with running(made, place) as runner:
        questions = await asked(runner, 3)
        assert [each.details["tool_args"]["amount"] for each in questions] == [100, 101, 102]
        with pytest.raises(InvalidArgument) as error:
            await runner.approve("r", "tool:pay", True)
        assert all(each.request_id in str(error.value) for each in questions)
        assert "{'amount': 101}" in str(error.value)
        for left, index in zip((2, 1, 0), order, strict=True):
            answer = {"approved": True, "arguments": {"amount": index}} if index else False
            assert await runner.approve("r", "tool:pay", answer, request_id=questions[index].request_id)
            if left:
                await asked(runner, left)
        result = await ended(runner)
    assert made.paid == [1, 2]
    said = [each["content"] for each in result.final_messages if each["role"] == "tool"]
    assert ["refused" in each for each in said] == [True, False, False]


async def test_the_last_open_question_needs_no_request_id(place: Path | None) -> None:
    made = Paying([pays(1, "a"), pays(2, "b")])
    async with running(made, place) as runner:
        first, _ = await asked(runner, 2)
        await runner.approve("r", "tool:pay", False, request_id=first.request_id)
        assert await runner.approve("r", "tool:pay", True)
        await ended(runner)
    assert made.paid == [2]


async def test_questions_are_closed_when_the_loop_ends_early(place: Path | None) -> None:
    class Limited(Paying):
        def __init__(self) -> None:
            super().__init__([pays(1, "a"), call("stop", {}, "s"), pays(2, "b"), pays(3, "c")])

            def stop() -> str:
                raise self.error

            self.tools.register(Tool.from_function(stop, has_side_effects=True))
            from agent_runtime_core.errors import LimitExceeded

            self.error = LimitExceeded("max_turns", 1, 2, "stop here")

    made = Limited()
    async with running(made, place) as runner:
        first, *_ = await asked(runner, 3)
        await runner.approve("r", "tool:pay", True, request_id=first.request_id)
        result = await ended(runner)
        assert result.status is RunStatus.FAILED
        assert await runner.approvals() == []
    assert made.paid == [1]


# -- waits in a hook and in a tool


class Asking(Paying):
    """Asks in the hook."""

    def __init__(self) -> None:
        super().__init__([pays(4100)], False)
        self.hooks = 0

    def plain_hook(self, ctx: SyncRunContext, tool_name: str, tool_args: dict[str, Any]) -> Any:
        self.hooks += 1
        return {"amount": ctx.approve("large", dict(tool_args))}

    async def on_tool_call(self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]) -> Any:
        self.hooks += 1
        tool_args["amount"] = await ctx.approve("large", dict(tool_args))


class PlainAsking(Asking):
    def on_tool_call(self, ctx: Any, tool_name: str, tool_args: dict[str, Any]) -> Any:
        return self.plain_hook(ctx, tool_name, tool_args)


@pytest.mark.parametrize("kind", [Asking, PlainAsking])
async def test_a_wait_in_the_hook_parks_the_run(kind: type[Asking], place: Path | None) -> None:
    made = kind()
    async with running(made, place) as runner:
        [question] = await asked(runner)
        assert (question.name, question.details) == ("large", SHOWN)
        await runner.approve("r", "large", 37)
        assert (await ended(runner)).status is RunStatus.SUCCEEDED
    assert (made.paid, made.hooks) == ([37], 2)


async def test_the_hook_is_not_called_for_a_saved_result_and_its_arguments_are_recorded(place: Path | None) -> None:
    class Counting(Paying):
        hooks = 0

        async def on_tool_call(self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]) -> Any:
            self.hooks += 1
            return {"amount": self.hooks}

    made = Counting([pays(4100, "a"), pays(4200, "b"), pays(4300, "c")])
    async with running(made, place) as runner:
        questions = await asked(runner, 3)
        for question in questions:
            await runner.approve("r", "tool:pay", True, request_id=question.request_id)
            await runner.run_once()
    assert (made.paid, made.hooks) == ([1, 2, 3], 3)


@pytest.mark.parametrize("returned", [False, "no", [1]])
async def test_a_hook_that_returns_something_else_fails(returned: Any) -> None:
    class Wrong(Paying):
        async def on_tool_call(self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]) -> Any:
            return returned

    made = Wrong([pays(1)], False)
    async with running(made, None, RunnerConfig(max_retries=1)) as runner:
        result = await ended(runner)
    assert result.error is not None
    assert "the result of the hook before tool 'pay' must be None or a dict" in result.error.message
    assert made.paid == []


@pytest.mark.parametrize("plain", [False, True])
async def test_a_wait_in_a_tool_costs_no_time_of_the_run_and_is_warned_about_once(
    plain: bool, place: Path | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def pay(amount: float, ctx: RunContext) -> str:
        return "paid" if await ctx.approve("large", amount) and await ctx.approve("sure") else "not paid"

    def plain_pay(amount: float, ctx: SyncRunContext) -> str:
        return "paid" if ctx.approve("large", amount) and ctx.approve("sure") else "not paid"

    made = Paying([pays(4100)], False, fn=plain_pay if plain else pay)
    made.limits = {"turn_timeout": 30, "run_timeout": 30}
    async with Rig(place, park_after=5, run_timeout_seconds=30) as rig:
        rig.registry.register(made)
        await rig.runner.submit("paying", HELLO, run_id="r")
        working = asyncio.create_task(rig.runner.run_once())
        for name in ("large", "sure"):
            while not any(each.name == name for each in await rig.runner.approvals()):  # noqa: ASYNC110 - see above
                await asyncio.sleep(0.001)
            for _ in range(10):
                rig.clock.advance(100)  # type: ignore[attr-defined]
                await asyncio.sleep(0.001)
            assert await rig.runner.approve("r", name, True)
        await working
        result = await rig.runner.wait("r", timeout=0)
    assert result.status is RunStatus.SUCCEEDED, result.error
    warned = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "holds a slot" in warned[0]
    assert "requires_confirmation" in warned[0]


# -- what the model is told


@pytest.mark.parametrize("flat", [False, True])
async def test_the_model_is_shown_the_edited_call(flat: bool, place: Path | None) -> None:
    asked_for = pays(4100)
    made = Paying([asked_for["function"] | {"id": "c1"} if flat else asked_for])
    async with running(made, place) as runner:
        await asked(runner)
        await runner.approve("r", "tool:pay", {"approved": True, "arguments": {"amount": 37}})
        result = await ended(runner)
    for messages in (made.client.asked[-1][1:], result.final_messages):
        [known] = messages[1]["tool_calls"]
        assert json.loads(known.get("function", known)["arguments"]) == {"amount": 37}
        assert messages[2]["content"] == "done"


SIGNED: list[dict[str, Any]] = [
    {"provider_fields": {"anthropic": {"content": [{"type": "thinking", "thinking": "hm", "signature": "x"}]}}},
    {"provider_fields": {"anthropic": {"content": [{"type": "redacted_thinking", "data": "x"}]}}},
    {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
    {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}]},
]


@pytest.mark.parametrize("signed", [*SIGNED, {"call": {"extra_content": {"google": {"thought_signature": "x"}}}}])
async def test_a_signed_answer_stays_and_the_result_has_a_note(signed: dict[str, Any], place: Path | None) -> None:
    asked_for = pays(4100) | signed.get("call", {})
    made = Paying([])
    answer = {**asks(asked_for), **{name: each for name, each in signed.items() if name != "call"}}
    made.client.say = lambda messages: "ok" if messages[-1]["role"] == "tool" else answer
    async with running(made, place) as runner:
        await asked(runner)
        await runner.approve("r", "tool:pay", {"approved": True, "arguments": {"amount": 37}})
        result = await ended(runner)
    assert made.paid == [37]
    assert result.final_messages[1] == answer
    note = 'Note: a person changed the arguments of this call before it ran, to {"amount":37}'
    assert result.final_messages[2]["content"] == f"done\n\n{note}"


@pytest.mark.parametrize(
    "plain", [{"reasoning_content": "hm"}, {"provider_fields": {"anthropic": {"content": [{"type": "text"}]}}}]
)
async def test_an_answer_with_unsigned_fields_is_edited(plain: dict[str, Any]) -> None:
    made = Paying([])
    made.client.say = lambda messages: "ok" if messages[-1]["role"] == "tool" else {**asks(pays(4100)), **plain}
    async with running(made, None) as runner:
        await asked(runner)
        await runner.approve("r", "tool:pay", {"approved": True, "arguments": {"amount": 37}})
        result = await ended(runner)
    assert result.final_messages[1]["tool_calls"][0]["function"]["arguments"] == '{"amount":37}'


# -- kills


async def test_a_crash_at_any_write_leaves_one_outcome_of_approvals() -> None:
    """Of a conditional approval, an edit, an answer that does not fit, a hook that waits, and parallel calls."""
    paid: list[float] = []

    class Killed(Paying):
        key = "killed"

        def __init__(self) -> None:
            super().__init__([pays(20, "a"), pays(140, "b"), call("look", {}, "l"), pays(150, "c")], above_100)
            self.tools.register(Tool.from_function(lambda: "seen", name="look", description="Looks."))
            # By idempotency key: a call that is repeated under the same key takes effect once.
            keys: dict[str, float] = {}

            async def pay(amount: float, ctx: RunContext) -> str:
                keys[str(ctx.idempotency_key)] = amount
                paid[:] = [*keys.values()]
                return f"paid {amount}"

            self.tools.register(Tool.from_function(pay, has_side_effects=True, requires_confirmation=above_100))

        async def on_tool_call(self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]) -> Any:
            if tool_name == "look":
                await ctx.approve("look", key="look")
            return {**tool_args, "amount": tool_args["amount"] + 1} if "amount" in tool_args else None

    edit = {"approved": True, "arguments": {"amount": 37}}
    report = await crash_everywhere(Killed, HELLO, signals={"tool:pay": edit, "look": True})
    assert report.kills > 0
    messages = report.outcome.final_messages
    said = [each["content"] for each in messages if each["role"] == "tool"]
    assert said == ["paid 21.0", "paid 37.0", "seen", "paid 37.0"]
    amounts = [json.loads(each["function"]["arguments"]).get("amount") for each in messages[1]["tool_calls"]]
    assert amounts == [20, 37, None, 37]


@pytest.mark.parametrize("answers", [("text", True), ({"approved": True, "arguments": "{}"}, False)])
async def test_a_run_on_redis_is_answered_by_another_process(answers: tuple[Any, Any], redis_url: str) -> None:
    made = Paying([pays(101, "a"), pays(102, "b")], above_100)
    agents = Registry()
    agents.register(made)
    async with (
        AgentRunner.open(redis_url, registry=agents, config=PARKED) as worker,
        AgentRunner.open(redis_url, registry=Registry()) as other,
    ):
        await other.submit("paying", HELLO, run_id="r")
        assert await worker.run_once()
        first, second = await other.approvals()
        bad, good = answers
        with pytest.raises(InvalidArgument, match="2 open requests"):
            await other.approve("r", "tool:pay", good)
        with pytest.raises(InvalidArgument, match="Known answers: true, false"):
            await other.approve("r", "tool:pay", bad, request_id=first.request_id)
        await other.signal("r", "tool:pay", bad)
        assert await worker.run_once()
        assert all(each.problem for each in await other.approvals())
        assert await other.approve("r", "tool:pay", good, request_id=second.request_id)
        assert await worker.run_once()
        assert await other.approve("r", "tool:pay", good)
        assert await worker.run_once()
        assert (await other.wait("r", timeout=0)).status is RunStatus.SUCCEEDED
    assert made.paid == ([101, 102] if good is True else [])


@for_each("early", [False, True])
@for_each("payload", [True, "yes", {"approved": True, "tool_args": {"amount": 37}}, "retry"])
@for_each("name", ["tool:pay", "in_doubt:tool"])
def test_a_signal_of_a_sender_who_may_not_approve_changes_no_question(
    name: str, payload: Any, early: bool, tmp_path: Path
) -> None:
    begun: list[float] = []

    async def pay(amount: float) -> str:
        begun.append(amount)
        if len(begun) == 1 and name != "tool:pay":
            raise KeyboardInterrupt  # the process ends inside the tool
        return "done"

    made = Paying([pays(4100)], name == "tool:pay", fn=pay, metadata={"on_in_doubt": "review"})

    async def begins() -> None:
        async with running(made, tmp_path / "runs.db") as runner:
            if early:
                await runner.signal("r", name, payload, answers=False)
            await runner.run_once()

    async def is_answered() -> None:
        async with running(made, tmp_path / "runs.db") as runner:
            await runner.run_once()
            await runner.signal("r", name, payload, answers=False)
            await runner.run_once()
            [question] = await runner.approvals()
            assert (question.name, question.problem) == (name, None)
            assert begun == ([] if name == "tool:pay" else [4100])
            await runner.approve("r", name, True if name == "tool:pay" else "retry")
            assert (await ended(runner)).status is RunStatus.SUCCEEDED

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(begins())
    asyncio.run(is_answered())


# -- where people answer


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys, str(tmp_path / "runs.db"))


def parked(made: AgentRuntime, url: str, *, submit: bool = True) -> None:
    """Execute the run in this process until it waits or ends."""

    async def execute() -> None:
        agents = Registry()
        agents.register(made)
        async with AgentRunner.open(url, registry=agents, config=PARKED) as runner:
            if submit:
                await runner.submit(made.key, HELLO, run_id="r")
            assert await runner.run_once()

    asyncio.run(execute())


def test_the_command_line_names_one_of_several_questions(command: Commands) -> None:
    made = Paying([pays(1, "a"), pays(2, "b")])
    parked(made, command.url)
    questions = command.json("show", "r")["questions"]
    code, _, error = command("approve", "r", "tool:pay")
    assert code != 0
    assert all(each["request_id"] in error for each in questions)
    shown = command("show", "r")[1]
    for question in questions:
        assert f"--request-id {question['request_id']}" in shown
    assert 'pay {"amount": 2}' in shown
    for question, answer in zip(questions, ("false", '{"approved": true, "arguments": {"amount": 3}}'), strict=True):
        assert command("approve", "r", "tool:pay", answer, "--request-id", question["request_id"])[0] == 0
    parked(made, command.url, submit=False)
    assert made.paid == [3]


@pytest.mark.parametrize(
    "answer", ["yes", '"yes"', '{"approved": true, "arguments": "{}"}', '{"approved": true, "x": 1}']
)
def test_the_command_line_rejects_an_answer_that_does_not_fit(answer: str, command: Commands) -> None:
    made = Paying([pays(4100)])
    parked(made, command.url)
    code, _, error = command("approve", "r", "tool:pay", answer)
    assert code != 0
    assert "Known answers: true, false" in error or "JSON" in error
    assert command("signal", "r", "tool:pay", '"yes"')[0] == 0
    parked(made, command.url, submit=False)
    shown = command("show", "r")[1]
    assert "problem" in shown
    assert made.paid == []


@pytest.mark.parametrize("outcome", ['"retry"', '{"outcome": "done", "result": "checked"}', '{"outcome": "failed"}'])
def test_the_command_line_answers_the_review_of_a_tool(outcome: str, command: Commands) -> None:
    begun: list[float] = []

    async def pay(amount: float) -> str:
        begun.append(amount)
        if len(begun) == 1:
            raise KeyboardInterrupt  # the process ends inside the tool
        return "done"

    class Hooked(Paying):
        async def on_tool_call(self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]) -> Any:
            return {"amount": 141}

    made = Hooked([pays(140)], False, fn=pay, metadata={"on_in_doubt": "review"})
    with pytest.raises(KeyboardInterrupt):
        parked(made, command.url)
    parked(made, command.url, submit=False)
    told = command.json("show", "r")
    assert told["waiting_for"] == [{"kind": "review", "name": "in_doubt:tool"}]
    details = told["questions"][0]["details"]
    assert (details["tool_name"], details["tool_args"], details["tool_call_id"]) == ("pay", {"amount": 141}, "c1")
    shown = command("show", "r")[1]
    assert 'pay {"amount": 141}' in shown
    assert "approve r in_doubt:tool ANSWER" in shown
    assert command("approve", "r", "in_doubt:tool")[0] != 0  # true is no outcome
    assert command("approve", "r", "in_doubt:tool", outcome)[0] == 0
    parked(made, command.url, submit=False)
    assert begun == ([141, 141] if "retry" in outcome else [141])


# -- the next message of the customer


async def test_the_next_message_of_the_customer(place: Path | None) -> None:
    """What the guide on waits says about each way in which an application may pass it on."""
    made = Paying([pays(4100)])
    made.client.say = lambda messages: asks(pays(4100)) if messages[-1]["content"] == "pay" else "ok"
    agents = Registry()
    agents.register(made)
    asked_for = {**HELLO, "conversation_id": "talk"}
    later = {"messages": [{"role": "user", "content": "and?"}], "conversation_id": "talk"}
    async with AgentRunner.open(place or "memory://", registry=agents, config=PARKED) as runner:
        await runner.submit("paying", asked_for, run_id="r")
        await asked(runner)
        await runner.submit("paying", later, run_id="queued")
        assert not await runner.run_once()
        assert (await runner.get_run("queued")).status is RunStatus.PENDING
        await runner.submit("paying", later, run_id="beside", concurrency_key="")
        assert await runner.run_once()
        beside = await runner.wait("beside", timeout=0)
        assert [each["content"] for each in beside.final_messages] == ["and?", "ok"]
        await runner.send("r", "I changed my mind")
        assert await runner.run_once()
        assert (await runner.get_run("r")).open_approvals == ("tool:pay",)
        await runner.approve("r", "tool:pay", {"approved": False, "reason": "withdrawn"})
        await runner.run_once()
        told = (await runner.wait("r", timeout=0)).final_messages
        assert [each["role"] for each in told] == ["user", "assistant", "tool", "user", "assistant"]
        assert told[3]["content"] == "I changed my mind"
        assert await runner.run_once()
        assert (await runner.wait("queued", timeout=0)).status is RunStatus.SUCCEEDED
    assert made.paid == []


async def test_a_mock_context_checks_the_answer() -> None:
    ctx = MockRunContext(HELLO["messages"])
    ctx.signal("tool:pay", "yes")
    with pytest.raises(InvalidArgument, match="answer to approval 'tool:pay' must match the schema"):
        await Paying([pays(4100)]).run(ctx)


async def test_what_a_person_approved_runs_also_if_the_hook_is_gone(place: Path | None) -> None:
    class Hooked(Paying):
        async def on_tool_call(self, ctx: RunContext, tool_name: str, tool_args: dict[str, Any]) -> Any:
            return {"amount": 37}

    made, later = Hooked([pays(4100)]), Paying([pays(4100)])
    async with running(made, place) as runner:
        [question] = await asked(runner)
        assert question.details["tool_args"] == {"amount": 37}
        runner.registry.unregister("paying")
        runner.registry.register(later)
        await runner.approve("r", "tool:pay", True)
        await ended(runner)
    assert (made.paid, later.paid) == ([], [37])
