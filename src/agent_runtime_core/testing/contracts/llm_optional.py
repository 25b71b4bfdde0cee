"""Optional operations of model clients: embeddings, moderation, token counts."""

from __future__ import annotations

from typing import Any

from ...errors import InvalidArgument, RateLimited
from .checks import Cases, refused, same
from .llm_fixtures import (
    ASK,
    WEATHER,
    Case,
    Embedding,
    HttpError,
    Make,
    TokenUsage,
    Verdict,
    opened,
    optional,
    supported,
)

CASES: Cases[Case] = Cases()


@CASES
@optional
async def each_text_has_a_vector(make: Make) -> None:
    async with opened(make, Embedding(((0.5, -1.0, 2.0), (0.25, 0.0, -0.125)))) as client:
        vectors = await supported(client.embed(["first", "second"]))
        same(vectors, [[0.5, -1.0, 2.0], [0.25, 0.0, -0.125]], "the vectors of two texts")
        same({type(number) for vector in vectors for number in vector}, {float}, "the types of numbers in them")


@CASES
@optional
async def what_are_no_texts_is_refused(make: Make) -> None:
    async with opened(make, Embedding(((0.5,),))) as client:
        await supported(client.embed(["a text"]))
        wrong: tuple[Any, ...] = ("a text", [b"bytes"], [None], None)
        for texts in wrong:
            with refused(InvalidArgument, f"embed({texts!r})"):
                await client.embed(texts)


@CASES
@optional
async def vectors_that_are_refused_say_why(make: Make) -> None:
    async with opened(make, HttpError(429, retry_after=7.0)) as client:
        with refused(RateLimited, "embed() with status 429"):
            await supported(client.embed(["a text"]))


@CASES
@optional
async def a_verdict_is_a_dict(make: Make) -> None:
    for flagged in (True, False):
        async with opened(make, Verdict(flagged)) as client:
            verdict = await supported(client.moderate("a text"))
            same(isinstance(verdict, dict) and verdict.get("flagged"), flagged, f"flagged in the verdict {verdict!r}")


@CASES
@optional
async def tokens_are_counted(make: Make) -> None:
    async with opened(make, TokenUsage(11)) as client:
        count = await supported(client.count_tokens(ASK))
        same(type(count) is int and count > 0, True, f"whether {count!r} is a number of tokens")
        count = await supported(client.count_tokens(ASK, [WEATHER]))
        same(type(count) is int and count > 0, True, f"whether {count!r} is a number of tokens")


@CASES
@optional
async def tokens_of_no_messages_are_not_counted(make: Make) -> None:
    async with opened(make, TokenUsage(11)) as client:
        await supported(client.count_tokens(ASK))
        wrong: tuple[Any, ...] = ("Hello!", ["Hello!"], None)
        for messages in wrong:
            with refused(InvalidArgument, f"count_tokens({messages!r})"):
                await client.count_tokens(messages)
