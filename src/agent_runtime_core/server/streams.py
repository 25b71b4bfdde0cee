"""`GET /runs/{id}/events`: the events of a run as server-sent events, or as one page of JSON.

Authorization is checked when a stream starts. A stream that is open continues if its token is revoked later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Final

from fastapi import APIRouter, Request
from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .._core.context_vars import start_soon
from .._core.log import about_run, log
from .._views.events import Chosen, events_page, sequence_of, sse_frames, type_filter, without_stacks
from .._views.queries import BOOLEAN, string
from .._views.read_routes import OF_EVENTS, OF_RESULTS, SEQUENCE, Route
from ..errors import UnknownRun
from ..events.event import Event
from ..queue.records import LIVE, RunRow
from . import open_streams
from .access import Caller
from .documents import Page, answers
from .errors import log_text, problem_of
from .open_streams import OpenStreams, Reader, Replaced, abort, first_of, open_streams_of
from .reads import HttpRequest, asked_of, described
from .security import HEAD, SEND
from .state import ServerState

router: APIRouter = APIRouter(tags=["runs"])

CONFIRM_BYTES: Final = 16_384  # a quarter of the transport's high-water mark

_ANSWERS: Final = answers(404, ok_200=Page, ok_204=None)
_ANSWERS[200]["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
_ANSWERS[200]["description"] = "The events, or with `Accept: application/json` one page of them."
_ANSWERS[204]["description"] = "The run has finished, and has no event after this position."


async def stream_events(asked: HttpRequest) -> Response:
    """Stream the events of a run, or return one page of them."""
    request, state, caller, query = asked.request, asked.state, asked.caller, asked.query
    last = request.headers.get("last-event-id")
    position = sequence_of("Last-Event-ID", last) if last else sequence_of("after", query["after"])
    chosen = type_filter(query["types"])
    row = await asked.row()
    start = 0 if position is None else position + 1
    if not query["follow"] or _wants_json(request):
        body = await events_page(state.runner.event_bus, row.run_id, start, chosen, stacks="read" in caller.scopes)
        return Response(body, media_type="application/json", headers=_HEADERS)
    if position is not None and row.status not in LIVE and start >= await state.runner.event_bus.head(row.run_id):
        return Response(status_code=204, headers=_HEADERS)
    return EventStream(state, open_streams_of(request), row, asked.caller, start, chosen, query["named"])


_ROUTE: Final = Route(
    "runs/{id}/events", stream_events, "Stream the events of a run", parameters={
        **OF_EVENTS, "follow": BOOLEAN._replace(default=True).about("Whether to wait for new events."),
        "named": BOOLEAN.about("Whether each event has an `event:` field."),
    }, scopes=OF_RESULTS,
)  # fmt: skip
_LAST_EVENT_ID: Final = string().about("Takes precedence over `after`.", **SEQUENCE)


async def _endpoint(request: Request) -> Response:
    return await stream_events(await asked_of(request, _ROUTE))


router.add_api_route(
    f"/{_ROUTE.path}", _endpoint, response_model=None, responses=_ANSWERS,
    **described(_ROUTE, {**_LAST_EVENT_ID.documented("last-event-id"), "in": "header"}),
)  # fmt: skip


_HEADERS: Final = {"X-Accel-Buffering": "no"}


def _wants_json(request: Request) -> bool:
    accepted = request.headers.get("accept", "")
    return "application/json" in accepted and "text/event-stream" not in accepted


class EventStream(Response, Reader):
    """The events of a run, as server-sent events.

    A stream needs no queue. It awaits `send`, which waits while the transport is full, before it reads the next page.
    """

    media_type = "text/event-stream"

    def __init__(
        self, state: ServerState, streams: OpenStreams, row: RunRow, caller: Caller, start: int,
        chosen: Chosen | None, named: bool,
    ) -> None:  # fmt: skip
        Reader.__init__(self)
        self.status_code = 200
        self.background: BackgroundTask | None = None
        self.init_headers(_HEADERS)
        self._state = state
        self._open = streams
        self._row = row
        self._caller = caller
        self._position = start - 1  # sequence of the last event that was read
        self._sent = start - 1  # of the last one that was sent; a filter removed those in between
        self._chosen = chosen
        self._unconfirmed = 0  # bytes
        self._frames = partial(sse_frames, named=named)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until the run has finished, the client is gone, or the server shuts down."""
        if HEAD in scope:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body"})
            return
        with self._state.limits.stream(self._caller.name), self._open.opened(self):
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            # The middleware changes only the start of a response, and each delivery would pass all of it.
            self._send = scope[SEND]
            await self._write(open_streams.START)
            delivery = start_soon(self._deliver())
            gone = start_soon(_disconnected(receive))
            try:
                await first_of(delivery, gone, self.stopped)
                blocked = self.sending
                delivery.cancel()
                await asyncio.wait({delivery})
                if not delivery.cancelled():
                    with contextlib.suppress(OSError):  # some servers raise it if the client is gone
                        delivery.result()
                elif self.stopped.done() and blocked:
                    abort(receive)
                    await asyncio.wait({gone}, timeout=1)
                elif self.stopped.done():
                    await self._write(open_streams.bye_frame(), more=False)
            finally:
                delivery.cancel()
                gone.cancel()

    async def comment(self) -> None:
        """Send a comment."""
        if not self.sending:
            await self._write(open_streams.COMMENT)

    async def _write(self, body: bytes, more: bool = True) -> None:
        self._sending += 1
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending -= 1
        self._sends += 1

    async def _deliver(self) -> None:
        """Send all events and the last frame."""
        runner, row = self._state.runner, self._row
        try:
            with self._open.following(runner.queue, row) as run:
                read = partial(runner.event_pages, row.run_id)
                ended = await run.follow(read, self._position + 1, row.generation, self._send_page)
            last = open_streams.end_frame(ended.status)
            if self._position > self._sent:
                last = open_streams.position_frame(self._position) + last
        except Exception as error:  # noqa: BLE001 - the response has started: the client gets a frame
            last = self._error(error)
        await self._write(last, more=False)

    async def _send_page(self, page: Sequence[Event]) -> None:
        self._position = page[-1].sequence
        if self._chosen is not None:
            page = [event for event in page if self._chosen(event)]
            if not page:
                return
        self._sent = page[-1].sequence
        frames = self._frames(page if "read" in self._caller.scopes else without_stacks(page))
        if len(frames) <= open_streams.SLICE:
            await self._write(frames)
        else:
            for part in open_streams.slices(frames):
                await self._write(part)
        self._unconfirmed += len(frames)
        if self._unconfirmed >= CONFIRM_BYTES:
            # A send waits only for what was sent before. The next page is read when the transport has accepted these.
            await self._write(b"")
            self._unconfirmed = 0

    def _error(self, error: Exception) -> bytes:
        if isinstance(error, Replaced):
            return open_streams.error_frame({"status": 410, "title": open_streams.REPLACED}, restart=True)
        problem = problem_of(error)
        if problem.status == 500:
            log.error(
                "event stream of run %s failed: %s",
                self._row.run_id,
                log_text(error),
                extra=about_run(self._row.run_id, tenant=self._row.tenant),
            )
        return open_streams.error_frame(
            {"status": problem.status, "title": problem.title, "detail": problem.detail},
            restart=isinstance(error, UnknownRun),
        )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
