"""`agent-runtime events`: show the events of a run, or follow them until it has finished."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import sys
from argparse import Namespace
from collections.abc import Sequence

from .._core.event_types import EventType
from .._core.validation import did_you_mean
from .._engines.payloads import in_words
from .._views.plain import without_secrets
from ..events.event import Event, shown_type
from .output import human_time, json_line, print_columns, print_json, warn
from .runs import event_fields
from .store import existing_store, require_run


async def events(args: Namespace) -> int:
    async with existing_store(args, reads=True) as runner:
        row = await require_run(runner, args.id, args.tenant)
        since = args.since if args.after is None else args.after + 1
        if not args.follow:
            found = await runner.event_bus.get_events(row.run_id, since)
            shown = [each for each in found if _wanted(args, each)]
            if args.json:
                print_json([event_fields(each) for each in shown])
            for each in () if args.json else shown:
                _print_event(each)
            if args.type and not shown:
                warn(_no_event(args, found))
            return 0
        async with contextlib.aclosing(runner.stream(row.run_id, since)) as stream:
            async for event in stream:
                if not _wanted(args, event):
                    continue
                if args.json:
                    json_line(event_fields(event))
                else:
                    _print_event(event)
                    sys.stdout.flush()
    return 0


def _no_event(args: Namespace, found: Sequence[Event]) -> str:
    known = {each.event_type for each in found} | {each.value for each in EventType}
    asked = " or ".join(map(repr, args.type))
    hints = [hint for each in args.type if "Did" in (hint := did_you_mean(each, known))]
    return " ".join((f"run {args.id!r} has no event of type {asked}.", *hints[:1]))


def _wanted(args: Namespace, event: Event) -> bool:
    return not args.type or any(fnmatch.fnmatchcase(event.event_type, each) for each in args.type)


def _print_event(event: Event) -> None:
    fields = in_words(without_secrets(event_fields(event)))
    payload = json.dumps(fields["payload"], ensure_ascii=False, default=str)
    time = human_time(fields["timestamp"], local=False)
    print_columns((f"{event.sequence}", 5), (time, 32), (shown_type(event), 18), (payload, 0))
