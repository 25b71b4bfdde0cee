"""Requests that schemathesis makes of the OpenAPI document: no server error, and no answer that is not documented."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from agent_runtime_core.orchestrator import Orchestrator
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.server.access import Tokens
from agent_runtime_core.server.app import create_app
from agent_runtime_core.server.settings import ServerSettings
from agent_runtime_core.server.token_file import Token
from agent_runtime_core.turns import TurnManager
from tests.server.conftest import LiveServer, echo
from tests.server.documented import BEFORE_ROUTES
from tests.support.runs import Script

schemathesis = pytest.importorskip("schemathesis")
from hypothesis import HealthCheck, Phase, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.errors import Unsatisfiable  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
)

EXAMPLES: Final = 5  # for each operation, of each kind
MANY_EXAMPLES: Final = 60
LEFT_OUT: Final = ("/events", "/session", "/socket")  # streams, and sign-in
CHECKS: Final = [
    not_a_server_error, content_type_conformance, response_headers_conformance, response_schema_conformance,
]  # fmt: skip
#: What no JSON Schema can say: names that are stored or registered, a setting, and 8.0, which is an integer there.
NOT_IN_SCHEMAS: Final = re.compile(
    "unknown (agent|personality|completed step)|must be an integer|must not be after|cursor must be `next`"
    "|request_id of approval|printable characters|priority must be at most|cron must be|cron must contain"
    "|timezone must be|end must not be before|schedule id must"
)
TOKEN: Final = "schemathesis"  # it is in the message of a failure
AUTH: Final = {"Authorization": f"Bearer {TOKEN}"}


async def failing(ctx: Any) -> Any:
    raise ValueError("no luck")


async def asking(ctx: Any) -> Any:
    return await ctx.approve("pay", {"amount": 3})


def opened(path: Path) -> AgentRunner:
    registry = Registry()
    for body, key in ((echo, "echo"), (failing, "failing"), (asking, "asking")):
        registry.register(Script(body, key))
    return AgentRunner.open(path, registry=registry, config=RunnerConfig(park_after=0, max_retries=1))


async def with_runs(path: Path) -> list[str]:
    """Store runs of each kind; return their ids and keys."""
    async with opened(path) as runner:
        await runner.execute("echo", "done", {"text": "x"})
        await runner.execute("failing", "a/failed one")
        await runner.submit("asking", run_id="asks")
        await runner.run_once()
        async with Orchestrator(runner=runner) as orchestrator:
            planned = await orchestrator.create_run(prompt="add 1 and 2")
            await orchestrator.wait(planned.run_id)
        turn = await TurnManager(runner).run_turn({"text": "add 2 and 3"})
        await runner.submit("echo", run_id="pending")
    return ["done", "a/failed one", "asks", "pending", str(planned.run_id), turn.id]


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(MANY_EXAMPLES, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
async def test_every_answer_is_documented(
    mode: GenerationMode, examples: int, tmp_path: Path, live_server: Callable[..., LiveServer]
) -> None:
    ids = await with_runs(tmp_path / "agents.db")
    runner = opened(tmp_path / "agents.db")
    app = create_app(
        runner, orchestrator=Orchestrator(runner=runner, work=False), turns=TurnManager(runner),
        authenticate=Tokens([Token.of(TOKEN)]), settings=ServerSettings(request_burst=10**6),
    )  # fmt: skip
    server = live_server(app)
    await asyncio.to_thread(call_all, mode, examples, server.url, ids)


def call_all(mode: GenerationMode, examples: int, url: str, ids: list[str]) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=AUTH)
    operations = [each.ok() for each in schema.get_all_operations()]
    chosen = [each for each in operations if not each.path.endswith(LEFT_OUT)]
    succeeded = [each.path for each in chosen if call(each, mode, examples, url, ids)]
    assert mode is GenerationMode.NEGATIVE or len(succeeded) >= 10, succeeded


def call(operation: Any, mode: GenerationMode, examples: int, url: str, ids: list[str]) -> bool:
    """Call an operation many times. Return whether one of the calls succeeded."""
    documented = {int(code) for code in operation.definition.raw["responses"] if code.isdigit()} | BEFORE_ROUTES
    statuses: set[int] = set()

    @settings(
        max_examples=examples, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode), known=st.sampled_from([None, *ids]))
    def check(case: Any, known: str | None) -> None:
        if known is not None and "id" in case.path_parameters:
            case.path_parameters["id"] = known
        if isinstance(wait := (case.query or {}).get("wait"), int | float) and 0 <= wait <= 60:
            case.query["wait"] = 0  # the run may not finish
        response = case.call(base_url=url, headers=AUTH)
        if mode is GenerationMode.POSITIVE and response.status_code in (400, 422):
            assert NOT_IN_SCHEMAS.search(response.json()["detail"]), response.text
        assert response.status_code in documented, (response.status_code, response.text)
        case.validate_response(response, checks=CHECKS)
        statuses.add(response.status_code)

    try:
        check()
    except Unsatisfiable:  # such as GET /health/live, where nothing can be invalid
        assert mode is GenerationMode.NEGATIVE, operation.path
        return False
    return min(statuses) < 300
