"""What a run did before a codec was set, or under another key, is not done again by another run of its lineage."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core._engines.payloads import Payloads, same_digest
from agent_runtime_core.encryption import AESGCMCodec, PayloadCodec
from agent_runtime_core.errors import IdempotencyConflict
from agent_runtime_core.runner import AgentRunner, reencrypt
from agent_runtime_core.steps import StepExecutor
from tests.support.effects import WAYS, Paid, Way, by_step
from tests.support.reencryption import BOTH, DIGEST_KEY, KEYS, MOSTLY_SQLITE, NEW, OLD, ON_EVERY_ENGINE, Place, place_of
from tests.support.runs import Body, Script


class Prefixed:
    """A codec with one digest function and no names of keys, as an application may write it."""

    def encode(self, text: str, *, context: str) -> str:
        return f"enc:{text[::-1]}"

    def decode(self, text: str, *, context: str) -> str:
        return text[4:][::-1] if text.startswith("enc:") else text

    def digest(self, text: str) -> str:
        return hashlib.sha256(f"secret {text}".encode()).hexdigest()


class WithoutDigests:
    """A codec with no more than it must have."""

    encode = Prefixed.encode
    decode = Prefixed.decode


class Switch(NamedTuple):
    """The codec under which an effect was stored, the one that `reencrypt` gets, and the one of the next run."""

    before: PayloadCodec | None
    between: PayloadCodec | None
    after: PayloadCodec | None
    needs_reencrypt: bool = False


DERIVED = AESGCMCodec({"old": KEYS["old"]}, "old")
FIRST = AESGCMCodec({"new": KEYS["new"], "old": KEYS["old"]}, "new")
READS = AESGCMCodec({"old": KEYS["old"]}, None)
SWITCHES = {
    "codec set": Switch(None, OLD, OLD),
    "codec set, digests derived": Switch(None, DERIVED, DERIVED),
    "custom codec set": Switch(None, Prefixed(), Prefixed()),
    "custom codec without digests set": Switch(None, WithoutDigests(), WithoutDigests()),
    "key added": Switch(OLD, BOTH, BOTH),
    "key added, digests derived": Switch(DERIVED, AESGCMCodec(KEYS, "new"), AESGCMCodec(KEYS, "new")),
    "key added as the first": Switch(DERIVED, FIRST, FIRST),
    "key of digests passed later": Switch(DERIVED, BOTH, BOTH),
    "key removed": Switch(OLD, BOTH, NEW, needs_reencrypt=True),
    "key removed, digests derived": Switch(
        DERIVED, AESGCMCodec(KEYS, "new"), AESGCMCodec({"new": KEYS["new"]}, "new"), needs_reencrypt=True
    ),
    "two switches": Switch(None, BOTH, NEW, needs_reencrypt=True),
    "key only read": Switch(None, READS, READS),
    "key read, then used": Switch(READS, DERIVED, DERIVED),
    "key read where others use it": Switch(DERIVED, READS, READS),
}


@pytest.fixture(params=MOSTLY_SQLITE)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return place_of(request.param, request, tmp_path)


async def worked(runner: AgentRunner, run_id: Any) -> str | None:
    """Return the type of the error of a run, after all runs were executed."""
    while await runner.run_once():
        pass
    error = (await runner.wait(run_id, timeout=5)).error
    return None if error is None else f"{error.type} {error.message}"


def calling() -> Body:
    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        return (await ctx.call("payer", {"n": 1})).final_output["value"]

    return body


def later(body: Body, ready: list[bool]) -> Body:
    """Return the body of a run that fails before its guarded step until it is ready; forks are ready."""

    async def failing(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        if ctx.run_key == "r" and not ready:
            raise ConnectionError("not yet")
        return await body(ctx)

    return failing


class Trial:
    """A payment under one codec, and other runs of its lineage under another one."""

    def __init__(self, place: Place, way: Way, lineage: str) -> None:
        self.place, self.lineage = place, lineage
        self.paid = Paid()
        self.ready: list[bool] = []
        body = way(self.paid)
        self.scripts = [Script(body, "payer"), Script(calling() if lineage == "child" else body)]
        if lineage == "resume":
            self.scripts[1] = Script(later(body, self.ready))

    async def pay(self, codec: PayloadCodec | None) -> None:
        async with self.place.runner(codec, *self.scripts) as runner:
            await runner.submit("script", {}, run_id="r")
            await worked(runner, "r")
            if self.lineage == "resume":
                assert await worked(runner, await runner.fork("r", "first")) is None
        assert len(self.paid.by) == 1

    async def check(self, codec: PayloadCodec | None) -> None:
        """Have another run of the lineage reach the step."""
        async with self.place.runner(codec, *self.scripts) as runner:
            if self.lineage == "resume":
                self.ready.append(True)
                await runner.resume("r")
                error = await worked(runner, "r")
            else:
                error = await worked(runner, await runner.fork("r", "first"))
            assert error is not None
            assert "EffectAlreadyDone" in error
            assert len(self.paid.by) == 1

    async def reencrypt(self, codec: PayloadCodec | None, patch: pytest.MonkeyPatch | None = None) -> bool:
        """Encrypt all contents again, or interrupt it after its first commit that writes; return whether it is done."""
        async with self.place.runner(codec, *self.scripts) as runner:
            if patch is None:
                await reencrypt(runner)
                return True
            with patch.context() as context:
                Interrupted(runner, context)
                try:
                    await reencrypt(runner)
                except InterruptedError:
                    return False
            return True


class Interrupted:
    """An engine whose process is killed after a commit that changed something."""

    def __init__(self, runner: AgentRunner, patch: pytest.MonkeyPatch) -> None:
        committer: Any = runner.queue.commits
        self._engine = committer._target
        patch.setattr(committer, "_target", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def commit(self, guard: Guard | None, ops: Sequence[Op]) -> list[Any]:
        results: list[Any] = await self._engine.commit(guard, ops)
        [name, args] = ops[0]
        if name.endswith("rewrite") and (name != "queue.rewrite" or args[1] != args[2]):
            raise InterruptedError
        return results


@pytest.mark.parametrize(
    "lineage", ["fork", *(pytest.param(each, marks=pytest.mark.slow) for each in ("resume", "child"))]
)
@pytest.mark.parametrize("reencrypted", ["not", "done"])
@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
async def test_no_switch_makes_an_effect_invisible(
    switch: Switch, reencrypted: str, lineage: str, place: Place
) -> None:
    ways: dict[str, Way] = {name: WAYS[name] for name in ("fail", "key", "list", "tool", "map")}
    if switch.needs_reencrypt and reencrypted == "not":
        pytest.skip("no contents can be read")
    for number, way in enumerate(ways.values()):
        if place.kind != "memory" and number % 2 == ("key" in repr(switch)):
            continue  # the others are tried in memory
        trial = Trial(place, way, lineage)
        await trial.pay(switch.before)
        if reencrypted == "done":
            await trial.reencrypt(switch.between)
        await trial.check(switch.after)
        async with place.runner(switch.after) as runner:
            for run in await runner.runs(limit=100):
                await runner.discard(run.run_id)
        assert place.effects() == 0


@pytest.mark.parametrize("lineage", ["fork", "child"])
@pytest.mark.parametrize("name", ["codec set", "key added as the first", "key removed, digests derived"])
async def test_an_interrupted_reencryption_makes_no_effect_invisible(
    name: str, lineage: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    switch, times = SWITCHES[name], 0
    trial = Trial(place, by_step, lineage)
    await trial.pay(switch.before)
    while not await trial.reencrypt(switch.between, monkeypatch):
        await trial.check(switch.between)
        times += 1
        assert times < 200
    assert times > 1
    await trial.check(switch.after)


@ON_EVERY_ENGINE
async def test_of_two_runs_at_once_before_and_after_the_switch_one_does_it(place: Place) -> None:
    for switch in (each for each in SWITCHES.values() if not each.needs_reencrypt):
        for first in (0, 1):
            await _reach_at_once(place, switch, first)


async def _reach_at_once(place: Place, switch: Switch, first: int) -> None:
    paid, reached, may_go = Paid(), list[str](), [asyncio.Event(), asyncio.Event()]

    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        if ctx.run_key == "r":
            return None
        reached.append(ctx.run_key)
        await ctx.step(f"wait {ctx.run_key}", may_go[int(ctx.run_key)].wait)
        return await ctx.step("pay", paid.pay, ctx.input["of"], on_in_doubt="fail")

    async with place.runner(switch.before, Script(body)) as before, place.runner(switch.after, Script(body)) as after:
        await before.submit("script", {"of": "r"}, run_id="r")
        await worked(before, "r")
        runners = [before, after]
        tasks = []
        for number, runner in enumerate(runners):  # each executes the fork that it finds
            await before.fork("r", "first", new_run_id=str(number))
            tasks.append(asyncio.ensure_future(runner.run_once()))
            async with asyncio.timeout(10):
                while len(reached) <= number:  # noqa: ASYNC110 - nothing notifies
                    await asyncio.sleep(0.001)
        may_go[first].set()
        await tasks[first]
        may_go[1 - first].set()
        await tasks[1 - first]
        errors = [await worked(runner, str(number)) for number, runner in enumerate(runners)]
        assert errors[first] is None
        assert "EffectAlreadyDone" in str(errors[1 - first])
        assert len(paid.by) == 1
        for run in ("r", "0", "1"):
            await before.discard(run)


@pytest.mark.parametrize("name", ["codec set", "key added as the first"])
async def test_a_result_from_before_the_switch_is_reused(name: str, place: Place) -> None:
    switch = SWITCHES[name]
    trial = Trial(place, by_step, "fork")
    await trial.pay(switch.before)
    async with place.runner(switch.after, *trial.scripts) as runner:
        fork = await runner.fork("r", "first", effects="reuse")
        assert await worked(runner, fork) is None
        assert (await runner.wait(fork)).final_output["value"] == {"paid": 1, "number": 1}
    assert len(trial.paid.by) == 1


async def test_a_result_is_not_reused_for_arguments_that_cannot_be_compared(place: Place) -> None:
    switch = SWITCHES["key removed, digests derived"]
    trial = Trial(place, by_step, "fork")
    await trial.pay(switch.before)
    await trial.reencrypt(switch.between)
    async with place.runner(switch.after, *trial.scripts) as runner:
        error = await worked(runner, await runner.fork("r", "first", effects="reuse"))
        assert "EffectAlreadyDone" in str(error)
        assert await worked(runner, await runner.fork("r", "first", effects="repeat")) is None
    assert len(trial.paid.by) == 2


@ON_EVERY_ENGINE
async def test_other_arguments_stay_another_effect(place: Place) -> None:
    """Only digests of an unknown key count as equal to all others."""
    paid = Paid()

    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        return await ctx.step("pay", paid.pay, "r", ctx.input["amount"], on_in_doubt="fail")

    for name in ("codec set", "key added as the first", "key of digests passed later"):
        switch = SWITCHES[name]
        paid.by.clear()
        async with place.runner(switch.before, Script(body)) as runner:
            await runner.submit("script", {"amount": 1}, run_id=name)
            assert await worked(runner, name) is None
        async with place.runner(switch.after, Script(body)) as runner:
            assert await worked(runner, await runner.fork(name, "first", input={"amount": 2})) is None
            error = await worked(runner, await runner.fork(name, "first", input={"amount": 1}))
            assert "EffectAlreadyDone" in str(error)
        assert len(paid.by) == 2


@ON_EVERY_ENGINE
async def test_a_step_that_fails_after_the_switch_leaves_no_row(place: Place) -> None:
    """Its start was stored under another digest than its end."""
    paid, fails = Paid(), [True]

    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)

        async def pay() -> Any:
            if fails:
                raise ConnectionError("no route")
            return await paid.pay("r")

        return await ctx.step("pay", pay, on_in_doubt=lambda: None)

    async def hanging(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        await ctx.step("pay", asyncio.Event().wait, on_in_doubt=lambda: None)

    for name in ("codec set", "key added as the first"):
        switch, run_id = SWITCHES[name], name
        async with place.runner(switch.before, Script(hanging)) as runner:
            task = asyncio.ensure_future(runner.execute("script", run_id))
            async with asyncio.timeout(10):
                while place.effects() == 0:  # noqa: ASYNC110 - nothing notifies
                    await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait({task})
        async with place.runner(switch.after, Script(body)) as runner:
            assert (await runner.execute("script", run_id)).error is not None
            assert place.effects() == 0
            fails.clear()
            assert await worked(runner, await runner.fork(run_id, "first")) is None
            fails.append(True)
            for run in await runner.runs():
                await runner.discard(run.run_id)


@pytest.mark.parametrize("name", [name for name, each in SWITCHES.items() if not each.needs_reencrypt])
async def test_an_approval_from_before_the_switch_is_named(name: str, place: Place) -> None:
    switch = SWITCHES[name]

    async def body(ctx: Any) -> Any:
        await ctx.step("first", lambda: 1)
        return await ctx.approve("pay", {"amount": 5})

    async with place.runner(switch.before, Script(body)) as runner:
        await runner.submit("script", {}, run_id="r")
        await runner.run_once()
        await runner.approve("r", "pay", True)
        assert await worked(runner, "r") is None
        source = (await runner.get_run("r")).run_id
    async with place.runner(switch.after, Script(body)) as runner:
        fork = await runner.fork("r", "first")
        await runner.run_once()
        [asked] = [each for each in await runner.event_bus.get_events(fork) if each.event_type == "approval.requested"]
        assert asked.payload["approved_before"] == str(source)


# -- other digests


@pytest.mark.parametrize("name", SWITCHES)
async def test_a_submission_is_recognized_after_the_switch(name: str, place: Place) -> None:
    """A digest that differs is followed by a comparison of the inputs."""
    switch, asked = SWITCHES[name], {"n": 1, "of": {"b": 1, "a": 2}}
    async with place.runner(switch.before) as runner:
        one = await runner.submit("nobody", asked, run_id="one")
        keyed = await runner.submit("nobody", asked, idempotency_key="once")
    if switch.needs_reencrypt:
        async with place.runner(switch.between) as runner:
            await reencrypt(runner)
    async with place.runner(switch.after) as runner:
        assert await runner.submit("nobody", asked, run_id="one") == one
        assert await runner.submit("nobody", {**asked, "of": {"a": 2, "b": 1}}, idempotency_key="once") == keyed
        with pytest.raises(IdempotencyConflict):
            await runner.submit("nobody", {"n": 2}, run_id="one")
        with pytest.raises(IdempotencyConflict):
            await runner.submit("nobody", {"n": 2}, idempotency_key="once")


async def test_arguments_of_saved_steps_are_compared_after_the_switch(place: Place) -> None:
    """Their digests are contents of the journal, and are encrypted as such."""
    for name in ("codec set", "key added as the first", "key of digests passed later"):
        switch, calls = SWITCHES[name], list[Any]()

        async def body(ctx: Any, calls: list[Any] = calls) -> Any:
            how: dict[str, Any] = {"on_changed_input": "raise"}
            await ctx.step("one", calls.append, ctx.input["n"], **how)
            await StepExecutor(ctx).map("items", calls.append, [1, 2], key=str)
            await ctx.wait_for_signal("go")
            return await ctx.step("one", calls.append, ctx.input["n"], **how)

        async with place.runner(switch.before, Script(body)) as runner:
            await runner.submit("script", {"n": 1}, run_id=name)
            await runner.run_once()
            await runner.signal(name, "go")
        async with place.runner(switch.after, Script(body)) as runner:
            assert await worked(runner, name) is None
            assert calls == [1, 1, 2, 1]
            assert "JournalMismatch" in str(await worked(runner, await runner.fork(name, "one", input={"n": 2})))


# -- the rule


class Derived:
    """Digests of a codec whose keys are these, the first one for new digests."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys

    encode = Prefixed.encode
    decode = Prefixed.decode

    def digest(self, text: str) -> str:
        return self.digests(text)[0]

    def digests(self, text: str) -> list[str]:
        return [hashlib.sha256(f"{key} {text}".encode()).hexdigest() for key in self.keys]


