"""`WS /socket`: turns, and events of many runs, over one WebSocket.

Authorization is checked when a socket is opened, and for each frame by its scope. A socket that is open continues if
its token is revoked later.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from fastapi import APIRouter, WebSocket
from starlette.websockets import WebSocketDisconnect

from .._core.context_vars import start_soon
from .._core.log import log
from .._core.validation import must, unknown
from .._views.events import without_stacks
from .._views.problems import invalid_field
from .._views.read_routes import OF_RESULTS
from .._views.visibility import visible_row
from ..events.event import Event
from ..queue.records import RunRow
from . import open_streams
from .access import OF_SENDING, Caller, check_scope
from .errors import Problem, log_text, problem_of, safe_text
from .open_streams import OpenStreams, Reader, Replaced, abort, first_of, open_streams_of
from .security import check_json
from .state import ServerState, state_of
from .submission import approve, finished, insert_turn

router: APIRouter = APIRouter()

UNAUTHENTICATED: Final = 4401
FORBIDDEN: Final = 4403
STALLED_CODE: Final = 4408
TOO_LARGE: Final = 1009
RESTARTING: Final = 1012
#: Seconds that a stalled reader has to accept its close frame before the connection is dropped.
CLOSE_SECONDS: Final = 5.0
_CODES: Final = {401: UNAUTHENTICATED, 403: FORBIDDEN}
PROTOCOL: Final = "agent-runtime"  # offered with `bearer.TOKEN`, so that no response header has the token
_LONGEST_REF: Final = 200

Frame = Mapping[str, Any]


@router.websocket("/socket")
async def socket(websocket: WebSocket) -> None:
    """Serve one WebSocket."""
    state = state_of(websocket)
    protocols = websocket.scope.get("subprotocols") or []
    caller = await _caller(state, websocket)
    chosen = PROTOCOL if PROTOCOL in protocols else next(iter(protocols), None)
    if isinstance(caller, int):
        with state.limits.rejected_socket():
            await _reject(websocket, caller, chosen)
        return
    streams = open_streams_of(websocket)
    connection = Socket(websocket, state, streams, caller)
    with state.limits.stream(caller.name, socket=True), streams.opened(connection):
        await websocket.accept(subprotocol=chosen)
        open_streams.limit_unsent(websocket._receive)
        await connection.serve()


async def _reject(websocket: WebSocket, code: int, protocol: str | None) -> None:
    """Close a socket that may not be opened. A client that does not answer is disconnected."""
    # A browser shows a close code to its page, but no status of a rejected handshake.
    await websocket.accept(subprotocol=protocol)
    await websocket.close(code)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(CLOSE_SECONDS):
            for _ in range(2):  # uvicorn reports the end at once, and again when the connection is closed
                await websocket._receive()
    abort(websocket._receive)


async def _caller(state: ServerState, websocket: WebSocket) -> Caller | int:
    """Return who opens this socket, or the code to close it with."""
    try:
        caller = await state.access.caller(websocket)
    except Problem as problem:
        if problem.status in _CODES:
            return _CODES[problem.status]
        raise
    return caller if "run" in caller.scopes else FORBIDDEN


class Socket(Reader):
    """An open WebSocket of a caller, with the runs that it follows.

    All sends await one lock. There is no queue: while the client does not read, the followed runs are not read either,
    and runs of this process pause their model streams.
    """

    def __init__(self, websocket: WebSocket, state: ServerState, streams: OpenStreams, caller: Caller) -> None:
        super().__init__()
        self._socket = websocket
        self._state = state
        self._open = streams
        self._caller = caller
        self._lock = asyncio.Lock()
        self._follows: dict[str, asyncio.Task[None]] = {}
        self._commands: dict[str, _Command] = {
            "turn": _Command(("run",), self._turn, ("turn",), ("after",)),
            "follow": _Command(OF_RESULTS, self._follow, ("run_id",), ("after",)),
            "unfollow": _Command(("run",), self._unfollow, ("run_id",)),
            "cancel": _Command(("act",), self._cancel, ("run_id",)),
            "signal": _Command(OF_SENDING, self._signal, ("run_id", "name"), ("payload", "message_id")),
            "approve": _Command(
                ("approve",), self._approve, ("run_id", "name"), ("answer", "request_id", "message_id")
            ),
        }

    async def serve(self) -> None:
        """Serve the client until it is gone, or the server ends the socket."""
        receiving = start_soon(self._receive())
        try:
            await first_of(receiving, self.stopped)
            code = receiving.result() if receiving.done() else None
        finally:
            tasks = [receiving, *self._follows.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self.stopped.done() and code is None:
            code = RESTARTING if self.stopped.result() == open_streams.DRAINING else STALLED_CODE
        if code is not None:
            await self._close(code)

    async def _close(self, code: int) -> None:
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._socket.close(code)
        except TimeoutError:
            abort(self._socket._receive)
        except (WebSocketDisconnect, RuntimeError):  # it is gone already
            pass

    # -- receiving

    async def _receive(self) -> int | None:
        """Handle the client's frames. Return the code to close the socket with, or None if the client has closed it."""
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return None
            text = message.get("text")
            if text is not None and len(text.encode()) > self._state.settings.max_frame_bytes:
                return TOO_LARGE
            try:
                await self._handle(text)
            except WebSocketDisconnect:
                return None

    async def _handle(self, text: str | None) -> None:
        ref = None
        try:
            self._state.limits.request(self._caller.name)
            frame = _decoded(text, self._state.settings.max_json_depth)
            ref = _ref(frame)
            command = self._command(frame)
            await command.do(frame, ref)
        except WebSocketDisconnect:
            raise
        except Exception as error:  # noqa: BLE001 - the client gets each error, and the socket stays open
            await self._send_error(error, ref)

    def _command(self, frame: Frame) -> _Command:
        kind = frame.get("type")
        command = self._commands.get(kind) if isinstance(kind, str) else None
        if command is None:
            raise _invalid("type", unknown("type", kind, self._commands))
        check_scope(self._caller, command.scopes, "frame")
        for name in frame:
            if name not in command.fields:
                raise _invalid(name[:80], unknown("field", name, command.fields))
        for name in command.required:
            if name not in frame:
                raise _invalid(name, f"{name} is missing. Add it to the frame.")
        for name in ("run_id", "name", "request_id", "message_id"):
            if not isinstance(frame.get(name, ""), str):
                raise _invalid(name, str(must(name, "be a string", frame[name])))
        return command

    # -- commands

    async def _turn(self, frame: Frame, ref: Any) -> None:
        self._check_room()
        after = _after(frame)
        await self._start(await insert_turn(self._state, self._caller, frame["turn"]), after, ref)

    async def _follow(self, frame: Frame, ref: Any) -> None:
        self._check_room()
        after = _after(frame)
        await self._start(await self._row(frame, "read"), after, ref)

    def _check_room(self) -> None:
        most = self._state.settings.max_streams_per_caller
        if len(self._follows) >= most:
            raise Problem.of(429, f"This socket follows {most} runs, the maximum. Send unfollow first.")

    async def _start(self, row: RunRow, after: int, ref: Any) -> None:
        earlier = self._follows.pop(row.run_id, None)
        if earlier is not None:
            earlier.cancel()
            await asyncio.wait({earlier})
        await self._acknowledge(ref, run_id=row.run_id, state=row.status)
        self._follows[row.run_id] = start_soon(self._send_events(row, after, ref))

    async def _unfollow(self, frame: Frame, ref: Any) -> None:
        row = await self._row(frame, "read")
        task = self._follows.pop(row.run_id, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        await self._acknowledge(ref, run_id=row.run_id)

    async def _cancel(self, frame: Frame, ref: Any) -> None:
        row = await self._row(frame, "act")
        recorded = await self._state.runner.cancel(row.run_id, by=self._caller.name)
        await self._acknowledge(ref, run_id=row.run_id, state=None if recorded else row.status)

    async def _signal(self, frame: Frame, ref: Any) -> None:
        row = await self._row(frame, "act")
        stored = await self._state.runner.signal(
            row.run_id, frame["name"], frame.get("payload"), message_id=frame.get("message_id"),
            answers="approve" in self._caller.scopes,
        )  # fmt: skip
        if not stored:
            raise finished()
        await self._acknowledge(ref, run_id=row.run_id)

    async def _approve(self, frame: Frame, ref: Any) -> None:
        row = await self._row(frame, "act")
        await approve(
            self._state, self._caller, row, frame["name"], frame.get("answer", True),
            request_id=frame.get("request_id"), message_id=frame.get("message_id"),
        )  # fmt: skip
        await self._acknowledge(ref, run_id=row.run_id)

    async def _row(self, frame: Frame, verb: str) -> RunRow:
        return await visible_row(self._state.runner.queue, self._caller, frame["run_id"], verb)

    # -- sending

    async def _send_events(self, row: RunRow, after: int, ref: Any) -> None:
        run_id = row.run_id

        async def send(page: Sequence[Event]) -> None:
            for event in page if "read" in self._caller.scopes else without_stacks(page):
                await self._send(open_streams.event_text(run_id, event))

        try:
            with self._open.following(self._state.runner.queue, row) as run:
                ended = await run.follow(partial(self._pages, row), after + 1, row.generation, send)
            await self._send(open_streams.socket_frame("done", run_id=run_id, state=ended.status))
        except WebSocketDisconnect:
            pass
        except Exception as error:  # noqa: BLE001 - the client gets each error
            with contextlib.suppress(WebSocketDisconnect):
                await self._send_error(error, ref, run_id)
        finally:
            if self._follows.get(run_id) is asyncio.current_task():
                del self._follows[run_id]

    def _pages(self, row: RunRow, since: int) -> AsyncGenerator[Sequence[Event], None]:
        turns, most = self._state.turns, None
        if turns is not None and row.agent == turns.key:
            most = turns.max_unsent_bytes
        return self._state.runner.event_pages(row.run_id, since, backpressure=True, max_unsent_bytes=most)

    async def _acknowledge(self, ref: Any, **fields: Any) -> None:
        await self._send(open_streams.socket_frame("ack", ref=ref, **fields))

    async def _send_error(self, error: Exception, ref: Any, run_id: str | None = None) -> None:
        problem = Problem(410, open_streams.REPLACED) if isinstance(error, Replaced) else problem_of(error)
        if problem.status == 500:
            log.error("a frame of the socket failed: %s", log_text(error))
        field = problem.errors[0]["field"] if problem.errors else None
        shown = {"status": problem.status, "title": problem.title, "detail": problem.detail or None, "field": field}
        await self._send(open_streams.socket_frame("error", ref=ref, run_id=run_id, **shown))

    async def _send(self, text: str) -> None:
        async with self._lock:
            self._sending += 1
            try:
                await self._socket.send_text(text)
            finally:
                self._sending -= 1
            self._sends += 1


class _Command:
    """What a type of frame does, its fields, and the scopes. The caller needs one of these scopes."""

    def __init__(
        self, scopes: tuple[str, ...], do: Callable[[Frame, Any], Awaitable[None]], required: tuple[str, ...],
        optional: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.scopes = scopes
        self.do = do
        self.required = required
        self.fields = ("type", "ref", *required, *optional)


def _invalid(field: str, message: str) -> Problem:
    return invalid_field(field, safe_text(message))


def _decoded(text: str | None, depth: int) -> Frame:
    if text is None:
        raise Problem.of(400, "A frame must be text.")
    check_json(text.encode(), depth)
    frame = json.loads(text)
    if not isinstance(frame, dict):
        raise Problem.of(400, "A frame must be a JSON object.")
    return frame


def _ref(frame: Frame) -> Any:
    ref = frame.get("ref")
    if (isinstance(ref, str) and len(ref) <= _LONGEST_REF) or ref is None or type(ref) is int:
        return ref
    raise _invalid("ref", f"ref must be an integer or a string of at most {_LONGEST_REF} characters.")


def _after(frame: Frame) -> int:
    after = frame.get("after")
    if after is None:
        return -1
    if type(after) is int and 0 <= after <= 2**53:
        return after
    raise _invalid("after", "after must be an integer from 0 to 2^53.")
