"""Errors of model clients: their types, whether a retry may help, and no API key in them."""

from __future__ import annotations

import contextlib
import traceback

from ...errors import (
    AuthenticationFailed,
    ModelNotFound,
    ProviderError,
    ProviderUnavailable,
    RateLimited,
    RequestRefused,
)
from ...interfaces import LLMClient
from .checks import Cases, same
from .llm_fixtures import ASK, KEY, Case, Disconnect, HttpError, Make, TextReply, failed, opened, optional, stream_of

CASES: Cases[Case] = Cases()

REFUSALS: tuple[tuple[int, type[ProviderError], bool], ...] = (
    (400, RequestRefused, False),
    (401, AuthenticationFailed, False),
    (403, AuthenticationFailed, False),
    (404, ModelNotFound, False),
    (429, RateLimited, True),
    (500, ProviderUnavailable, True),
    (503, ProviderUnavailable, True),
    (529, ProviderUnavailable, True),
)


@CASES
async def a_refusal_has_its_type(make: Make) -> None:
    for status, kind, retriable in REFUSALS:
        async with opened(make, HttpError(status)) as client:
            error = await failed(client.generate(ASK), f"status {status}")
            if not isinstance(error, kind):
                same(type(error).__name__, kind.__name__, f"the type of the error for status {status}")
            same((error.status, error.retriable), (status, retriable), f"status and retriable for status {status}")
            same(bool(str(error)), True, f"whether the error for status {status} has a message")


@CASES
async def the_wait_a_provider_asks_for_is_told(make: Make) -> None:
    for status in (429, 503):
        async with opened(make, HttpError(status, retry_after=1800.0)) as client:
            error = await failed(client.generate(ASK), f"status {status}")
            same(error.retry_after, 1800.0, f"retry_after of status {status}")
        async with opened(make, HttpError(status)) as client:
            error = await failed(client.generate(ASK), f"status {status}")
            same(error.retry_after, None, f"retry_after of status {status} without a Retry-After header")


@CASES
async def a_broken_connection_is_an_error(make: Make) -> None:
    for broken in (
        Disconnect(),
        Disconnect(TextReply("It is 4 °C.")),
        Disconnect(TextReply("It is 4 °C."), clean=True),
    ):
        async with opened(make, broken) as client:
            error = await failed(client.generate(ASK), "a connection that broke")
            same(error.retriable, True, "whether the error is retriable")


@CASES
async def a_failure_is_over_with_the_next_answer(make: Make) -> None:
    for failure in (HttpError(500), HttpError(400), Disconnect()):
        async with opened(make, failure, TextReply("Hello")) as client:
            with contextlib.suppress(ProviderError):
                await client.generate(ASK)
            same((await client.generate(ASK)).message.get("content"), "Hello", f"the response after {failure}")


@CASES
async def the_key_is_in_no_error(make: Make) -> None:
    for status in (400, 401, 403, 404, 429, 500):
        async with opened(make, HttpError(status, f"Incorrect API key provided: {KEY}.")) as client:
            _has_no_key(await failed(client.generate(ASK), f"status {status}"))
            same(KEY in repr(client), False, "whether the key is in the repr of the client")


@CASES
@optional
async def the_key_is_in_no_error_of_a_stream(make: Make) -> None:
    for status in (401, 500):
        async with opened(make, HttpError(status, f"Incorrect API key provided: {KEY}.")) as client:
            _has_no_key(await failed(_read(client), f"a stream with status {status}"))


async def _read(client: LLMClient) -> None:
    async for _ in stream_of(client):
        pass


def _has_no_key(error: ProviderError) -> None:
    # A printed traceback also shows the causes of the error.
    shown = f"{error}{error!r}{error.code}" + "".join(traceback.format_exception(error, limit=0))
    same(KEY in shown, False, f"whether the key is in {type(error).__name__} or in its causes")