def _forms(codec: Any) -> Callable[[str], tuple[str, ...]]:
    return (lambda digest: (digest,)) if codec is None else Payloads(codec).digests


@pytest.mark.parametrize("writes", [None, WithoutDigests(), Prefixed(), Derived("a"), Derived("a", "b"), OLD, DERIVED])
@pytest.mark.parametrize("reads", [None, WithoutDigests(), Prefixed(), Derived("a"), Derived("b", "a"), BOTH, NEW])
def test_a_digest_is_the_same_plain_or_under_a_known_or_an_unknown_key(writes: Any, reads: Any) -> None:
    write, read = _forms(writes), _forms(reads)
    for digest in ("d1", "d2", ""):
        assert same_digest(write(digest)[0], read(digest))
    marks = {each.rpartition(".")[0] for each in read("x")}
    stored = write("d1")[0]
    known = stored.rpartition(".")[0] in marks
    assert same_digest(stored, read("d2")) is not known
    assert same_digest(stored, read("")) is not known
    assert not same_digest("", read("d1"))
    assert not same_digest("d1", read("d2"))


def test_the_codec_names_the_digests_under_all_its_keys() -> None:
    both = AESGCMCodec(KEYS, "new", digest_key=DIGEST_KEY)
    assert both.digests("x")[0] == both.digest("x")
    assert both.digests("x")[1:] == [AESGCMCodec({"k": key}, "k").digest("x") for key in KEYS.values()]
    assert len(DERIVED.digests("x")) == 1
