"""The options of a step: listed for users in two places, and the same for every method that takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from agent_runtime_core import RunContext, Step, StepExecutor, SyncRunContext, open_run
from agent_runtime_core._execution.context import Context
from agent_runtime_core._execution.step import StepOptions
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.testing import MockRunContext

OPTIONS = {each.name: each.default for each in fields(StepOptions)}


def _listed(method: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(method).parameters.values()
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters)
    return {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}


@pytest.mark.parametrize("context", [RunContext, Context, SyncRunContext, MockRunContext])
def test_every_context_shows_all_options(context: Any) -> None:
    assert _listed(context.step) == {"key": None, **OPTIONS}


def test_a_map_and_a_step_of_a_list_show_their_options() -> None:
    in_list = {name: default for name, default in OPTIONS.items() if name != "on_changed_input"}
    assert {each.name: each.default for each in fields(Step) if each.name in OPTIONS} == in_list
    del in_list["description"]
    assert _listed(StepExecutor.map) == {"key": None, **in_list}


async def test_an_unknown_option_is_rejected_before_the_function_runs() -> None:
    def never() -> None:
        raise AssertionError("called")

    async with open_run("memory://", "r") as ctx:
        for each in (ctx, MockRunContext()):
            with pytest.raises(TypeError, match=r"^step\(\) got an unexpected keyword argument 'retrys'$"):
                await each.step("a", never, retrys=3)  # type: ignore[call-overload]
            with pytest.raises(InvalidArgument, match=r"^retries must be"):
                await each.step("a", never, retries=-1)
            for option in ("description", "on_changed_input"):
                with pytest.raises(TypeError, match=rf"^map\(\) got an unexpected keyword argument '{option}'$"):
                    await StepExecutor(each).map("a", never, [1], **{option: "use"})  # type: ignore[call-overload]
