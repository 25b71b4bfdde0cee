"""The runs that a worker leaves to other workers, because code of another version wrote their journals."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Final

from .._core.codec.json import encode
from .._core.event_types import EventType
from .._core.log import log
from .._execution.result_codec import error_payload, redacted_error
from .._execution.run_control import Stop
from .._journal.record import Record
from ..errors import text_of
from ..interfaces import AgentRuntime, ErrorInfo
from ..queue.base import RunQueue
from ..queue.records import MailboxMessage, RunRow
from .claim import HeldClaim
from .finding import code_version_of
from .outcomes import stored_details
from .processes import ListedProcess, processes
from .settings import RunnerConfig

REASON: Final = Stop.OTHER_CODE.value  # of the row of such a run
_LEFT_BY: Final = (
    "left by "  # begins the fields of the error that name a process, with the time at which it left the run
)
_RECORDED: Final = (
    "recorded"  # the field with the number of finished steps; with another number the fields are outdated
)
_MOST: Final = 4096  # runs, and claims, that a worker remembers
_LONGEST_DELAY: Final = 15.0


class _Classes:
    """The classes of agents, by what they executed. A reloaded class is another class."""

    def __init__(self) -> None:
        self._classes: dict[str, weakref.ref[type]] = {}

    def add(self, key: str, agent: AgentRuntime) -> None:
        self._classes.pop(key, None)
        self._classes[key] = weakref.ref(type(agent))
        if len(self._classes) > _MOST:
            del self._classes[next(iter(self._classes))]

    def has(self, key: str, agent: AgentRuntime) -> bool:
        found = self._classes.get(key)
        return found is not None and found() is type(agent)


class LeftRuns:
    """Decides whether a worker leaves a run, and keeps it from executing that run again.

    The row of the run names the processes that left it, so the last of them knows that it is the last.

    Args:
        queue: The queue of the worker.
        config: Settings of its runner.
        process: The row of its process.
    """

    def __init__(self, queue: RunQueue, config: RunnerConfig, process: ListedProcess) -> None:
        self._queue, self._config, self._process = queue, config, process
        self._left, self._executed = _Classes(), _Classes()  # by run; by claim
        self._offered: set[str] = set()  # runs that were released without a delay, the last time

    def executed(self, claim_id: str, agent: AgentRuntime) -> None:
        """Note that this process executed the agent under a claim that did not finish its run."""
        self._executed.add(claim_id, agent)

    def is_of_other_code(self, agent: AgentRuntime, claim_id: str) -> bool:
        """Return whether a record of this claim was not written by this class in this process.

        Code that does not fit its own record is not deterministic, and would not fit anywhere.
        """
        return not self._executed.has(claim_id, agent)

    async def leave(self, claim: HeldClaim, agent: AgentRuntime, why: Exception, *, pinned: bool = False) -> bool:
        """Release a run whose journal does not fit the code here.

        Args:
            claim: The claim on the run, under which nothing was executed.
            agent: The agent.
            why: The mismatch.
            pinned: Only code of another version may execute the run, however long that takes.

        Returns:
            False if no other worker may execute the run, or if that took too long.
        """
        row, now = claim.row, self._queue.clock.wall()
        left = _left(row)
        if not (pinned or await self._is_wanted(row, left, now)):
            return False
        error = ErrorInfo(type(why).__name__, text_of(why), retriable=True)
        if (redaction := claim.writer.redaction) is not None:
            error = redacted_error(redaction, error)
        times = {**left, self._process.process_id: now}
        error.details = {_RECORDED: row.min_step_count, **{f"{_LEFT_BY}{each}": at for each, at in times.items()}}
        if not left:
            log.warning("%s is left to a worker whose code fits its journal: %s", claim.label, why)
            payload = encode({"reason": REASON, "worker": self._config.worker_id})
            await claim.writer.emit([(f"left:{row.claim_id}", EventType.RUN_LEFT.value, payload, now)])
        self._left.add(row.run_id, agent)
        due_at = self._due_at(row, times, now)
        update = claim.unchanged_release()._replace(error=encode(error_payload(error)), reason=REASON, due_at=due_at)
        await claim.release_with(update)
        return True

    async def leave_again(self, claim: HeldClaim, agent: AgentRuntime) -> bool:
        """Release a run that this worker left before; return False if the run is to be executed here."""
        row, now = claim.row, self._queue.clock.wall()
        if row.reason != REASON or not self._left.has(row.run_id, agent):
            return False
        left = _left(row)
        if self._process.process_id not in left or not await self._is_wanted(row, left, now):
            return False
        await claim.release_unstarted(due_at=self._due_at(row, left, now))
        return True

    def _due_at(self, row: RunRow, left: dict[str, float], now: float) -> float:
        """Return when the run may be claimed again: in turns immediately and after a delay.

        While it is ready, the others hear of it and are as fast as this worker. The end of a delay is seen first by the
        worker whose clock is ahead, which may be this worker each time.
        """
        offered = row.run_id in self._offered
        self._offered ^= {row.run_id}
        if len(self._offered) > _MOST:
            self._offered.clear()
        return now + _delay(left, now) if offered else 0.0

    async def _is_wanted(self, row: RunRow, left: dict[str, float], now: float) -> bool:
        """Return whether another worker may still execute the run, which these processes have left.

        Without any living worker, as between two deploys, that is so: the next worker may have code that fits. A worker
        that did not leave in order was killed or does not reach the store, and may come back with the same code.
        """
        limit = self._config.other_code_timeout_seconds
        if now - min(left.values(), default=now) >= limit:
            return False
        found = [each for each in await processes(self._queue) if each.claims(row.agent)]
        others = [each for each in found if each.process_id not in (self._process.process_id, *left)]
        if any(each.living or now - each.last_seen_at.timestamp() < limit for each in others):
            return True
        return not any(each.living for each in found)


def version_mismatch(agent: AgentRuntime, records: Iterable[Record], mail: Iterable[MailboxMessage]) -> str | None:
    """Return why this code must not continue a run; None if it may.

    Args:
        agent: The code.
        records: The journal of the run. The first attempt of the run itself names the version that began it.
        mail: The messages of the run. The last of `resume` names another version.
    """
    version = code_version_of(records, mail)
    own = getattr(agent, "code_version", None)
    if version is None or version == own or version in getattr(agent, "accepts_code_versions", ()):
        return None
    return (
        f"code_version of agent {agent.key!r} must be {version!r}, which began the run, got {own!r}. "
        f"Add {version!r} to accepts_code_versions, or end the run and call runner.resume(run_id, code_version={own!r})"
    )


def _left(row: RunRow) -> dict[str, float]:
    """Return when which processes left the run since its last recorded step."""
    details = stored_details(row) if row.reason == REASON else {}
    if details.get(_RECORDED) != row.min_step_count:
        return {}
    return {name.removeprefix(_LEFT_BY): at for name, at in details.items() if name.startswith(_LEFT_BY)}


def _delay(left: dict[str, float], now: float) -> float:
    """Return the seconds until the run is claimed again: during a long deploy, each claim by old code is in vain."""
    return min(1.0 + (now - min(left.values())) / 4, _LONGEST_DELAY)
