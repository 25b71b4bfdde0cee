"""The result of a run that has finished."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

from .._core.codec.json import decode_dict
from .._execution.result_codec import decode_result, error_in, omitted_history_in
from .._execution.run_control import RunRecorder
from ..errors import StorageCorrupt
from ..interfaces import RunResult
from ..queue.records import RunRow
from ..status import RunStatus
from .backends import Backends


async def result_of(backends: Backends, row: RunRow, recorder: Callable[[RunRow], RunRecorder]) -> RunResult:
    """Return the result of a finished run.

    Args:
        backends: Where the run is stored.
        row: The run.
        recorder: Returns what restores the history that the stored result refers to.
    """
    result = await _stored_result(backends, row, recorder)
    result.run_key = row.run_key
    return result


async def _stored_result(backends: Backends, row: RunRow, recorder: Callable[[RunRow], RunRecorder]) -> RunResult:
    record = await backends.state.ending(row.run_id)
    if record is not None and record.attempt == row.generation and record.result is not None:
        if omitted_history_in(record.result) is not None:
            return await recorder(row).restore(record.result)
        return decode_result(record.result)
    succeeded = row.status == "succeeded" and row.output is None
    had_journal = row.mark >= 0 and backends.together
    if succeeded and (had_journal or await backends.state.records(row.run_id)):
        await backends.queue.require(row.run_id)  # it may have just been deleted
        raise StorageCorrupt(
            f"run {row.run_key or row.run_id!r} has succeeded, but the end of its journal is missing. Restore a backup"
        )
    # Finished by methods of the queue, or before its journal could be written.
    output = row.decoded("output", decode_dict) if row.output else {}
    error = row.decoded("error", error_in) if row.error else None
    return RunResult(output, error=error, status=row.decoded("status", RunStatus), run_id=row.decoded("run_id", UUID))
