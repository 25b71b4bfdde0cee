"""Other writers between the read of a text and its write, while stored contents are encrypted again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core.runner import AgentRunner, reencrypt
from tests.support.reencryption import BOTH, CANARY, KINDS, NEW, OLD, Agents, Place, check, fill, place_of


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request.param, request, tmp_path)


class Interfering:
    """An engine on which another writer is faster than the first commit of an operation."""

    def __init__(self, runner: AgentRunner, name: str, write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        committer: Any = runner.queue.commits
        self._engine, self._name, self._write = committer._target, name, write
        monkeypatch.setattr(committer, "_target", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        if self._write is not None and ops[0].name == self._name:
            write, self._write = self._write, None
            await write()
        results: list[Any] = await self._engine.commit(guard, ops)
        return results

    @property
    def interfered(self) -> bool:
        return self._write is None


class Race(NamedTuple):
    """A store on which another writer is faster than an operation of `reencrypt`."""

    place: Place
    agents: Agents
    patch: pytest.MonkeyPatch

    async def run(self, name: str, write: Any) -> Any:
        async with self.place.runner(OLD, *self.agents.scripts) as runner:
            await fill(runner)
        async with self.place.runner(BOTH, *self.agents.scripts) as runner:
            engine = Interfering(runner, name, lambda: write(runner), self.patch)
            done = await reencrypt(runner)
            assert engine.interfered
            return done


@pytest.fixture
def race(place: Place, monkeypatch: pytest.MonkeyPatch) -> Race:
    return Race(place, Agents(), monkeypatch)


async def test_a_run_that_is_claimed_meanwhile_is_reported(race: Race) -> None:
    claims: list[Any] = []

    async def claim(runner: AgentRunner) -> None:
        claims.extend(await runner.queue.claim("w", 60, agent_keys=["nobody"], limit=2))

    async with race.place.runner(OLD) as runner:
        await runner.submit("nobody", {"text": CANARY}, run_id="mine")
    async with race.place.runner(BOTH) as runner:
        Interfering(runner, "queue.rewrite", lambda: claim(runner), race.patch)
        done = await reencrypt(runner)
        assert done.skipped == ["mine"]
        assert done.keys["old"] == 1
        [run] = claims
        await runner.queue.release(run.run_id, "w", True, {"text": CANARY}, claim_id=run.claim_id)
        assert (await reencrypt(runner)).keys["old"] == 0
        row = await runner.queue.require(run.run_id)
        assert (row.status, CANARY in row.input, CANARY in (row.output or "")) == ("succeeded", True, True)


@pytest.mark.parametrize(
    "name", ["queue.rewrite", "queue.rewrite_mail", "journal.rewrite", "state.rewrite", "events.rewrite"]
)
async def test_a_deleted_run_stays_deleted(race: Race, name: str) -> None:
    async def delete(runner: AgentRunner) -> None:
        await runner.cancel("parked")
        await runner.vacuum({"cancelled": 0, "succeeded": 0, "failed": 0})

    await race.run(name, delete)
    async with race.place.runner(NEW) as runner:
        assert [run.run_key for run in await runner.runs()] == ["pending"]
    left = race.place.stored()
    async with race.place.runner(NEW) as runner:
        await runner.cancel("pending")
        await runner.vacuum({"cancelled": 0})
    assert "my.event" not in left
    assert "arc1.old." not in left


@pytest.mark.parametrize("name", ["queue.rewrite", "queue.rewrite_mail", "journal.rewrite"])
async def test_a_signal_that_arrives_meanwhile_is_kept(race: Race, name: str) -> None:
    async def signal(runner: AgentRunner) -> None:
        assert await runner.signal("parked", "answer", {"text": CANARY})

    await race.run(name, signal)
    async with race.place.runner(NEW, *race.agents.scripts) as runner:
        await runner.run_once()
        parked = await runner.wait("parked", timeout=5)
        assert parked.final_output["value"]["answer"] == {"text": CANARY}
        assert "arc1.old." not in race.place.stored()


async def test_a_checkpoint_that_is_written_meanwhile_is_kept(race: Race) -> None:
    async def write(runner: AgentRunner) -> None:
        await runner.state_store.save_checkpoint((await runner.get_run("parked")).run_id, {"at": "later"})

    await race.run("state.rewrite", write)
    async with race.place.runner(NEW) as runner:
        parked = (await runner.get_run("parked")).run_id
        assert await runner.state_store.get_checkpoint(parked) == {"at": "later"}


async def test_records_and_events_that_are_written_meanwhile_are_kept(race: Race) -> None:
    async def work(runner: AgentRunner) -> None:
        await runner.signal("parked", "answer", {"text": CANARY})
        while await runner.run_once():
            pass
        await runner.event_bus.publish((await runner.get_run("paid")).run_id, "late", {"text": CANARY})

    done = await race.run("journal.rewrite", work)
    assert done.skipped in ([], ["parked"]), "that run was executed meanwhile"
    async with race.place.runner(BOTH) as runner:
        assert (await reencrypt(runner)).skipped == []
    async with race.place.runner(NEW) as runner:
        assert (await runner.wait("parked", timeout=5)).final_output["value"]["answer"] == {"text": CANARY}
        for run_id in ("parked", "paid"):
            events = await runner.event_bus.get_events((await runner.get_run(run_id)).run_id)
            assert [event.sequence for event in events] == [*range(len(events))]
            assert CANARY in str([event.payload for event in events])
        assert [event.event_type for event in events][-1] == "late"
    assert "arc1.old." not in race.place.stored()


async def test_a_document_that_is_changed_meanwhile_is_kept(race: Race) -> None:
    async def write(runner: AgentRunner) -> None:
        await runner.persistence.memory.set("name", "later")

    await race.run("documents.rewrite", write)
    async with race.place.runner(NEW) as runner:
        assert await runner.persistence.memory.get("name") == "later"


async def test_a_call_that_fails_in_the_middle_is_continued(race: Race) -> None:
    class Interrupted(Exception):
        pass

    async def fail(runner: AgentRunner) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        await race.run("events.rewrite", fail)
    stored = race.place.stored()
    assert stored.count("arc1.new.") > 2
    before = stored.count("arc1.old.")
    async with race.place.runner(BOTH, *race.agents.scripts) as runner:
        done = await reencrypt(runner)
        assert 0 < done.texts <= before
        assert done.keys["new"] > done.texts, "what was encrypted before is left"
        assert done.keys["old"] == 0
    async with race.place.runner(NEW, *race.agents.scripts) as runner:
        await check(runner, race.agents)


async def test_two_calls_at_once_do_not_disturb_each_other(place: Place) -> None:
    agents = Agents()
    async with place.runner(OLD, *agents.scripts) as runner:
        await fill(runner)
    async with place.runner(BOTH) as one, place.runner(BOTH) as two:
        both = await asyncio.gather(reencrypt(one, batch=2), reencrypt(two, batch=3))
        total = both[0].keys["new"]
        assert [each.keys for each in both] == [{"old": 0, "new": total}] * 2
        assert both[0].texts + both[1].texts == total, "each text is encrypted once"
    async with place.runner(NEW, *agents.scripts) as runner:
        await check(runner, agents)
