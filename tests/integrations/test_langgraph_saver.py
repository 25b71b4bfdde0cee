"""Checkpoints of LangGraph in the document stores: LangGraph's conformance tests, branches, pruning, claims."""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest

pytest.importorskip("langgraph")

from langgraph.channels import DeltaChannel
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from agent_runtime_core._engines.base import Guard
from agent_runtime_core.errors import InvalidArgument, LeaseLost
from agent_runtime_core.integrations.langgraph import AgentRuntimeSaver
from agent_runtime_core.persistence import open_document_store
from agent_runtime_core.persistence.documents.base import DocumentStore
from agent_runtime_core.persistence.fencing import CURRENT_CLAIM, FencedWrites
from tests.support.backends import POSTGRES, SERVERS

BACKENDS = ["memory", "sqlite", "files", pytest.param("redis", marks=pytest.mark.redis), POSTGRES]
KINDS = ("checkpoint", "write", "channel")


@pytest.fixture(params=BACKENDS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return str(request.getfixturevalue(f"{request.param}_url"))
    return {"memory": "memory://", "sqlite": str(tmp_path / "graphs.db"), "files": f"files:///{tmp_path}/graphs"}[
        request.param
    ]


def appended(state: list[str], writes: Sequence[list[str]]) -> list[str]:
    return [*state, *(each for write in writes for each in write)]


class Log(TypedDict):
    log: Annotated[list[str], operator.add]


class DeltaLog(TypedDict):
    log: Annotated[list[str], DeltaChannel(appended, snapshot_frequency=3)]


def logging_graph(saver: AgentRuntimeSaver, state: Any = Log) -> Any:
    builder = StateGraph(state)
    builder.add_node("first", lambda state: {"log": [f"first {len(state['log'])}"]})
    builder.add_node("second", lambda state: {"log": [f"second {len(state['log'])}"]})
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    builder.add_edge("second", END)
    return builder.compile(checkpointer=saver)


def thread(name: str = "t", **more: Any) -> Any:
    return {"configurable": {"thread_id": name, "checkpoint_ns": "", **more}}


async def documents_of(store: DocumentStore, name: str = "t") -> dict[str, int]:
    saver = AgentRuntimeSaver(store)
    collections = {
        "checkpoint": saver._checkpoints(name),
        "write": saver._writes(name),
        "channel": saver._blobs(name),
        "thread": saver._threads,
        "run": saver._runs,
    }
    return {kind: len(await each.find()) for kind, each in collections.items()}


async def test_langgraphs_conformance_tests_pass_in_full(store_url: str) -> None:
    conformance = pytest.importorskip("langgraph.checkpoint.conformance")

    @conformance.checkpointer_test(name=store_url)  # type: ignore[untyped-decorator]
    async def made() -> AsyncIterator[AgentRuntimeSaver]:
        async with AgentRuntimeSaver(store_url) as saver:
            yield saver

    report = await conformance.validate(made)
    assert {name: result.failures for name, result in report.results.items() if not result.passed} == {}
    assert len(report.results) == 8
    assert all(result.tests_passed for result in report.results.values())


async def test_a_thread_continues_with_another_saver(store_url: str) -> None:
    if store_url.startswith("memory"):
        pytest.skip("a store in memory ends with its saver")
    async with AgentRuntimeSaver(store_url) as saver:
        await logging_graph(saver).ainvoke({"log": ["a"]}, thread())
    async with AgentRuntimeSaver(store_url) as saver:
        state = await logging_graph(saver).ainvoke({"log": ["b"]}, thread())
    assert state["log"] == ["a", "first 1", "second 2", "b", "first 4", "second 5"]


def test_plain_code_uses_the_same_threads(tmp_path: Path) -> None:
    saver = AgentRuntimeSaver(open_document_store(str(tmp_path / "graphs.db")))
    graph = logging_graph(saver)
    graph.invoke({"log": ["a"]}, thread())
    graph.invoke({"log": []}, thread("other"))
    assert graph.get_state(thread()).values["log"] == ["a", "first 1", "second 2"]
    assert [each.metadata["step"] for each in saver.list(thread())] == [2, 1, 0, -1]
    assert len(list(saver.list(None, limit=6))) == 6
    saver.copy_thread("t", "copy")
    saver.prune(["t"])
    assert len(list(saver.list(thread()))) == 1
    saver.delete_thread("t")
    assert saver.get_tuple(thread()) is None
    assert graph.get_state(thread("copy")).values["log"] == ["a", "first 1", "second 2"]
    saver.delete_for_runs(["unknown"])


async def test_two_branches_of_a_checkpoint_keep_their_values(store_url: str) -> None:
    async with AgentRuntimeSaver(store_url) as saver:
        graph = logging_graph(saver)
        await graph.ainvoke({"log": ["a"]}, thread())
        start = [each async for each in graph.aget_state_history(thread())][-2].config
        left = await graph.aupdate_state(start, {"log": ["left"]}, as_node="second")
        right = await graph.aupdate_state(start, {"log": ["right"]}, as_node="second")
        assert (await graph.aget_state(left)).values["log"] == ["a", "left"]
        assert (await graph.aget_state(right)).values["log"] == ["a", "right"]


async def test_pruning_keeps_the_values_of_delta_channels(store_url: str) -> None:
    async with AgentRuntimeSaver(store_url) as saver:
        graph = logging_graph(saver, DeltaLog)
        for turn in range(3):
            await graph.ainvoke({"log": [f"turn {turn}"]}, thread())
        before = (await graph.aget_state(thread())).values
        counts = await documents_of(saver.documents)
        await saver.aprune(["t"])
        assert (await graph.aget_state(thread())).values == before
        assert len(before["log"]) == 9
        left = await documents_of(saver.documents)
        assert left["checkpoint"] < counts["checkpoint"]
        after = await graph.ainvoke({"log": ["more"]}, thread())
        assert after["log"][:9] == before["log"]


async def test_pruning_deletes_the_values_that_no_checkpoint_has(store_url: str) -> None:
    async with AgentRuntimeSaver(store_url) as saver:
        graph = logging_graph(saver)
        await graph.ainvoke({"log": ["a"]}, thread())
        counts = await documents_of(saver.documents)
        await saver.aprune(["t"])
        left = await documents_of(saver.documents)
        assert left["checkpoint"] == 1
        assert left["channel"] < counts["channel"]
        assert left["write"] < counts["write"]
        assert (await graph.aget_state(thread())).values["log"] == ["a", "first 1", "second 2"]


async def test_an_unknown_strategy_of_pruning_is_rejected() -> None:
    async with AgentRuntimeSaver("memory://") as saver:
        with pytest.raises(InvalidArgument, match="strategy must be 'keep_latest' or 'delete', got 'oldest'"):
            await saver.aprune(["t"], strategy="oldest")


async def test_nothing_is_left_of_a_deleted_thread(store_url: str) -> None:
    async with AgentRuntimeSaver(store_url) as saver:
        await logging_graph(saver).ainvoke({"log": ["a"]}, {**thread(), "metadata": {"run_id": "run-1"}})
        assert 0 not in (await documents_of(saver.documents)).values()
        await saver.adelete_thread("t")
        assert set((await documents_of(saver.documents)).values()) == {0}


async def test_the_last_run_of_a_thread_takes_the_thread_with_it(store_url: str) -> None:
    async with AgentRuntimeSaver(store_url) as saver:
        await logging_graph(saver).ainvoke({"log": ["a"]}, {**thread(), "metadata": {"run_id": "run-1"}})
        await saver.adelete_for_runs(["run-1"])
        assert set((await documents_of(saver.documents)).values()) == {0}


@pytest.mark.parametrize("name", ["a/b", "line\nbreak", "ünïcode", "x" * 300, '["t"]'])
async def test_threads_have_any_name(store_url: str, name: str) -> None:
    async with AgentRuntimeSaver(store_url) as saver:
        state = await logging_graph(saver).ainvoke({"log": ["a"]}, thread(name))
        assert state["log"] == ["a", "first 1", "second 2"]
        assert {each.config["configurable"]["thread_id"] async for each in saver.alist(None)} == {name}


async def test_a_config_without_a_thread_is_rejected() -> None:
    async with AgentRuntimeSaver("memory://") as saver:
        with pytest.raises(InvalidArgument, match=r"configurable of the config must have a thread_id, got \{\}"):
            await saver.aget_tuple({"configurable": {}})


async def test_a_superseded_run_writes_no_checkpoint(store_url: str) -> None:
    async with AgentRuntimeSaver(store_url) as saver:
        ended = FencedWrites(lambda: Guard("run", "1"), saver.documents.commits, lambda: True)
        token = CURRENT_CLAIM.set(ended)
        try:
            with pytest.raises(LeaseLost):
                await saver.aput(thread(), empty_checkpoint(), {}, {})
        finally:
            CURRENT_CLAIM.reset(token)
        assert await saver.aget_tuple(thread()) is None
