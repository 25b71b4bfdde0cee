"""`agent-runtime events`: show the events of a run, or follow them until it has finished."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import sys
from argparse import Namespace

from ..events.event import Event
from .output import human_time, json_line, print_columns, print_json, without_secrets
from .runs import event_fields
from .store import existing_store, require_run


async def events(args: Namespace) -> int:
    async with existing_store(args) as runner:
        row = await require_run(runner, args.id)
        if not args.follow:
            found = await runner.event_bus.get_events(row.run_id, args.since)
            shown = [each for each in found if _wanted(args, each)]
            if args.json:
                print_json([event_fields(each) for each in shown])
            for each in () if args.json else shown:
                _print_event(each)
            return 0
        async with contextlib.aclosing(runner.stream(row.run_id, args.since)) as stream:
            async for event in stream:
                if not _wanted(args, event):
                    continue
                if args.json:
                    json_line(event_fields(event))
                else:
                    _print_event(event)
                    sys.stdout.flush()
    return 0


def _wanted(args: Namespace, event: Event) -> bool:
    return not args.type or any(fnmatch.fnmatchcase(event.event_type, each) for each in args.type)


def _print_event(event: Event) -> None:
    fields = without_secrets(event_fields(event))
    payload = json.dumps(fields["payload"], ensure_ascii=False, default=str)
    time = human_time(fields["timestamp"], local=False)
    print_columns((f"{event.sequence}", 5), (time, 32), (event.event_type, 18), (payload, 0))
