"""The last checkpoint of a run with its position (`mark`), and its status."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

from ..._core.ids import run_uuid
from ..._engines.base import Op
from ...errors import InvalidArgument, UnserialisableResult
from ...status import RunStatus
from .checks import Cases, refused, same
from .state_fixtures import OTHER, RUN, Case, Make, opened

CASES: Cases[Case] = Cases()


@CASES
async def the_last_checkpoint_is_kept(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get_checkpoint(RUN), None, "the checkpoint of an unknown run")
        await store.save_checkpoint(RUN, {"n": 1})
        await store.save_checkpoint(str(RUN), {"n": 2})
        await store.save_checkpoint(OTHER, {})
        same(await store.get_checkpoint(str(RUN)), {"n": 2}, "the checkpoint of a run")
        same(await store.get_checkpoint(OTHER), {}, "the checkpoint of another run")


@CASES
async def the_status_is_kept_beside_the_checkpoint(make: Make) -> None:
    async with opened(make) as store:
        same(await store.get_run_status(RUN), None, "the status of an unknown run")
        await store.update_run_status(RUN, "running")
        same(await store.get_checkpoint(RUN), None, "the checkpoint of a run with only a status")
        await store.save_checkpoint(RUN, {"n": 1})
        same(await store.get_run_status(RUN), "running", "the status after a checkpoint")
        await store.update_run_status(str(RUN), "succeeded")
        same(
            (await store.get_run_status(RUN), await store.get_checkpoint(RUN)),
            ("succeeded", {"n": 1}),
            "the status and the checkpoint",
        )
        same(await store.get_run_status(OTHER), None, "the status of another run")


@CASES
async def a_run_is_found_by_the_callers_own_id(make: Make) -> None:
    async with opened(make) as store:
        run_id = run_uuid("run-123", store.clock)[0]
        await store.save_checkpoint("run-123", {"n": 1})
        await store.update_run_status(str(run_id).upper(), "running")
        same(await store.get_checkpoint(run_id), {"n": 1}, "the checkpoint saved under the caller's own id")
        same(await store.get_run_status("run-123"), "running", "the status by the caller's own id")


@CASES
async def a_status_is_a_text(make: Make) -> None:
    async with opened(make) as store:
        await store.update_run_status(RUN, RunStatus.SUCCEEDED)
        same(await store.get_run_status(RUN), "succeeded", "the status written as a RunStatus")
        for wrong in ("", None, 3):
            with refused(InvalidArgument, f"the status {wrong!r}"):
                await store.update_run_status(RUN, wrong)  # type: ignore[arg-type]
        same(await store.get_run_status(RUN), "succeeded", "the status after that")


@CASES
async def a_mark_is_kept_with_its_checkpoint(make: Make) -> None:
    async with opened(make) as store:
        await store.commits.commit(None, [Op("state.checkpoint", (str(RUN), '{"n":1}', "b:3", 5.0))])
        row = await store.state(str(RUN))
        same((row.checkpoint, row.mark, row.status), ('{"n":1}', "b:3", None), "the state of a run")
        await store.save_checkpoint(RUN, {})
        same((await store.state(str(RUN))).mark, None, "the mark after a checkpoint without one")


@CASES
async def values_come_back_as_they_were(make: Make) -> None:
    value: dict[str, Any] = {
        "tree": {"a": [1, 2.5, True, None, "é\ud800"], "$": "a dollar"},
        "uuid": RUN,
        "when": dt.datetime(2026, 11, 21, 12, 30, 1, 5, tzinfo=dt.UTC),
        "price": Decimal("1.10"),
        "raw": b"\x00\xff",
        "set": {1, 2},
        "pair": (1, "two"),
        "large": "x" * 300_000,
    }
    async with opened(make) as store:
        await store.save_checkpoint(RUN, value)
        found = await store.get_checkpoint(RUN)
        same(found, value, "a checkpoint")
        same([type(each) for each in (found or {}).values()], [type(each) for each in value.values()], "its types")


@CASES
async def a_checkpoint_is_no_alias_of_the_callers(make: Make) -> None:
    async with opened(make) as store:
        mine = {"items": [1]}
        await store.save_checkpoint(RUN, mine)
        mine["items"].append(2)
        first = await store.get_checkpoint(RUN)
        same(first, {"items": [1]}, "the checkpoint after its writer changed its copy")
        assert first is not None
        first["items"].append(3)
        same(await store.get_checkpoint(RUN), {"items": [1]}, "the checkpoint after a reader changed its copy")


@CASES
async def what_cannot_be_stored_is_refused_and_nothing_written(make: Make) -> None:
    async with opened(make) as store:
        await store.save_checkpoint(RUN, {"n": 1})
        with refused(UnserialisableResult, "a checkpoint that is not JSON-serializable"):
            await store.save_checkpoint(RUN, {"x": object()})
        with refused(InvalidArgument, "a checkpoint that is not a dict"):
            await store.save_checkpoint(RUN, [1])  # type: ignore[arg-type]
        for run_id in (None, "", 5):
            with refused(InvalidArgument, f"the checkpoint of run {run_id!r}"):
                await store.get_checkpoint(run_id)  # type: ignore[arg-type]
        same(await store.get_checkpoint(RUN), {"n": 1}, "the checkpoint")
