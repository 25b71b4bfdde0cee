"""The scope of a step: what the code inside it shares with the journal."""

from __future__ import annotations

import re
import sys
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, cast

from .._core import log
from .._core.codec.json import digest
from .._core.ids import step_id

Identity = tuple[str, str]  # (name, key)


@dataclass(slots=True, eq=False, repr=False)
class JournalToken:
    """Identifies one `StepJournal`: compare with `is`.

    A child run may execute inside a step of its parent; the scopes of the two runs differ by their tokens. A scope
    that referred to the journal itself would keep it alive.
    """

    run_id: str


@dataclass(slots=True, eq=False, repr=False)
class StepScope:
    """One attempt of a step, as the code inside it sees it."""

    token: JournalToken
    name: str
    key: str
    attempt: int
    outer: StepScope | None = None
    emitted: int = 0
    counts: dict[tuple[str, str], int] | None = None  # calls of each name inside this step
    charged: dict[str, dict[str, Any]] | None = None  # what `ctx.charge` has counted in this attempt, by model
    digest: str | None = None  # of the arguments
    position: int = 0
    ended: bool = False  # the record of the attempt is made: what code charges now would be in no record
    between_steps: bool = False  # a part of the run's own code that is counted like a step, but is none

    @property
    def step_id(self) -> str:
        return step_id(self.token.run_id, self.name, self.key)

    @property
    def scope_id(self) -> str:
        return scope_id(self.name, self.key)


def scope_id(name: str, key: str) -> str:
    """Return the id of this step that the keys of the steps inside it end with.

    It is unique in the run, and the same in the forks of the run.
    """
    return digest(f"{name}\0{key}")[:16]


#: Matches the id of the enclosing step in the key of a step.
SCOPE_SUFFIX: Final = re.compile("@([0-9a-f]{16})(?::|$)")

#: The scope of the step that code is running in.
CURRENT_STEP: Final = cast("ContextVar[StepScope | None]", log.CURRENT_STEP)


#: The scope in which the calls of an agent's `cancel` hook are counted. Set in the code of the hook.
CANCEL_HOOK: Final[ContextVar[StepScope | None]] = ContextVar("agent_runtime_core_cancel_hook", default=None)


async def run_body(scope: StepScope | None, body: Callable[[], Awaitable[Any]]) -> Any:
    """Run the body of a step in a task that was started for it, so that `in_own_flow` finds the scope."""
    return await body()


#: The functions that await the body of a step. Each of them has the scope in its variable `scope`.
BODIES: Final[set[CodeType]] = {run_body.__code__}


def in_own_flow(scope: StepScope) -> bool:
    """Return whether the calling code runs in the body of this step, and not in a task that the body has started.

    Only code that looks for guarded steps asks this, so the stack is searched. Each step would have to remember its
    task otherwise.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in BODIES:
            return frame.f_locals["scope"] is scope
        frame = frame.f_back
    return False


class FrameworkTask(NamedTuple):
    """A task of a framework that saves its own progress, and resumes a run in the middle of the run's code.

    The calls inside the task are counted separately, because a resumed run does not repeat the tasks before it.

    Attributes:
        key: Identifies the task among those of the run. It is the same after a resume.
        attempt: An object that differs in each attempt of the task.
        place: Where the task is in the code. It is the same in the forks of the run, and tasks may share it.
    """

    key: str
    attempt: object
    place: str


#: Functions of integrations. Each returns the task that the calling code is in, or None. Their arguments are the id of
#: the run, and the step of the run that the calling code is in.
FRAMEWORK_TASKS: Final[list[Callable[[str, StepScope | None], FrameworkTask | None]]] = []
