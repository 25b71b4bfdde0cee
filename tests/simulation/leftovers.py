"""What must be true of a simulated world at rest."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from agent_runtime_core._execution.mailbox import message_of
from agent_runtime_core._journal.record import DONE
from agent_runtime_core.events.event import Event
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.queue.records import ABANDONED, CANCELLED_BY_CALLER, LIVE, MESSAGE, RunFilter, RunRow

from .plans import RunPlan
from .script import expected, payload_of, read_effects

if TYPE_CHECKING:
    from .scenarios import Play

#: Ways a run that was not cancelled may fail for: what the scenario itself puts in. An outage fails none.
INJECTED = {"StepExecutionError", "RunFailed"}

#: Reasons of runs that were cancelled by somebody without a claim.
FROM_OUTSIDE = {CANCELLED_BY_CALLER, ABANDONED}

#: Ways a run that pays may fail for besides.
DOUBTED = {"StepInDoubt", "EffectAlreadyDone"}


class Rest:
    """Looks at a world that has come to rest, as one of its clients."""

    def __init__(self, play: Play) -> None:
        self.play, self.world, self.scenario = play, play.world, play.scenario
        self.watch, self.host = play.watch, play.world.hosts["client0"]
        self.runner = self.host.runner
        self.apart = len(set(self.scenario.layout)) > 1

    async def check(self) -> None:
        watch, runner = self.watch, self.runner
        rows = {row.run_id: row for row in await runner.queue.find(RunFilter())}
        forks = [RunPlan(fork.run_id, fork.items) for fork in self.scenario.forks if fork.run_id in self.play.forked]
        by_uuid = {self.play.uuid(run.run_id): run for run in (*self.scenario.runs, *forks)}
        for run_id, uuids in self.play.submitted.items():
            if len(uuids) != 1 or not uuids <= rows.keys() | watch.deleted:
                watch.wrong(f"run {run_id} was accepted as {sorted(uuids)}, there are {sorted(rows)}")
        for run, row in rows.items():
            if run not in by_uuid and row.parent_id not in rows.keys() | watch.deleted:
                watch.wrong(f"run {run} is there, and nobody asked for it")
        if "sqlite" in self.scenario.layout[2]:
            await self._check_effects(rows)
        await self._ask_again(rows)
        for run, row in rows.items():
            if row.status != watch.status.get(run):
                watch.wrong(f"run {run} is stored as {row.status}, last heard was {watch.status.get(run)}")
            records = await runner.state_store.records(run)
            watch.check_journal(run, records)
            self.world.loop.note(f"{row} {records}")
            events = await runner.event_bus.get_events(run)
            if row.status in LIVE:
                continue
            head = await runner.event_bus.head(run)
            watch.check_events(run, row.status, records, events, head)
            effects = [json.dumps(event.payload) for event in events if event.event_type == "step.effect"]
            if len(effects) != len(set(effects)):
                watch.wrong(f"run {run} tells twice what became of a guarded step: {effects}")
            plan = by_uuid.get(run)
            if plan is not None:
                await self._check_result(plan, row, events)

    async def _ask_again(self, rows: dict[str, RunRow]) -> None:
        """Whoever cancelled a run from outside may have died between two engines: who asks once more has all told."""
        if self.apart:
            for run, row in rows.items():
                if row.status == "cancelled" and row.reason in FROM_OUTSIDE:
                    await self.runner.cancel(run)

    async def _check_effects(self, rows: dict[str, Any]) -> None:
        """A transaction's effect is there exactly as often as its record is."""
        there: Counter[tuple[str, str]] = await self.host.engines[self.scenario.layout[2]].read(read_effects)
        due: Counter[tuple[str, str]] = Counter()
        for run in rows:
            for record in await self.runner.state_store.records(run):
                if record.kind == DONE and record.name.startswith("transaction"):
                    due[run, record.name] += 1
        if there != due:
            self.watch.wrong(f"effects are {there}, their records say {due}")

    async def _check_result(self, plan: RunPlan, row: Any, events: list[Event]) -> None:
        watch = self.watch
        result = await self.runner.wait(self.play.uuid(plan.run_id))
        told = self.play.told.get(plan.run_id, result)
        if (told.status, told.final_output) != (result.status, result.final_output):
            watch.wrong(f"run {plan.run_id} is {result}, its caller was told {told}")
        followed = self.play.followed.get(plan.run_id)
        if followed is not None and self.apart and row.reason in FROM_OUTSIDE:
            events = events[: len(followed)]  # who cancels from outside tells the queue first
        if followed is not None and [_told(e) for e in followed] != [_told(e) for e in events]:
            watch.wrong(
                f"a follower of {plan.run_id} saw {len(followed)} events that differ from the {len(events)} kept"
            )
        if row.status in ("succeeded", "failed"):
            await self._check_messages(plan, result)
        match row.status:
            case "succeeded":
                self._check_output(plan, result.final_output["out"])
            case "failed":
                allowed = INJECTED | (DOUBTED if self.scenario.forks else set())
                allowed |= {"JournalMismatch"} if self.scenario.edited else set()
                if result.error is None or result.error.type not in allowed:
                    watch.wrong(f"run {plan.run_id} failed: {result.error}")
            case "cancelled":
                asked = {about[0] for _, what, about in self.scenario.actions if what == "cancel"}
                if plan.run_id not in asked:
                    watch.wrong(f"run {plan.run_id} is cancelled, and nobody asked for it")
            case "dead":
                return
            case _:
                watch.wrong(f"run {plan.run_id} is {row.status}")

    async def _check_messages(self, plan: RunPlan, result: RunResult) -> None:
        """Each accepted message is in the history once, in the order of the mailbox."""
        mail = await self.runner.queue.mail(self.play.uuid(plan.run_id))
        sent = [message_of(each)["content"] for each in mail if each.kind == MESSAGE]
        kept = [each["content"] for each in result.final_messages if each["role"] == "user"]
        missed = [] if not self.apart else sent[len(kept) :]  # on several engines, one may come during the end
        if sorted(sent) != sorted(self.play.accepted[plan.run_id]) or kept + missed != sent:
            self.watch.wrong(f"run {plan.run_id} was sent {sent}, and its history has {kept}")

    def _check_output(self, plan: RunPlan, out: list[Any]) -> None:
        due = expected(plan.items)
        if self.scenario.edited:
            due.sort(key=json.dumps)
            out = sorted(out, key=json.dumps)
        for (kind, name, number), want, got in zip(plan.items, due, out, strict=True):
            if kind == "signal":  # each of them, once
                got, want = sorted(got), [payload_of(plan.run_id, name, i) for i in range(number)]
            elif kind == "hear":
                want = got
            elif kind == "late":
                want = got if got == "late" else payload_of(plan.run_id, name, 0)
            if want != got:
                self.watch.wrong(f"run {plan.run_id} has {got!r} for {kind} {name}, not {want!r}")


def _told(event: Event) -> tuple[int, str, str]:
    return event.sequence, event.event_type, json.dumps(event.payload, sort_keys=True, default=str)
