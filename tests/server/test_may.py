"""`Caller.may`: it gets the input of a run only if it reads it, and it decides who may name a conversation."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from agent_runtime_core._execution.context import conversation_id
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import AgentRunner, RunInfo, RunnerConfig
from agent_runtime_core.server.access import Caller
from agent_runtime_core.server.app import create_app
from agent_runtime_core.server.settings import ServerSettings
from agent_runtime_core.turns import TurnManager
from tests.server.conftest import client_of
from tests.server.streaming import serving
from tests.server.test_socket import connected
from tests.support.backends import POSTGRES, SERVERS
from tests.support.runs import Script

API: Final = "/api/v1"
LISTS: Final = ("/runs?limit=200", "/approvals?limit=200")


async def _asks(ctx: Any) -> Any:
    return await ctx.approve("plan")


async def _fails(ctx: Any) -> Any:
    raise ValueError("no luck")


async def _chats(ctx: Any) -> RunResult:
    seen = [each["content"] for each in ctx.input_messages]
    return RunResult(final_output={"seen": seen}, final_messages=[*ctx.input_messages, _said("noted", "assistant")])


def _said(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": text}


def _registry() -> Registry:
    registry = Registry()
    for body, key in ((_asks, "asks"), (_fails, "fails"), (_chats, "chats")):
        registry.register(Script(body, key))
    return registry


def _opened(url: str) -> AgentRunner:
    return AgentRunner.open(url, registry=_registry(), config=RunnerConfig(park_after=0.0, max_retries=1))


@pytest.fixture
def runner(tmp_path: Path) -> AgentRunner:
    return _opened(str(tmp_path / "runs.db"))


@pytest.fixture(params=["sqlite", "memory", "redis", POSTGRES])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> AgentRunner:
    if request.param in SERVERS:
        return _opened(request.getfixturevalue(f"{request.param}_url"))
    return _opened("memory://" if request.param == "memory" else str(tmp_path / "runs.db"))


def _app(runner: AgentRunner, may: Any, **options: Any) -> Any:
    return create_app(runner, authenticate=lambda _: Caller("ada", may=may), **options)


# -- the input


def _swallowing(errors: type[BaseException]) -> Callable[[RunInfo], bool]:
    def may(run: RunInfo) -> bool:
        try:
            return bool(run.input["user"] == "ada")
        except errors:
            return False

    return may


#: Ways to read the user in the input of a run.
READS: Final[dict[str, Callable[[RunInfo], bool]]] = {
    "plainly": lambda run: run.input.get("user") == "ada",
    "by name": lambda run: getattr(run, "input", {}).get("user") == "ada",
    "of a copy": lambda run: copy.copy(run).input.get("user") == "ada",
    "of a changed copy": lambda run: dataclasses.replace(run, reason="").input.get("user") == "ada",
    "as a dict": lambda run: dataclasses.asdict(run)["input"].get("user") == "ada",
    "as a text": lambda run: "'user': 'ada'" in repr(run),
    "after the metadata": lambda run: run.metadata["n"] > 0 and run.input.get("user") == "ada",
    "without its errors": _swallowing(Exception),
    "without any errors": _swallowing(BaseException),
    "not at all": lambda run: run.metadata["n"] % 2 == 0,
}


@pytest.mark.parametrize("how", READS)
async def test_may_decides_as_if_each_run_came_with_its_input(how: str, stored: AgentRunner) -> None:
    for number, given in enumerate(({"user": "ada"}, {"user": "ben"}, {}, {"user": "ada", "x": "y"})):
        await stored.submit("asks", given, run_id=f"r{number}", metadata={"n": number})
        if number != 2:
            await stored.submit("fails", given, run_id=f"f{number}", metadata={"n": number})
    while await stored.run_once():
        pass
    expected = []
    for run in await stored.runs():
        with contextlib.suppress(KeyError):
            expected += [str(run.run_key)] if READS[how](run) else []
    app = _app(stored, lambda verb, run: READS[how](run))
    async with client_of(app) as client:
        runs, questions = [(await client.get(f"{API}{path}")).json()["items"] for path in LISTS]
        own = [key for key in expected if key[0] == "f"]
        failed = {"all": True, "state": "failed", "expect": len(own)}
        deleted = (await client.post(f"{API}/dead/discard", json=failed)).json()
        single = [(await client.get(f"{API}/runs/r{number}")).status_code for number in range(4)]
    assert sorted(each["key"] for each in runs) == sorted(expected)
    assert [each["key"] for each in questions] == [key for key in expected if key[0] == "r"]
    assert len(deleted["done"]) == len(own)
    assert single == [200 if f"r{number}" in expected else 404 for number in range(4)]


@pytest.mark.parametrize("failing", [lambda run: 1 // 0, lambda run: run.input["no such key"]])
async def test_an_error_of_may_is_an_internal_error(failing: Any, runner: AgentRunner) -> None:
    await runner.submit("asks", {"user": "ada"})
    async with client_of(_app(runner, lambda verb, run: failing(run))) as client:
        assert (await client.get(f"{API}/runs")).status_code == 500


async def test_a_run_that_is_deleted_before_its_input_is_read_is_not_listed(runner: AgentRunner) -> None:
    for name in ("one", "two"):
        await runner.execute("fails", name, {"user": "ada"})
    find = runner.queue.find

    async def found(wanted: Any) -> Any:
        rows = await find(wanted)
        if wanted.newest_first:
            await runner.discard("one")
        return rows

    runner.queue.find = found  # type: ignore[method-assign]
    async with client_of(_app(runner, lambda verb, run: READS["plainly"](run))) as client:
        items = (await client.get(f"{API}/runs")).json()["items"]
    assert [each["key"] for each in items] == ["two"]


async def test_a_run_key_may_begin_with_the_id_of_another_run(stored: AgentRunner) -> None:
    key = "8f14e45f-ceea-4672-a9d1-0f8e1c6f0a4b"
    await stored.submit("asks", {"user": "ada"}, run_id=f"{key}-x")
    await stored.submit("asks", {"user": "ada"}, run_id=key)
    await stored.submit("asks", {"user": "ada"}, run_id="child", parent_run_id=key)
    hidden = set[str]()
    async with client_of(_app(stored, lambda verb, run: str(run.run_id) not in hidden)) as client:
        for path in ("/runs/child", f"/runs?parent={key}"):
            for hidden in ({await _id_of(stored, f"{key}-x")}, {key}):
                found = (await client.get(f"{API}{path}")).json()
                parent = (found["items"][0] if "items" in found else found)["parent"]
                assert parent == (None if key in hidden else key)


async def _id_of(runner: AgentRunner, key: str) -> str:
    return str((await runner.get_run(key)).run_id)


async def _requests(runner: AgentRunner, parent: str) -> dict[str, Any]:
    """Send each request that looks at many runs, by a caller whose `may` reads metadata; return what came."""
    async with client_of(_app(runner, lambda verb, run: run.metadata["user"] == "ada")) as client:
        answers = {path: await client.get(f"{API}{path}") for path in (*LISTS, f"/runs?parent={parent}&limit=200")}
        for what in ("requeue", "discard"):
            body = {"all": True, "state": "failed", "expect": 10_000}
            answers[what] = await client.post(f"{API}/dead/{what}", json=body)
    return answers


async def test_requests_that_look_at_many_runs_load_no_inputs(tmp_path: Path) -> None:
    peaks = {}
    for size in (1_000, 900_000):
        async with _opened(str(tmp_path / f"{size}.db")) as runner:
            given = {"params": {"text": "x" * size}}
            parent = await runner.submit("asks", given, metadata={"user": "ben"})
            for number in range(40):
                meta = {"user": ("ada", "ben")[number % 2]}
                await runner.submit("asks", given, metadata=meta)
                await runner.submit("fails", given, metadata=meta, parent_run_id=parent)
            while await runner.run_once():
                pass
            await _requests(runner, str(parent))  # what is loaded once
            tracemalloc.start()
            answers = await _requests(runner, str(parent))
            peaks[size] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert [len(answers[path].json()["items"]) for path in answers if path.startswith("/")] == [40, 20, 20]
        assert [answers[what].status_code for what in ("requeue", "discard")] == [409, 409]
    assert peaks[900_000] < peaks[1_000] + 500_000, peaks


# -- conversations

UUID_FORM: Final = "8f14e45f-ceea-4672-a9d1-0f8e1c6f0a4b"
#: Names of two conversations. All names of a row are of the same one.
NAMES: Final = (
    (UUID_FORM, UUID_FORM.upper(), UUID_FORM.replace("-", ""), f"{{{UUID_FORM}}}", f"urn:uuid:{UUID_FORM}"),
    ("support-1", str(conversation_id("support-1")), str(conversation_id("support-1")).upper()),
)
OTHER: Final = ("Support-1", " support-1", "8f14e45f-ceea-4672-a9d1-0f8e1c6f0a4c")


def _by_header(request: Any) -> Caller:
    user = request.headers["authorization"].removeprefix("Bearer ")
    return Caller(user, may=None if user == "root" else lambda verb, run: run.metadata.get("user") == user)


def _tenants(runner: AgentRunner, **options: Any) -> Any:
    return create_app(runner, turns=TurnManager(runner), authenticate=_by_header, **options)


async def _beside(client: Any, user: str, name: Any) -> Any:
    body = {"agent": "chats", "metadata": {"user": user}, "conversation_id": name}
    return await client.post(f"{API}/runs", json={**body, "input": {"messages": [_said("what was said?")]}})


async def _in_input(client: Any, user: str, name: Any) -> Any:
    body = {"agent": "chats", "metadata": {"user": user}, "input": {"conversation_id": name}}
    return await client.post(f"{API}/runs", json=body)


async def _by_fork(client: Any, user: str, name: Any) -> Any:
    made = await client.post(f"{API}/runs", json={"agent": "chats", "metadata": {"user": user}})
    path = f"{API}/runs/{made.json()['run_id']}/fork"
    return await client.post(path, json={"input": {"conversation_id": name}})


async def _by_turn(client: Any, user: str, name: Any) -> Any:
    body = {"text": "what was said?", "metadata": {"user": user}, "conversation_id": name}
    return await client.post(f"{API}/turns", json=body)


WAYS: Final = (_beside, _in_input, _by_fork, _by_turn)


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize("names", NAMES, ids=["uuid", "text"])
async def test_only_a_caller_who_may_read_its_first_run_may_name_a_conversation(
    finished: bool, names: tuple[str, ...], stored: AgentRunner
) -> None:
    app = _tenants(stored)
    first = {
        "agent": "chats", "run_id": "first", "metadata": {"user": "ada"}, "conversation_id": names[0],
        "input": {"messages": [_said("my card is 4111")]},
    }  # fmt: skip
    async with client_of(app, "ada") as ada, client_of(app, "ben") as ben, client_of(app, "root") as root:
        assert (await ada.post(f"{API}/runs", json=first)).status_code == 201
        if finished:
            await stored.run_once()
        before = len(await stored.runs())
        unknown = (await ben.get(f"{API}/runs/nobody")).json()
        # While no message is stored, the UUID that is made of a text does not lead to the text.
        known = [name for name in names if finished or names[0] == UUID_FORM or name == names[0]]
        for way in WAYS:
            for name in known:
                refused = await way(ben, "ben", name)
                assert refused.status_code == 404, (way, name, refused.text)
                assert {**refused.json(), "request_id": ""} == {**unknown, "request_id": ""}
                assert (await way(root, "ada", name)).status_code == 201
            assert (await way(ada, "ada", names[0])).status_code == 201
            for name in OTHER:
                assert (await way(ben, "ben", f"{name}{way.__name__}")).status_code == 201
        assert (await ada.post(f"{API}/runs", json=first)).status_code == 200
        listed = (await ben.get(f"{API}/runs", params={"conversation": names[0]})).json()["items"]
        assert listed == []
    assert len(await stored.runs()) > before
    for run in await stored.runs(conversation=names[0]):
        assert run.metadata["user"] == "ada"


async def test_a_turn_of_a_socket_names_no_conversation_of_others(runner: AgentRunner) -> None:
    await runner.submit("chats", {"conversation_id": "c"}, metadata={"user": "ada"})
    app = _app(runner, lambda verb, run: run.metadata.get("user") == "ben", turns=TurnManager(runner))
    turn = {"text": "hi", "metadata": {"user": "ben"}}
    async with serving(app) as port, connected(port) as client:
        assert (await client.ask("turn", turn={**turn, "conversation_id": "c"}))["status"] == 404
        assert (await client.ask("turn", turn={**turn, "conversation_id": "d"}))["type"] == "ack"


async def test_a_name_made_of_a_text_before_the_text_keeps_others_out(runner: AgentRunner) -> None:
    app = _tenants(runner)
    async with client_of(app, "ada") as ada, client_of(app, "ben") as ben:
        assert (await _beside(ben, "ben", str(conversation_id("ticket-7")))).status_code == 201
        assert (await _beside(ada, "ada", "ticket-7")).status_code == 404


async def test_nobody_knows_whose_a_conversation_without_runs_is(runner: AgentRunner) -> None:
    app = _tenants(runner)
    async with client_of(app, "ada") as ada, client_of(app, "root") as root:
        made = (await _beside(ada, "ada", "c")).json()
        await runner.run_once()
        await runner.discard(made["run_id"])
        for way in WAYS:
            assert (await way(ada, "ada", "c")).status_code == 404
        assert (await _beside(root, "ada", "c")).status_code == 201
        assert (await _beside(ada, "ada", "c")).status_code == 201


@pytest.mark.parametrize("name", [5, 0, True, 1.5, ["c"], {"c": 1}])
async def test_a_conversation_is_named_by_a_string(name: Any, runner: AgentRunner) -> None:
    app = _tenants(runner)
    async with client_of(app, "ada") as ada:
        for way in (_in_input, _by_fork):
            refused = await way(ada, "ada", name)
            assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "conversation_id")
        for name in (None, ""):
            assert (await _in_input(ada, "ada", name)).status_code == 201


async def test_a_fork_with_another_input_must_be_one_that_the_caller_may_have(runner: AgentRunner) -> None:
    app = _app(runner, lambda verb, run: run.input.get("user") == "ada")
    await runner.execute("chats", "own", {"user": "ada"})
    async with client_of(app) as client:
        for more in ({}, {"new_run_id": "new"}):
            path = f"{API}/runs/own/fork"
            assert (await client.post(path, json={"input": {"user": "ben"}, **more})).status_code == 403
            assert (await client.post(path, json={"input": {"user": "ada"}, **more})).status_code == 201


# -- the bound of priorities


@pytest.mark.parametrize(("most", "accepted", "refused"), [(None, 10**6, 10**6 + 1), (0, 0, 1), (-5, -5, -4)])
async def test_the_priority_of_a_run_is_bounded(
    most: int | None, accepted: int, refused: int, runner: AgentRunner
) -> None:
    settings = ServerSettings() if most is None else ServerSettings(max_priority=most)
    async with client_of(_tenants(runner, settings=settings), "root") as client:
        found = [
            await client.post(f"{API}/runs", json={"agent": "chats", "priority": each})
            for each in (-(2**31) + 1, accepted, refused)
        ]
    bound = 10**6 if most is None else most
    assert [each.status_code for each in found] == [201, 201, 422]
    [error] = found[2].json()["errors"]
    assert error == {"field": "priority", "message": f"priority must be at most {bound}."}


# -- questions


@pytest.mark.parametrize("limited", [False, True])
async def test_a_caller_that_may_only_approve_lists_the_questions_that_it_may_answer(
    limited: bool, runner: AgentRunner
) -> None:
    for user in ("ada", "ben"):
        await runner.submit("asks", {"secret": "4111"}, run_id=user, metadata={"user": user})
        await runner.run_once()

    def may(verb: str, run: RunInfo) -> bool:
        return verb == "act" and run.metadata["user"] == "ada"

    app = create_app(runner, authenticate=lambda _: Caller("eve", {"approve"}, may=may if limited else None))
    async with client_of(app) as client:
        listed = await client.get(f"{API}/approvals")
        others = [
            (await client.get(f"{API}{path}")).status_code
            for path in ("/runs", "/runs/ada", "/runs/ada/journal", "/runs/ada/messages", "/runs/ada/events")
        ]
        answered = [
            await client.post(
                f"{API}/runs/{each['run_id']}/approvals/{each['name']}",
                json={"answer": True, "request_id": each["request_id"]},
            )
            for each in listed.json()["items"]
        ]
    assert [each["key"] for each in listed.json()["items"]] == (["ada"] if limited else ["ada", "ben"])
    assert "4111" not in listed.text
    assert others == [403] * 5
    assert {each.status_code for each in answered} == {200}


async def test_a_run_and_a_fork_are_judged_by_their_params() -> None:
    def may(verb: str, run: Any) -> bool:
        return bool(run.input.get("params", {}).get("team") != "secret")

    async with _opened("memory://") as runner:
        app = create_app(runner, authenticate=lambda request: Caller("ada", may=may))
        await runner.submit("asks", {"params": {"team": "open"}}, run_id="one")
        async with client_of(app, None) as client:
            for params, code in (({"team": "secret"}, 403), ({"team": "other"}, 201)):
                assert (await client.post(f"{API}/runs/one/fork", json={"params": params})).status_code == code
                body = {"agent": "asks", "input": {"params": {"team": "open"}}, "params": params}
                assert (await client.post(f"{API}/runs", json=body)).status_code == code
