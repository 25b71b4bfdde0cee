"""Every model client, and one of a third party, keeps the contract: ours with the real SDKs, over a scripted server."""

from __future__ import annotations

import pytest

from agent_runtime_core.llm.litellm import _imported
from agent_runtime_core.testing.contracts.llm import CASES, Case, Make
from tests.support.llm_servers import CLIENTS


@pytest.fixture(params=CLIENTS)
def make(request: pytest.FixtureRequest) -> Make:
    found: Make = request.param
    if getattr(found, "__name__", "") == "litellm":
        _imported()  # which takes seconds: the cases have their time for themselves
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_contract(case: Case, make: Make) -> None:
    await case(make)
