"""Many commits in one call of the script store the same as one call for each commit."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

pytest.importorskip("redis")

import redis

from agent_runtime_core._engines.base import Guard, Op
from agent_runtime_core._engines.redis.engine import RedisEngine
from agent_runtime_core._engines.redis.pipeline import joined
from agent_runtime_core._journal.record import Record
from agent_runtime_core.events.redis import RedisEventBus
from agent_runtime_core.queue.records import ClaimRequest, MailboxMessage, RunRow, RunUpdate
from agent_runtime_core.queue.redis import RedisQueue
from agent_runtime_core.state.redis import RedisStateStore
from agent_runtime_core.testing.clock import VirtualClock
from tests.compatibility.redis_keys import read_keys
from tests.support.redis_servers import RedisServer

pytestmark = pytest.mark.redis

STATUS, CLAIM, N, CREATED_AT = (RunRow._fields.index(name) for name in ("status", "claim_id", "arrival", "created_at"))
AGENTS = ("good", "other", "spoiled")
Commit = tuple[Guard | None, list[Op]]


class Store:
    """The stores of one server, whose engine sends what it is given in one call."""

    def __init__(self, server: RedisServer) -> None:
        self.url = server.url
        self.client: Any = redis.Redis.from_url(server.url)
        self.engine = RedisEngine.open(server.url, clock=VirtualClock())
        for store in (RedisQueue, RedisStateStore, RedisEventBus):
            for operations in store.operation_sets:
                self.engine.add(operations)
        # Another program has stored something else under the key of an index.
        server.ask("SET", "{arc}:state:succeeded:spoiled", "x")

    def send(self, commits: list[Commit]) -> list[str]:
        calls = [self.engine._call(guard, ops) for guard, ops in commits]
        return [answer.decode() for answer in self.engine._connection.evaluate(joined(calls))]

    def keys(self) -> dict[str, Any]:
        return {key: value for key, value in read_keys(self.url).items() if ":warned:" not in key}


class Story:
    """Commits of runs that are submitted, claimed, parked, signaled and ended, each one made from the ones before."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.dice = random.Random(seed)
        self.claimed: dict[str, str] = {}
        self.runs: list[str] = []
        self.at = 1000.0
        self.tickets = 0

    def tell(self, length: int) -> tuple[list[Commit], list[str]]:
        """Return commits and their answers, after sending each one alone."""
        commits: list[Commit] = []
        answers: list[str] = []
        while len(commits) < length:
            self.at += 1
            if (commit := self.dice.choice([self.submit, self.claim, self.settle, self.post])()) is not None:
                commits.append(commit)
                answers += self.store.send([commit])
                self.learn()
        return commits, answers

    def learn(self) -> None:
        """Read which claims the runs have now."""
        stored = self.store.client.mget([f"{{arc}}:run:{run}" for run in self.runs] or ["none"])
        rows = [json.loads(row) for row in stored if row]
        self.claimed = {row[0]: row[CLAIM] for row in rows if row[STATUS] == "running"}

    def submit(self) -> Commit:
        n = len(self.runs) + 1
        self.runs.append(f"00000000-0000-4000-8000-{n:012d}")
        row = RunRow(
            self.runs[-1], self.dice.choice(AGENTS), digest="d", created_at=self.at, updated_at=self.at,
            priority=self.dice.choice([0, 0, 3]), due_at=self.dice.choice([0.0, 0.0, self.at + 5]),
            concurrency_key=self.dice.choice([None, None, "lane"]),
        )  # fmt: skip
        return None, [Op("queue.insert", (row,))]

    def request(self, count: int, *, ready_only: bool) -> ClaimRequest:
        tickets = tuple(f"01M8DYCA0TK8JKNQF1P9{self.tickets + n:06d}" for n in range(count))
        self.tickets += count
        return ClaimRequest(tickets, "worker", "", self.at + 8, self.at, self.at, AGENTS, ready_only)

    def claim(self) -> Commit:
        return None, [Op("queue.claim", (self.request(self.dice.choice([1, 3]), ready_only=self.dice.random() < 0.5),))]

    def settle(self) -> Commit | None:
        if not self.claimed:
            return None
        run, claim = self.dice.choice(sorted(self.claimed.items()))
        status = self.dice.choice(["succeeded", "succeeded", "failed", "pending", "waiting", "running"])
        due = self.at + 3 if status in ("waiting", "pending") else 0.0
        reason = "signal go" if status == "waiting" else ""
        update = RunUpdate(
            self.dice.choice([claim] * 5 + ["1" * 26]),
            status,
            self.at,
            due_at=due,
            reason=reason,
            failures=int(status == "pending"),
        )
        record = Record(int(self.at), "attempt", "x", attempt=1, claim_id=claim, t=self.at)
        ops = [
            Op("journal.append", (run, record)),
            Op("state.status", (run, status, self.at)),
            Op("queue.settle", (run, update)),
            Op("queue.claim", (self.request(1, ready_only=True),)),
        ]
        return Guard(run, self.dice.choice([claim, claim, "0" * 26])), ops

    def post(self) -> Commit | None:
        if not self.runs:
            return None
        mail = MailboxMessage("signal", "go", "{}", f"m{self.at}", self.at)
        return None, [Op("queue.post", (self.dice.choice(self.runs), mail))]


