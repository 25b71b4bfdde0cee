"""`GET /runs/{id}/events`: frames, positions, ends and limits of event streams."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agent_runtime_core.errors import StorageBusy, StorageCorrupt, StorageFull
from agent_runtime_core.runner import AgentRunner
from agent_runtime_core.server.open_streams import SLICE, slices
from agent_runtime_core.server.settings import ServerSettings
from tests.server.conftest import client_of
from tests.server.gated import Gated, finished
from tests.server.streaming import (
    SLOW,
    SilentReader,
    client_at,
    following,
    frames_in,
    resume_as_it_ends,
    serving,
    streams_of,
    unchunked,
)
from tests.support.runs import soon

KIB = 1024


@pytest.fixture
def gated(runner: AgentRunner) -> Gated:
    return Gated(runner)


def numbers(text: str) -> list[int]:
    return [frame["sequence"] for frame in frames_in(text) if "sequence" in frame]


async def test_a_stream_has_every_event_and_the_end(gated: Gated, client: httpx.AsyncClient) -> None:
    await finished(gated, text="a\nline “quoted”")
    async with client:
        response = await client.get("/api/v1/runs/r/events", headers={"Accept": "text/event-stream"})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers
    first, *frames, end = frames_in(response.text)
    assert first.retry == "1000"
    assert [frame.id for frame in frames] == ["0", "1", "2", "3", "4"]
    assert [frame["sequence"] for frame in frames] == [0, 1, 2, 3, 4]
    assert {frame.event for frame in frames} == {None}
    assert [frame["type"] for frame in frames] == ["run.started", *["test.event"] * 3, "run.succeeded"]
    assert set(frames[1]) == {"sequence", "type", "time", "payload"}
    assert frames[1]["payload"] == {"text": "a\nline “quoted”"}
    assert (end, end.id) == ({"type": "end", "state": "succeeded"}, None)


async def test_the_types_may_be_names_of_events_too(gated: Gated, client: httpx.AsyncClient) -> None:
    await finished(gated)
    async with client:
        response = await client.get("/api/v1/runs/r/events?named=1")
    assert [frame.event for frame in frames_in(response.text)][1:3] == ["run.started", "test.event"]


@pytest.mark.parametrize(
    ("types", "expected"),
    [(["test.*"], [1, 2, 3]), (["run.s*"], [0, 4]), (["nothing"], []), (["test.event", "run.*"], [0, 1, 2, 3, 4])],
)
async def test_types_select_events(
    gated: Gated, client: httpx.AsyncClient, types: list[str], expected: list[int]
) -> None:
    await finished(gated)
    async with client:
        response = await client.get("/api/v1/runs/r/events", params={"types": types})
        # A client that has read all of its events stops, although the last event was none of them.
        position = [frame.id for frame in frames_in(response.text) if frame.id is not None][-1]
        again = await client.get("/api/v1/runs/r/events", params={"types": types, "after": position})
        page = await client.get("/api/v1/runs/r/events", params={"types": types, "follow": "false"})
    assert numbers(response.text) == expected
    assert again.status_code == 204
    assert [each["sequence"] for each in page.json()["items"]] == expected


@pytest.mark.parametrize("how", ["Last-Event-ID", "after"])
async def test_a_position_means_after_that_event(gated: Gated, client: httpx.AsyncClient, how: str) -> None:
    await finished(gated)

    def at(position: str) -> dict[str, Any]:
        return {"params": {"after": position}} if how == "after" else {"headers": {how: position}}

    async with client:
        responses = {each: await client.get("/api/v1/runs/r/events", **at(each)) for each in ("0", "2", "3")}
        past = [await client.get("/api/v1/runs/r/events", **at(each)) for each in ("4", "1000000000", str(2**53))]
        both = await client.get("/api/v1/runs/r/events?after=0", headers={"Last-Event-ID": "3"})
    assert {each: numbers(response.text) for each, response in responses.items()} == {
        "0": [1, 2, 3, 4],
        "2": [3, 4],
        "3": [4],
    }
    assert [each.status_code for each in past] == [204] * 3
    assert numbers(both.text) == [4]


@pytest.mark.parametrize("position", ["-1", "x", "1.5", "1e9", "+1", "٣", str(2**53 + 1), str(2**70), "9" * 5000])
async def test_a_position_that_is_none_is_rejected(gated: Gated, client: httpx.AsyncClient, position: str) -> None:
    await finished(gated)
    async with client:
        query = await client.get("/api/v1/runs/r/events", params={"after": position})
        header = await client.get("/api/v1/runs/r/events", headers={b"Last-Event-ID": position.encode()})
    assert (query.status_code, header.status_code) == (400, 400)
    assert query.headers["content-type"] == header.headers["content-type"] == "application/problem+json"


async def test_an_unknown_parameter_is_rejected(gated: Gated, client: httpx.AsyncClient) -> None:
    await finished(gated)
    async with client:
        response = await client.get("/api/v1/runs/r/events", params={"type": "step.*"})
    assert response.status_code == 422
    assert "'types'" in response.json()["detail"]


async def test_a_position_past_the_end_of_a_live_run_waits_for_new_events(gated: Gated, app: Any) -> None:
    running = await gated.start("r")
    async with serving(app) as port, client_at(port) as client, following(client, "r", params={"after": 2}) as frames:
        await anext(frames)
        await gated.emit(3)
        assert (await anext(frames))["sequence"] == 3
        gated.finish()
        assert [frame.get("sequence") async for frame in frames] == [4, None]
        await running


@pytest.mark.parametrize("execute", [False, True], ids=["pending", "finished again"])
async def test_a_stream_goes_on_if_its_run_is_resumed_as_it_ends(
    runner: AgentRunner, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, execute: bool
) -> None:
    await runner.submit("echo", run_id="r")
    await runner.cancel("r")
    resume_as_it_ends(monkeypatch, runner, execute=execute)
    async with client:
        response = await client.get("/api/v1/runs/r/events")
    _, *events, end = frames_in(response.text)
    assert [each["type"] for each in events][-1] == "run.succeeded"
    assert end == {"type": "end", "state": "succeeded"}


@pytest.mark.parametrize("how", [{"params": {"follow": "false"}}, {"headers": {"Accept": "application/json"}}])
async def test_one_page_of_json(gated: Gated, client: httpx.AsyncClient, how: dict[str, Any]) -> None:
    await finished(gated)
    async with client:
        response = await client.get("/api/v1/runs/r/events", **how)
    body = response.json()
    assert response.headers["cache-control"] == "no-store"
    assert [each["sequence"] for each in body["items"]] == [0, 1, 2, 3, 4]
    assert set(body["items"][0]) == {"sequence", "type", "time", "payload"}
    assert body["next"] is None


async def test_pages_of_json_are_small_and_complete(gated: Gated, client: httpx.AsyncClient) -> None:
    await finished(gated, count=50, text="x" * 100 * KIB)
    found, after, sizes = [], None, []
    async with client:
        while True:
            params = {"follow": "false"} | ({} if after is None else {"after": str(after)})
            response = await client.get("/api/v1/runs/r/events", params=params)
            found += [each["sequence"] for each in response.json()["items"]]
            sizes.append(len(response.content))
            after = response.json()["next"]
            if after is None:
                break
    assert found == list(range(52))
    assert max(sizes) <= KIB * KIB
    assert len(sizes) < 10


async def test_an_unknown_or_hidden_run_is_not_found(gated: Gated, make_app: Callable[..., Any]) -> None:
    from agent_runtime_core.server.access import Caller

    await finished(gated)
    app = make_app(authenticate=lambda _: Caller("ada", may=lambda verb, run: False))
    async with client_of(app) as client:
        assert (await client.get("/api/v1/runs/r/events")).status_code == 404
        assert (await client.get("/api/v1/runs/other/events")).status_code == 404


async def test_the_number_of_streams_is_limited(gated: Gated, make_app: Callable[..., Any]) -> None:
    running = await gated.start("r")
    for settings, status in ((ServerSettings(max_streams=1), 503), (ServerSettings(max_streams_per_caller=1), 429)):
        async with serving(make_app(settings=settings)) as port, client_at(port) as client:
            async with following(client, "r") as frames:
                await anext(frames)
                refused = await client.get("/runs/r/events")
                assert refused.status_code == status
                assert int(refused.headers["retry-after"]) > 0
                assert refused.headers["content-type"] == "application/problem+json"
            page = await client.get("/runs/r/events?follow=false")  # it is no stream
            assert page.status_code == 200
    gated.finish()
    await running


async def test_a_stream_that_the_client_has_left_is_not_counted(gated: Gated, make_app: Callable[..., Any]) -> None:
    running = await gated.start("r")
    app = make_app(settings=ServerSettings(max_streams=1))
    async with serving(app) as port, client_at(port) as client:
        for _ in range(3):
            async with following(client, "r") as frames:
                await anext(frames)
            await soon(lambda: app.state.server.limits.open_streams == 0)
    assert not running.done()
    gated.finish()
    await running


async def test_a_server_that_shuts_down_says_bye(gated: Gated, app: Any) -> None:
    running = await gated.start("r")
    async with serving(app) as port, client_at(port) as client, following(client, "r") as frames:
        assert [(await anext(frames)).id for _ in range(2)] == [None, "0"]
        app.state.server.draining.set()
        [bye] = [frame async for frame in frames]
        assert (bye.event, bye.retry, bye.id) == ("bye", "5000", None)
        assert (await client.get("/runs/r/events")).status_code == 503
    assert not running.done()
    gated.finish()
    await running


async def test_a_stream_ends_with_the_run_and_not_with_what_its_agent_emits(gated: Gated, app: Any) -> None:
    running = await gated.start("r")
    lies = ("run.succeeded", "run.failed", "run.cancelled", "run.timed_out")
    async with serving(app) as port, client_at(port) as client:
        async with following(client, "r", params={"named": 1}) as frames:
            for kind in lies:
                await gated.emit(kind=kind, lie=True)
            seen = [await anext(frames) for _ in range(2 + len(lies))][1:]
            assert (await client.get("/runs/r")).json()["state"] == "running"
            assert (await client.get("/runs/r/result")).status_code == 202
            gated.finish()
            seen += [frame async for frame in frames]
        assert [frame["type"] for frame in seen] == ["run.started", *lies, "run.succeeded", "end"]
        assert [frame.event for frame in seen[1:-2]] == [f"agent.{kind}" for kind in lies]
        assert [frame.get("from_agent") for frame in seen] == [None, *[True] * len(lies), None, None]
        assert seen[1]["payload"] == {"lie": True}
        assert (await client.get("/runs/r/events", headers={"Last-Event-ID": "4"})).status_code == 200
        assert (await client.get("/runs/r/events", headers={"Last-Event-ID": "5"})).status_code == 204
    await running


async def test_an_idle_stream_gets_comments(gated: Gated, app: Any) -> None:
    running = await gated.start("r")
    async with serving(app) as port, client_at(port) as client, following(client, "r") as frames:
        for _ in range(2):
            await anext(frames)
        streams = streams_of(app)
        for _ in range(2):
            streams.look(0)  # it has just sent something
            streams.look(14)
            streams.look(2)
            assert (await anext(frames)).is_comment
        await gated.emit()
        assert (await anext(frames))["sequence"] == 1
        gated.finish()
        await running


async def test_a_reader_that_accepts_nothing_is_disconnected(gated: Gated, app: Any) -> None:
    with SilentReader() as reader:
        async with serving(app, **SLOW) as port:
            await reader.connect(port, "/runs/r/events")
            running = await gated.start("r")
            await gated.emit(8, text="x" * 200 * KIB)
            streams = streams_of(app)
            await soon(lambda: any(each.sending for each in streams._readers))
            streams.look(0)
            streams.look(119)
            assert app.state.server.limits.open_streams == 1
            streams.look(2)
            await soon(lambda: app.state.server.limits.open_streams == 0)
            assert app.state.server.limits.streams_cut == 1
            # Only what the kernel had comes yet: the rest of the frame was dropped with the connection.
            assert len(await reader.read_all()) < 100 * KIB
            gated.finish()
            await running


async def test_a_reader_that_accepts_nothing_holds_up_neither_the_run_nor_the_end_of_the_server(
    gated: Gated, app: Any
) -> None:
    with SilentReader() as reader:
        async with serving(app, **SLOW) as port:
            await reader.connect(port, "/runs/r/events")
            running = await gated.start("r")
            await gated.emit(8, text="x" * 200 * KIB)
            await soon(lambda: any(each.sending for each in streams_of(app)._readers))
            app.state.server.draining.set()
            await soon(lambda: app.state.server.limits.open_streams == 0)
            gated.finish()
            await running


async def test_a_slow_reader_reads_one_page_after_the_other(
    gated: Gated, app: Any, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    await finished(gated, count=40, text="x" * 100 * KIB)
    reads: list[int] = []
    original = runner.event_bus._rows

    async def counted(run_id: str, since: int, limit: int) -> Any:
        rows = await original(run_id, since, limit)
        reads.append(since)
        return rows

    monkeypatch.setattr(runner.event_bus, "_rows", counted)
    with SilentReader() as reader:
        async with serving(app, **SLOW) as port:
            await reader.connect(port, "/runs/r/events")
            await soon(
                lambda: "open_streams" in app.state._state and any(each.sending for each in streams_of(app)._readers)
            )
            assert max(reads) < 20  # it has not read ahead
            assert numbers(unchunked(await reader.read_all())) == list(range(42))


@pytest.mark.parametrize("sizes", [[], [10], [KIB] * 100, [100 * KIB, 1, 32 * KIB, 1, 33 * KIB], [*range(1, 900)]])
def test_frames_are_cut_only_between_frames(sizes: list[int]) -> None:
    frames = [b"id: %d\ndata: %b\n\n" % (n, b"x" * size) for n, size in enumerate(sizes)]
    parts = list(slices(b"".join(frames)))
    assert b"".join(parts) == b"".join(frames)
    for part in parts:
        assert part.startswith(b"id: ")
        assert part.endswith(b"\n\n")
        assert len(part) <= SLICE or part in frames


def test_no_width_of_a_frame_is_cut_wrongly() -> None:
    for size in range(SLICE - 20, SLICE + 5):
        frames = [b"data: %b\n\n" % (b"x" * size), b"data: y\n\n"]
        assert b"".join(slices(b"".join(frames))) == b"".join(frames)
        assert all(each.endswith(b"\n\n") for each in slices(b"".join(frames)))


async def test_a_run_that_is_deleted_while_it_is_followed(gated: Gated, app: Any, runner: AgentRunner) -> None:
    with SilentReader() as reader:
        async with serving(app, **SLOW) as port, client_at(port) as client:
            await reader.connect(port, "/runs/r/events")
            running = await gated.start("r")
            await gated.emit(10, text="x" * 200 * KIB)
            await soon(lambda: any(each.sending for each in streams_of(app)._readers))
            gated.finish()
            await running
            await runner.discard("r")
            *_, last = frames_in(unchunked(await reader.read_all()))
            assert (last["type"], last["status"], last.retry, last.id) == ("error", 404, "1000", "")
            assert (await client.get("/runs/r/events")).status_code == 404


async def test_a_run_that_is_deleted_and_submitted_again_while_it_is_followed(
    gated: Gated, app: Any, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_seconds = "agent_runtime_core.server.open_streams.CHECK_SECONDS"
    monkeypatch.setattr(check_seconds, math.inf)  # a check between the deletion and the submission finds no run: 404
    with SilentReader() as reader:
        async with serving(app, **SLOW) as port, client_at(port) as client:
            await reader.connect(port, "/runs/r/events")
            running = await gated.start("r")
            await gated.emit(10, text="x" * 200 * KIB)
            await soon(lambda: any(each.sending for each in streams_of(app)._readers))
            gated.finish()
            await running
            await runner.discard("r")
            await finished(gated, count=30, kind="test.other", text="y")
            monkeypatch.setattr(check_seconds, -1.0)  # before each page
            frames = frames_in(unchunked(await reader.read_all()))
            assert (frames[-1]["type"], frames[-1]["status"], frames[-1].id) == ("error", 410, "")
            assert not [frame for frame in frames if frame.get("type") == "test.other"]
            again = await client.get("/runs/r/events")
            assert numbers(again.text) == list(range(32))


@pytest.mark.parametrize(
    "error", [StorageBusy("busy"), StorageFull("full"), StorageCorrupt("/the/path"), OSError("bad")]
)
async def test_a_stream_recovers_after_the_store_has_failed(
    gated: Gated, app: Any, runner: AgentRunner, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    running = await gated.start("r")
    async with serving(app) as port, client_at(port) as client:
        async with following(client, "r") as frames:
            assert [(await anext(frames)).id for _ in range(2)] == [None, "0"]

            async def failing(*args: Any) -> Any:
                raise error

            with monkeypatch.context() as patched:
                patched.setattr(runner.event_bus, "_rows", failing)
                await gated.emit(2)
                *sent, last = [frame async for frame in frames]  # a read that had begun may still return an event
            assert (last["type"], last.retry, last.id) == ("error", "1000", None)
            seen = [frame["sequence"] for frame in sent]
            assert seen == [1, 2][: len(seen)]
            assert last["status"] in (500, 503, 507)
            assert "/the/path" not in json.dumps(last)
        async with following(client, "r", headers={"Last-Event-ID": "0"}) as frames:
            await anext(frames)
            assert [(await anext(frames))["sequence"] for _ in range(2)] == [1, 2]
    gated.finish()
    await running


async def test_a_stream_ends_when_the_store_closes(gated: Gated, app: Any, runner: AgentRunner) -> None:
    running = await gated.start("r")
    async with serving(app) as port, client_at(port) as client, following(client, "r") as frames:
        assert [(await anext(frames)).id for _ in range(2)] == [None, "0"]
        gated.finish()
        await runner.event_bus.close()
        left = [frame async for frame in frames]
        assert (left[-1]["type"], left[-1]["status"]) == ("error", 503)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
