"""Step lists in a context without a journal: its checkpoint has the state of the executor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from .._core.codec.json import decode
from .._core.validation import must
from .._execution.checkpoint_writer import LIST_KEY, CheckpointWriter
from .._execution.run_writer import StepWriter
from .._execution.step_journal import StepJournal
from .._execution.step_keys import StepKeys
from .._execution.step_scope import Identity
from ..errors import brief
from .model import ExecutionState, Step


async def open_checkpoint(
    ctx: Any, key: str, poll_interval: float, labels: Mapping[Identity, str], shown: ExecutionState, resume: bool
) -> tuple[StepJournal[StepWriter], ExecutionState]:
    """Open the checkpoint of a context in place of a journal.

    Args:
        ctx: The context.
        key: The key of the executor's state in the checkpoint.
        poll_interval: Seconds between two checks whether the context was cancelled.
        labels: The names under which the results of the list or map are saved.
        shown: The present state of the executor. A new state starts with its `custom_state`.
        resume: Load the saved state. Otherwise the list restarts.

    Returns:
        The journal, and the state for the executor.

    Raises:
        InvalidArgument: The checkpoint has something else under the key.
    """
    writer = CheckpointWriter(ctx, key, poll_interval, labels)
    saved = await _saved_state(ctx, key) if resume else None
    state = ExecutionState() if saved is None else saved
    writer.load(state)
    journal = StepJournal(writer, records := writer.records(), keys=StepKeys(str(getattr(ctx, "run_id", ""))))
    if not resume:
        journal.view.resets["x:"] = -1  # the list adds 1: its steps have LIST_KEY also after a restart
    if saved is not None:
        journal.view.states.begin(LIST_KEY, writer.custom_state)
        if records:
            journal.view.states.set(LIST_KEY, "0", records[-1].seq, writer.custom_state, writer.custom_state)
    custom = cast("dict[str, Any]", decode(writer.custom_state)) if saved is not None else shown.custom_state
    return journal, ExecutionState(state.execution_id, started_at=state.started_at, custom_state=custom)


async def _saved_state(ctx: Any, key: str) -> ExecutionState | None:
    """Return the state that the checkpoint has under the key; None if it has none."""
    saved = (await ctx.get_state() or {}).get(key)
    if saved is None:
        return None
    try:
        return ExecutionState.from_dict(saved)
    except (AttributeError, TypeError, ValueError) as error:
        fix = "Pass another checkpoint_key=, or restart with run(steps, resume=False)"
        raise must(f"the checkpoint's {brief(key)}", "be the state of a StepExecutor", saved, fix) from error


def labels_of(steps: Iterable[Step]) -> dict[Identity, str]:
    """Return the labels of the steps of a list: their names."""
    return {(step.name, LIST_KEY): step.name for step in steps}