def check_indexes(keys: dict[str, Any]) -> None:
    """Check that each run is in the indexes of its state, and in no others."""
    expected: dict[str, set[str]] = {}
    for key, (_, value) in keys.items():
        if key.startswith("{arc}:run:"):
            run, agent, status, n = (json.loads(value)[cell] for cell in (0, 1, STATUS, N))
            expected.setdefault(f"{{arc}}:status:{status}", set()).add(run)
            expected.setdefault(f"{{arc}}:state:{status}:{agent}", set()).add(f"{n:016d}:{run}")
    stored = {
        key: {member for member, _ in value}
        for key, (kind, value) in keys.items()
        if kind == "zset" and key.startswith(("{arc}:status:", "{arc}:state:"))
    }
    assert stored == expected


@pytest.mark.parametrize("seed", range(3))
def test_a_call_of_many_commits_stores_what_a_call_for_each_stores(seed: int) -> None:
    with RedisServer() as one, RedisServer() as other:
        first, second = Store(one), Store(other)
        story = Story(first, seed)
        found: list[str] = []
        for _ in range(12):
            commits, answers = story.tell(story.dice.randint(1, 40))
            assert second.send(commits) == answers
            keys = first.keys()
            assert second.keys() == keys
            check_indexes(keys)
            found += answers
        for word in ("ERROR WRONGTYPE", "MOVED", "LOST"):
            assert any(answer.startswith(f"!{word}") for answer in found), word


def submitted_pair(store: Store, story: Story) -> tuple[list[str], Op]:
    """Submit and claim two runs of a new agent, and return them and an operation that claims one more."""
    agent = f"agent{len(story.runs)}"
    runs = [f"00000000-0000-4000-8000-{len(story.runs) + n:012d}" for n in (1, 2)]
    story.runs += runs
    request = story.request(1, ready_only=True)._replace(agents=(agent,))
    claims = [
        Op("queue.claim", (request._replace(tickets=(f"01M8DYCA0TK8JKNQF1P9{len(story.runs) + n:06d}",)),))
        for n in range(3)
    ]
    store.send([(None, [Op("queue.insert", (RunRow(run, agent, digest="d", created_at=1.0),))]) for run in runs])
    store.send([(None, claims[:1]), (None, claims[1:2])])
    story.learn()
    return runs, claims[2]


def settled(story: Story, run: str, status: str = "pending") -> Op:
    return Op("queue.settle", (run, RunUpdate(story.claimed[run], status, 1.0)))


def test_a_run_that_two_commits_of_a_call_change_is_in_the_indexes_of_its_last_state() -> None:
    with RedisServer() as server:
        store = Store(server)
        story = Story(store, 0)
        for _ in range(8):  # Lua visits the two rows of the second commit in an order that depends on their ids
            (first, second), claim = submitted_pair(store, story)
            one, two = settled(story, first), settled(story, second)
            answers = store.send([(None, [one]), (None, [two, claim]), (None, [claim])])
            assert not [answer for answer in answers if answer.startswith("!")]
            check_indexes(store.keys())


@pytest.mark.parametrize("damage", ["nan", "x", "", None])
def test_a_damaged_row_fails_its_own_commit_only(damage: str | None) -> None:
    with RedisServer() as server:
        store = Store(server)
        story = Story(store, 0)
        (good, bad), _ = submitted_pair(store, story)
        key = f"{{arc}}:run:{bad}"
        row = json.loads(store.client.get(key))
        row[CREATED_AT] = damage
        store.client.set(key, json.dumps(row))
        commits: list[Commit] = [(None, [settled(story, run, "succeeded")]) for run in (good, bad)]
        answers = store.send([*commits, (None, [Op("fence.install", ("other", "1" * 26))])])
        assert [answer[:6] for answer in answers] == [answers[0][:6], "!ERROR", "[true]"]
        assert not answers[0].startswith("!")
        assert json.loads(store.client.get(key))[STATUS] == "running", "nothing of the failed commit was written"
        store.client.delete(key)
        assert store.client.zrange("{arc}:state:succeeded:agent0", 0, -1) == [f"{1:016d}:{good}".encode()]
        assert store.client.hget("{arc}:fence", "other") == b"1" * 26


def test_a_read_after_a_claim_in_the_same_call_finds_the_runs_that_became_ready() -> None:
    with RedisServer() as server:
        store = Store(server)
        story = Story(store, 0)
        run = "00000000-0000-4000-8000-000000000001"
        store.send([(None, [Op("queue.insert", (RunRow(run, "later", digest="d", due_at=5.0),))])])
        due, claim = Op("queue.next_due", ()), Op("queue.claim", (story.request(1, ready_only=False),))
        before, _, after = (json.loads(answer) for answer in store.send([(None, [op]) for op in (due, claim, due)]))
        assert before != [None]
        assert after == [None]
