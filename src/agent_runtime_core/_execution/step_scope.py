"""The step that code is running in, as a context variable."""

from __future__ import annotations

import re
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

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

CURRENT_STEP: ContextVar[StepScope | None] = ContextVar("agent_runtime_step", default=None)
