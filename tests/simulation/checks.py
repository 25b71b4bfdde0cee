"""What must hold at every commit of a simulated world, and when it has come to rest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from agent_runtime_core._core.clock import Duration
from agent_runtime_core._core.ids import step_id
from agent_runtime_core._engines.base import INSTALL, Guard, Op
from agent_runtime_core._engines.commit_request import CommitRequest
from agent_runtime_core._journal.record import DONE, Record, is_copied
from agent_runtime_core.queue.live_claims import DEFERRED_INTERVALS
from agent_runtime_core.queue.records import LIVE, MailboxMessage, RunRow, RunUpdate
from agent_runtime_core.runner.claim import ISOLATION_TIMEOUT

from .loop import HOST

if TYPE_CHECKING:
    from .world import World

POISON = 3
BEGUN = ("journal.append", "journal.transact", "queue.settle")  # what a claim writes once its crashes are counted
NOTED = ("run.started", "run.resumed", "step.started", "step.skipped", "progress.update")
SLACK = 0.6  # seconds of latency, bells and a claim on the way


class Crashed(NamedTuple):
    """A claim whose host died."""

    host: str
    at: float


class Watch:
    """Follows every commit that landed, by itself, and says what contradicts the promises."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.problems: list[str] = []
        self.rows: dict[str, RunRow] = {}  # as last seen in an answer
        self.status: dict[str, str] = {}
        self.generation: dict[str, int] = {}
        self.deleted: set[str] = set()
        self.owner: dict[str, str] = {}  # the claim that holds a run now
        self.installed: dict[str, dict[str, str]] = defaultdict(dict)  # the same on engines beside the queue's
        self.free_at: dict[str, float] = {}  # when the lease of a run is over at the earliest
        self.stolen = 0  # claims of runs that somebody alive was at work on
        self.owner_host: dict[str, str] = {}
        self.journal: dict[str, dict[int, Record]] = defaultdict(dict)
        self.done: dict[str, dict[str, str]] = defaultdict(dict)  # step id -> claim that recorded it
        self.claims: Counter[str] = Counter()
        self.crashes_in_row: Counter[str] = Counter()  # crashes in a row
        self.noted: Counter[str] = Counter()  # those of them whose claim had begun to write
        self.began: set[str] = set()  # claims that had
        self.failures: Counter[str] = Counter()  # injected into steps, by idempotency key
        self.effects: dict[str, list[tuple[str, str, float]]] = defaultdict(list)
        self.attempts: Counter[str] = Counter()  # times an agent's code was entered
        self.inside: dict[str, str] = {}  # the claim whose code is in it
        self.entered: dict[str, float] = {}  # when the code of a claim was entered
        self.drained = 0.0  # seconds for which workers may claim nothing, so that a suspect has its turn
        self.put_off: dict[str, tuple[str, float, float]] = {}  # by which host, when, and until when a run is
        self.cancelled: dict[str, float] = {}
        self.claimed_at: dict[str, float] = {}
        self.mail: dict[str, list[MailboxMessage]] = defaultdict(list)
        self.paid: dict[str, list[str]] = defaultdict(list)  # the runs that made a payment, by its name
        self.again: Counter[str] = Counter()  # how often a check said that a payment may be made again
        self.permits: Counter[str] = Counter()  # how many forks may make a payment though another run did
        self.answered: Counter[str] = Counter()  # approvals that a run was given, by its id
        self.must_ask: set[str] = set()  # forks that may not go by the approvals of other runs

    def wrong(self, problem: str) -> None:
        self.problems.append(f"at {self.world.loop.now:.3f} s: {problem}")
        self.world.trace("WRONG", problem)
        self.world.end()

    def live(self) -> dict[str, str]:
        """The runs that have still to end.

        A child that its parent ran in its own process is the parent's to go on with: one whose parent ended
        otherwise than well, and nobody cancelled, is left for the parent's next generation.
        """
        return {run: status for run, status in self.status.items() if status in LIVE and not self._left(run)}

    def _left(self, run: str) -> bool:
        row = self.rows[run]
        return bool(row.origin) and row.parent_id is not None and self.status[row.parent_id] in ("failed", "timed_out")

    # -- commits

    def landed(self, request: CommitRequest, replayed: bool, place: str) -> None:
        guard, ops, results = request.guard, request.ops, request.result
        assert results is not None
        self.world.trace("replayed" if replayed else "landed", ops)
        if replayed:
            return
        if guard is not None:
            self._guarded(guard, ops, self.owner if place == self.world.layout[0] else self.installed[place])
        # Beside the queue, the status and missing events may land where the count of crashes does not.
        if guard is not None and any(op.name in BEGUN for op in ops):
            self.began.add(guard.token)
        for op, result in zip(ops, results, strict=True):
            if op.name == INSTALL:
                self._install(place, *op.args)
            else:
                self._op(op, result)

    def _guarded(self, guard: Guard, ops: Sequence[Op], owner: dict[str, str]) -> None:
        if owner.get(guard.key) != guard.token:
            names = ", ".join(op.name for op in ops)
            self.wrong(
                f"{names} of claim {guard.token} on run {guard.key} accepted, the claim now is {owner.get(guard.key)}"
            )

    def _install(self, place: str, run: str, token: str) -> None:
        held = self.installed[place].get(run, "")
        if token < held:
            self.wrong(f"claim {token} of run {run} is carried to {place}, where {held} came before it")
        self.installed[place][run] = token

    def _op(self, op: Op, result: Any) -> None:
        match op.name:
            case "queue.insert":
                self._insert(result)
            case "queue.claim":
                for row in result:
                    self._claim(row)
            case "queue.beat":
                for (run, claim), (held, _) in zip(op.args[0], result, strict=True):
                    if held and self.owner.get(run) == claim:
                        self.free_at[run] = self.world.loop.now + self.world.lease
            case "queue.take":
                if result[0] == "claimed":
                    self._claim(result[1])
            case "queue.settle":
                self._settle(op.args[0], op.args[1], result)
            case "queue.delete":
                self._delete(op.args[0])
            case "queue.end":
                run, expected, status, *_ = op.args
                if self.status[run] not in expected:
                    self.wrong(f"run {run} is {self.status[run]}, and is ended as one that is {expected[0]}")
                self._move(run, status)
            case "queue.post":
                self._post(op.args[0], op.args[1], result)
            case "journal.append":
                self._record(op.args[0], op.args[1], result)
            case "journal.transact":
                run, _, _, _, seal = op.args
                record = seal("?")
                self._record(run, record, record.seq)

    def _insert(self, row: RunRow) -> None:
        if row.run_id not in self.status or row.run_id in self.deleted:
            self.deleted.discard(row.run_id)
            self.status[row.run_id], self.generation[row.run_id] = row.status, row.generation
            self.rows[row.run_id] = row

    def _delete(self, run: str) -> None:
        """A child may be called again under its id, and is another run then."""
        if self.status[run] in LIVE:
            self.wrong(f"run {run} is {self.status[run]}, and is deleted")
        self.deleted.add(run)
        kept: tuple[dict[str, Any], ...] = (self.owner, self.journal, self.done, self.mail, *self.installed.values())
        for each in kept:
            each.pop(run, None)

    def _claim(self, row: RunRow) -> None:
        run, before = row.run_id, self.status.get(row.run_id)
        self._insert(row)
        if before not in (None, *LIVE) and row.generation <= self.generation[run]:
            self.wrong(f"run {run} was {before} and is claimed again in generation {row.generation}")
        if row.generation > self.generation[run]:
            self.generation[run] = row.generation
            self.crashes_in_row[run] = self.noted[run] = 0
            self.cancelled.pop(run, None)
        if before == "running":
            self.crashes_in_row[run] += 1
            self.noted[run] += self.owner.get(run) in self.began
            self._idle(row)
            self._stolen(row)
        elif before in LIVE:
            self._overdue(row)
        if row.crashes_in_row == POISON - 1:
            self.drained = ISOLATION_TIMEOUT
        self.claims[run] += 1
        self.claimed_at[row.claim_id] = self.world.loop.now
        self.free_at[run] = self.world.loop.now + self.world.lease
        self.status[run], self.rows[run] = "running", row
        self.owner[run], self.owner_host[run] = row.claim_id, HOST.get()

    def _idle(self, row: RunRow) -> None:
        """A run whose holder died is picked up within lease + poll by whoever is there.

        A worker whose store was away is there one interval after it has found that it answers; a process that is known
        to have ended is not waited for.
        """
        world, host = self.world, self.owner_host[row.run_id]
        known = world.liveness and world.kind == "sqlite"
        died, there = world.died.get(host), world.workers_since(take_over=not known)
        if died is None or there is None or row.origin:
            return
        held = max(died, self.claimed_at[self.owner[row.run_id]])
        free = held + (0 if known else world.lease)
        # What ran in place is nobody else's until it is cancelled.
        anyones = self.cancelled.get(row.run_id, 0.0) if self.rows[row.run_id].origin else 0.0
        due = max(free, there, anyones) + world.poll + SLACK + world.poll * world.faulty_claims_since(died)
        due += self.drained
        if any(woke > died for _, woke in world.naps.values()):  # who wakes up takes over leases an interval later
            due += DEFERRED_INTERVALS * world.lease / 3
        if world.loop.now > due:
            self.wrong(f"run {row.run_id} lay idle from {died:.3f} to {world.loop.now:.3f} s, due by {due:.3f}")

    def _stolen(self, row: RunRow) -> None:
        """Nobody takes a run whose holder lives, is awake, and has a lease that is not over."""
        world, host = self.world, self.owner_host[row.run_id]
        holder = world.labels[host]
        if host in world.died or host in world.loop.stopped or holder.label != host or not holder.alive:
            return
        self.stolen += 1
        claim = self.owner[row.run_id]
        # Of a host that was stopped, the claim may have come while it asked for more.
        began = self.entered.get(claim, world.loop.now) < world.woke.get(host, world.loop.now)
        if host == HOST.get() and self.inside.get(row.run_id) == claim and began:
            self.wrong(f"run {row.run_id} is taken by {host} from itself, whose code executes it under claim {claim}")
        slept, woke = world.naps.get(host, (0.0, 0.0))
        interval = world.lease / 3
        deferred = woke + interval - world.loop.now if woke - slept > interval else 0.0
        if world.naps.get(HOST.get()) == (slept, woke) and self.free_at[row.run_id] > slept and deferred > 0:
            self.wrong(
                f"run {row.run_id} is taken from {host}, {deferred:.3f} s before the first interval after a "
                "suspend of their machine is over"
            )
        early = self.free_at[row.run_id] - world.loop.now
        if early > SLACK and host not in world.woke:  # what a stopped host had asked for may have come late
            self.wrong(f"run {row.run_id} is taken from {host}, which lives, {early:.3f} s before its lease is over")

    def _overdue(self, row: RunRow) -> None:
        """What a worker has parked or put off is claimed in time, as long as that worker lives and is awake."""
        host, at, due = self.put_off.pop(row.run_id, ("", 0.0, 0.0))
        world = self.world
        holder = world.labels.get(host)
        if holder is None or holder.label != host or not host.startswith("worker") or row.origin or row.concurrency_key:
            return
        if holder.up_since is None or holder.up_since > at or host in world.loop.stopped:
            return
        due = max(due, world.reachable.get(host, 0.0)) + world.poll + SLACK + self.drained
        due += world.poll * world.faulty_claims_since(at)
        if world.loop.now > due:
            self.wrong(f"run {row.run_id} was put off by {host} at {at:.3f} s and is claimed late, due by {due:.3f}")

    def timed_out(self, limit: Duration, began: float) -> None:
        """A wait in memory ends when one of the clocks says so, and soon after; in an outage, soon after that."""
        world, host = self.world, HOST.get()
        clock, now = world.labels[host].clock, world.loop.now
        since = max(began, world.woke.get(host, 0.0))
        ends = []
        if (late := clock.monotonic() - limit.monotonic_end) >= -1e-6:
            ends.append(max(now - late, since))
        if (late := clock.wall() - limit.until) >= -1e-6:
            ends.append(max(now - late, since, world.stepped.get(host, 0.0)))
        if not ends:
            self.wrong(f"a wait on {host} ends early by both clocks")
        elif now > max(min(ends), world.away.get(host, 0.0)) + clock.wall_check + SLACK:
            self.wrong(f"a wait on {host} that was over at {min(ends):.3f} s ends now")

    def _settle(self, run: str, how: RunUpdate, row: RunRow) -> None:
        if how.failures > self.rows[run].failures:
            self.crashes_in_row[run] = self.noted[run] = 0
        self.rows[run] = row
        if how.status == "running":
            if how.renew:  # a claim of its own, of the same holder
                self.owner[run] = row.claim_id
                self.claimed_at[row.claim_id] = self.world.loop.now
            return
        if how.status in LIVE and row.due_at and (host := self.world.labels.get(HOST.get())) is not None:
            at = self.world.loop.now
            self.put_off[run] = host.label, at, at + max(how.due_at - host.clock.wall(), 0.0)
        if how.status == "dead" and self.crashes_in_row[run] < POISON:
            self.wrong(f"run {run} is dead after {self.crashes_in_row[run]} crashes in a row")
        self._move(run, how.status)

    def _move(self, run: str, status: str) -> None:
        if self.status[run] not in LIVE:
            self.wrong(f"run {run} was {self.status[run]} and becomes {status}")
        self.status[run] = status
        self.owner.pop(run, None)
        if status not in LIVE:
            self.world.ended()

    def _post(self, run: str, mail: MailboxMessage, result: tuple[str, int]) -> None:
        if result[1] and all(m.seq != result[1] for m in self.mail[run]):
            self.mail[run].append(mail._replace(seq=result[1]))
            if mail.kind == "cancel":
                self.cancelled.setdefault(run, self.world.loop.now)
            if self.status[run] == "waiting":
                self.status[run] = "pending"

    def _record(self, run: str, record: Record, seq: int) -> None:
        there = self.journal[run].get(seq)
        if there is not None:
            if (there.claim_id, there.kind, there.key) != (record.claim_id, record.kind, record.key):
                self.wrong(
                    f"journal {run}[{seq}] was {there.kind} {there.name} and becomes {record.kind} {record.name}"
                )
            return
        self.journal[run][seq] = record
        if record.kind == DONE and not is_copied(record):
            # One that a claim leaves behind while the next is on its way to the journal is seen by that next one.
            self.crashes_in_row[run] = int(self.owner.get(run) != record.claim_id)
            self.noted[run] = 0
            step = step_id(run, record.name, record.key)
            if step in self.done[run]:
                self.wrong(f"step {record.name} {record.key} of run {run} is recorded twice")
            self.done[run][step] = record.claim_id

    # -- what agents tell

    def pay(self, run: str, name: str) -> None:
        """All runs that pay are of one lineage, or its children: they pay once, but for what they were allowed."""
        self.paid[name].append(run)
        self.world.trace("paid", f"{name} by {run[:4]}")
        if len(self.paid[name]) > 1 + self.again[name] + self.permits[name]:
            self.wrong(
                f"{name} is paid by {self.paid[name]}, "
                f"{self.again[name]} times again by a check and {self.permits[name]} by a policy"
            )
        if run in self.must_ask and not self.answered[run]:
            self.wrong(f"run {run} pays {name} by an approval of another run")

    def enter(self, row: RunRow) -> None:
        run = row.run_id
        self.attempts[run] += 1
        if self.owner.get(run) != row.claim_id:
            return
        if not row.origin and self.noted[run] >= POISON:
            self.wrong(f"run {run} runs code after {self.noted[run]} crashes in a row")
        self.inside[run] = row.claim_id
        self.entered[row.claim_id] = self.world.loop.now
        if not row.origin and row.crashes_in_row == POISON - 1:
            self._alone(row)
        at = self.cancelled.get(run)
        if at is not None and at < self.claimed_at[row.claim_id]:
            self.wrong(f"run {run} was cancelled at {at:.3f} s, and a later claim runs its code")

    def leave(self, row: RunRow) -> None:
        if self.inside.get(row.run_id) == row.claim_id:
            del self.inside[row.run_id]

    def _alone(self, row: RunRow) -> None:
        """Of two runs whose next crash is their last, one may be what ends their process."""
        for run, claim in self.inside.items():
            other = self.rows[run]
            if (
                run not in (row.run_id, row.parent_id)
                and self.owner.get(run) == claim
                and self.owner_host[run] == HOST.get()
                and not other.origin
                and other.crashes_in_row == POISON - 1
            ):
                self.wrong(
                    f"run {row.run_id} runs code beside {run}, after {other.crashes_in_row} crashes in a row of both"
                )

    def begin(self, row: RunRow, name: str, step: str, key: str) -> None:
        run = row.run_id
        if self._writes(run) == row.claim_id and step in self.done[run]:
            self.wrong(f"step {name} of run {run} is recorded and run again by claim {row.claim_id}")
        self.effects[key].append((row.claim_id, HOST.get(), self.world.loop.now))
        self.world.trace("effect", f"{name} {key[-6:]}")
        # One by each claim or attempt, and one more for each failure that was put in.
        allowed = self.attempts[run] + self.failures[key]
        if len(self.effects[key]) > allowed:
            self.wrong(f"effect {name} of run {run} happened {len(self.effects[key])} times, at most {allowed} are due")

    def depends(self, row: RunRow, name: str, needs: Sequence[tuple[str, str]]) -> None:
        """A step begins only when what it depends on has a record."""
        run = row.run_id
        if self._writes(run) != row.claim_id:
            return
        for each, key in needs:
            if step_id(run, each, key) not in self.done[run]:
                self.wrong(f"step {name} of run {run} begins, and {each} that it depends on has no record")

    def _writes(self, run: str) -> str | None:
        """The claim that may write this run's journal."""
        queue, _, state = self.world.layout
        return (self.owner if state == queue else self.installed[state]).get(run)

    # -- at rest

    def check_journal(self, run: str, records: Sequence[Record]) -> None:
        seen = {record.seq: record for record in records}
        ours = self.journal[run]
        if [record.seq for record in records] != sorted(seen):
            self.wrong(f"journal of run {run} is read out of order: {[record.seq for record in records]}")
        if set(seen) != set(ours):
            self.wrong(f"journal of run {run} has {sorted(seen)}, accepted were {sorted(ours)}")
        last = ""
        for record in records:
            if is_copied(record):
                continue
            if record.claim_id and record.claim_id < last:
                self.wrong(f"run {run}: {record.kind} {record.name} of claim {record.claim_id} stands after {last}")
            last = record.claim_id or last

    def check_events(self, run: str, status: str, records: Sequence[Record], events: Sequence[Any], head: int) -> None:
        numbers = [event.sequence for event in events]
        if numbers != list(range(head)):
            self.wrong(f"events of run {run} are numbered {numbers}, the head is {head}")
        due = sum(1 for record in records if record.kind == DONE and record.nev)
        got = sum(1 for event in events if event.event_type == "step.completed")
        if due != got:
            self.wrong(f"run {run} has {due} recorded steps and {got} step.completed events")
        last = "run.failed" if status == "dead" else f"run.{status}"
        kinds = [event.event_type for event in events]
        if len(set(self.world.layout)) > 1:
            # What nobody waited for may come after the end: late, or by the next claim, which misses it.
            while kinds and kinds[-1] in NOTED:
                kinds.pop()
        if kinds[-1:] != [last]:
            kinds = kinds[-3:]
            self.wrong(f"run {run} is {status}, its last events are {kinds}")
