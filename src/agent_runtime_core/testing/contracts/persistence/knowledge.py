"""Conformance tests for knowledge stores. Run one of `CASES` with `await case(make)`, or all with `await check(make)`.

`make()` returns a new and empty store. Embeddings are optional: `VECTORS` lists the cases for stores with embeddings.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

from ....persistence.models import Embedding, Fact, FactType, Scope, Summary, new_id
from ...clock import VirtualClock
from ..checks import Cases, opened, refused, same
from .fixtures import TREE, deleted_once, stores_of_tenants

Make = Callable[..., Any]
Case = Callable[[Make], Awaitable[None]]

CASES: Cases[Case] = Cases()
VECTORS: Cases[Case] = Cases()

NOON = dt.datetime(2026, 11, 21, 12, 0, tzinfo=dt.UTC)
NAIVE = NOON.replace(tzinfo=None)
HOUR = dt.timedelta(hours=1)
UNKNOWN = UUID("0b0e7a3a-1c7d-4c55-9c34-6f1f3b1d2bff")


async def check(make: Make) -> None:
    """Run all cases, and VECTORS if the store supports embeddings."""
    await CASES.check(make)
    store = make()
    try:
        await store.save_embedding(Embedding(vector=[1.0], content=""))
    except NotImplementedError:
        return
    finally:
        await store.close()
    await VECTORS.check(make)


def keys(facts: Sequence[Fact]) -> list[str]:
    return [fact.key for fact in facts]


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """Cosine similarity by its definition."""
    product = math.fsum(a * b for a, b in zip(one, other, strict=True))
    return product / math.sqrt(math.fsum(a * a for a in one)) / math.sqrt(math.fsum(b * b for b in other))


# -- facts


@CASES
async def an_unknown_fact_is_none(make: Make) -> None:
    async with opened(make) as store:
        same((await store.get_fact(UNKNOWN), await store.get_fact_by_key("a")), (None, None), "an unknown fact")
        deleted = (await store.delete_fact(UNKNOWN), await store.list_facts())
        same(deleted, (False, []), "the results of deleting an unknown fact and of listing")


@CASES
async def every_field_of_a_fact_comes_back(make: Make) -> None:
    async with opened(make) as store:
        full = Fact(
            key="user.preferred_language", value=copy.deepcopy(TREE), fact_type=FactType.PREFERENCE, confidence=0.25,
            source="conversation é", created_at=NAIVE, updated_at=NOON, expires_at=NAIVE + 365_000 * HOUR,
            metadata=copy.deepcopy(TREE),
        )  # fmt: skip
        for fact in (full, Fact(key="a", value=None)):
            await store.save_fact(fact)
            same(await store.get_fact(fact.id), fact, "a fact")
            same(await store.get_fact_by_key(fact.key), fact, "a fact by its key")


@CASES
async def a_fact_is_saved_over(make: Make) -> None:
    async with opened(make) as store:
        fact = Fact(key="a", value=1)
        await store.save_fact(fact)
        fact.value, fact.key = 2, "b"
        await store.save_fact(fact)
        same(await store.get_fact(fact.id), fact, "the fact saved twice")
        same(await store.get_fact_by_key("a"), None, "the fact by its old key")
        same(keys(await store.list_facts()), ["b"], "the list")
        await deleted_once(store.delete_fact, fact.id)
        same((await store.get_fact(fact.id), await store.get_fact_by_key("b")), (None, None), "the deleted fact")


@CASES
async def facts_are_listed_by_their_type(make: Make) -> None:
    async with opened(make) as store:
        for n, fact_type in enumerate([FactType.USER, FactType.PROJECT, FactType.USER]):
            await store.save_fact(Fact(key=str(n), value=n, fact_type=fact_type, created_at=NOON + n * HOUR))
        same(sorted(keys(await store.list_facts())), ["0", "1", "2"], "all facts")
        same(sorted(keys(await store.list_facts(fact_type=FactType.USER))), ["0", "2"], "the facts of one type")
        same(await store.list_facts(fact_type=FactType.CONTEXT), [], "the facts of another type")
        same(len(await store.list_facts(limit=2)), 2, "the number of facts with limit 2")


@CASES
async def scopes_are_apart(make: Make) -> None:
    async with opened(make) as store:
        fact, summary = Fact(key="a", value=1), Summary(content="s", conversation_id=new_id())
        await store.save_fact(fact)
        await store.save_summary(summary)
        there = Scope.GLOBAL
        facts = (await store.get_fact(fact.id, scope=there), await store.get_fact_by_key("a", there))
        same(facts, (None, None), "a fact")
        same((await store.list_facts(there), await store.delete_fact(fact.id, there)), ([], False), "in another scope")
        same(await store.get_summary(summary.id, scope=there), None, "a summary")
        summaries = await store.get_summaries_for_conversation(summary.conversation_id, there)
        same(summaries, [], "the summaries of a conversation in the global scope")
        same(await store.get_fact(fact.id, Scope.PROJECT), fact, "the fact in its scope")


# -- summaries


@CASES
async def every_field_of_a_summary_comes_back(make: Make) -> None:
    async with opened(make) as store:
        full = Summary(
            content="é", conversation_id=new_id(), conversation_ids=[new_id(), new_id()], start_time=NAIVE,
            end_time=NOON, created_at=NAIVE, metadata=copy.deepcopy(TREE),
        )  # fmt: skip
        for summary in (full, Summary(content="")):
            await store.save_summary(summary)
            same(await store.get_summary(summary.id), summary, "a summary")
        same(await store.get_summary(UNKNOWN), None, "an unknown summary")
        full.content = "another one"
        await store.save_summary(full)
        same(await store.get_summary(full.id), full, "the summary saved over")
        await deleted_once(store.delete_summary, full.id)
        same(await store.get_summary(full.id), None, "the deleted summary")


@CASES
async def summaries_are_found_by_their_conversation(make: Make) -> None:
    async with opened(make) as store:
        one, other = new_id(), new_id()
        first, second = Summary(content="1", conversation_id=one), Summary(content="2", conversation_id=other)
        for summary in (first, second, Summary(content="3")):
            await store.save_summary(summary)
        same(await store.get_summaries_for_conversation(one), [first], "the summaries of a conversation")
        same(await store.get_summaries_for_conversation(UNKNOWN), [], "the summaries of an unknown conversation")
        await store.delete_summary(first.id)
        same(await store.get_summaries_for_conversation(one), [], "the summaries after a delete")


@CASES
async def embeddings_are_kept_or_refused(make: Make) -> None:
    async with opened(make) as store:
        embedding = Embedding(vector=[1.0, 0.0], content="a")
        try:
            await store.save_embedding(embedding)
        except NotImplementedError:
            with refused(NotImplementedError, "a search in a store without embeddings"):
                await store.search_similar([1.0, 0.0])
            with refused(NotImplementedError, "deleting in a store without embeddings"):
                await store.delete_embedding(embedding.id)
            return
        try:
            [(found, score)] = await store.search_similar([2.0, 0.0])
        except NotImplementedError as error:
            raise AssertionError(f"a store that saves embeddings must search them: {error}") from error
        same((found.id, round(score, 6)), (embedding.id, 1.0), "the embedding found")


# -- vectors


@VECTORS
async def every_field_of_an_embedding_comes_back(make: Make) -> None:
    async with opened(make) as store:
        vector = [0.1, -1e-300, 1e300, 5e-324, -0.0, 1 / 3]
        full = Embedding(
            vector=vector, content='é ","vector":"AAAA"', content_type="message", source_id=new_id(), model="m-1",
            dimensions=6, created_at=NAIVE, metadata={"vector": "AAAA"},
        )  # fmt: skip
        bare = Embedding(vector=[3.0] * 6, content="")
        for embedding in (full, bare):
            await store.save_embedding(embedding)
        found = {each.id: each for each, _ in await store.search_similar(vector)}
        same(found, {full.id: full, bare.id: bare}, "the embeddings found")
        same({type(each) for each in found[full.id].vector}, {float}, "the types of the vector's numbers")
        same(str(found[full.id].vector[4]), "-0.0", "a negative zero")


@VECTORS
async def the_nearest_come_first(make: Make) -> None:
    async with opened(make) as store:
        random = VirtualClock(seed=7).random
        made = [
            Embedding(vector=[random.gauss(0, 1) for _ in range(12)], content=str(n), content_type="ab"[n % 2])
            for n in range(60)
        ]
        for embedding in made:
            await store.save_embedding(embedding)
        for content_type, limit in ((None, 10), ("a", 7), ("b", 100), (None, 1)):
            query = [random.gauss(0, 1) for _ in range(12)]
            wanted = [each for each in made if content_type in (None, each.content_type)]
            wanted.sort(key=lambda each: -cosine(each.vector, query))
            found = await store.search_similar(query, limit, content_type=content_type)
            same(
                [each.content for each, _ in found], [each.content for each in wanted[:limit]], "the nearest embeddings"
            )
            for each, score in found:
                same(math.isclose(score, cosine(each.vector, query), abs_tol=1e-9), True, f"the score {score!r}")
        same(await store.search_similar([1.0] * 12, content_type="c"), [], "the embeddings of an unknown type")
        same(await store.search_similar([1.0] * 12, scope=Scope.GLOBAL), [], "the embeddings of another scope")


@VECTORS
async def a_deleted_embedding_is_not_found(make: Make) -> None:
    async with opened(make) as store:
        first, second = Embedding(vector=[1.0, 0.0], content="1"), Embedding(vector=[0.0, 1.0], content="2")
        for embedding in (first, second):
            await store.save_embedding(embedding)
        same(await store.delete_embedding(first.id, Scope.GLOBAL), False, "the result of deleting in another scope")
        await deleted_once(store.delete_embedding, first.id)
        same([each.content for each, _ in await store.search_similar([1.0, 0.0])], ["2"], "embeddings after a delete")
        await store.save_embedding(dataclasses.replace(second, vector=[1.0, 1.0], content="2, anew"))
        [(found, score)] = await store.search_similar([1.0, 1.0])
        same((found.content, round(score, 9)), ("2, anew", 1.0), "the embedding found after it was replaced")


@CASES
async def facts_are_found_by_their_words(make: Make) -> None:
    async with opened(make) as store:
        first = Fact(key="user.name", value="Ada Lovelace", source="first letter")
        second = Fact(key="project", value={"title": ["An Engine", {"by": "Lovelace"}], "n": 3})
        for fact in (first, second, Fact(key="other", value=None)):
            await store.save_fact(fact)
        for query, expected in (
            ("lovelace ADA", [first]), ("engine", [second]), ("letter", [first]), ("project", [second]),
            ("babbage", []), ("ada engine", []), ("", []), ('"', []), ("a AND OR (", []),
        ):  # fmt: skip
            same(await store.search_facts(query), expected, f"the facts found by {query!r}")
        shared = {fact.id for fact in await store.search_facts("lovelace")}
        same(shared, {first.id, second.id}, "the facts found by a word in two facts")
        same(len(await store.search_facts("lovelace", limit=1)), 1, "the number of facts found with limit 1")
        first.value = "Ada Byron"
        await store.save_fact(first)
        same(await store.search_facts("lovelace"), [second], "the facts found after one was replaced")


# -- tenants


@CASES
async def tenants_use_the_same_facts_and_summaries_apart(make: Make) -> None:
    async with stores_of_tenants(make) as stores:
        for scope in Scope:
            for tenant, store in stores.items():
                same(await store.search_facts("secret", scope), [], f"what tenant {tenant!r} finds before it is saved")
                await store.save_fact(Fact(id=UNKNOWN, key="name", value=f"secret of {tenant}"), scope)
                await store.save_summary(Summary(id=UNKNOWN, content=f"{tenant}", conversation_id=UNKNOWN), scope)
        for scope in Scope:
            for tenant, store in stores.items():
                facts = [*await store.list_facts(scope), *await store.search_facts("secret", scope)]
                facts.append(await store.get_fact_by_key("name", scope))
                same([each.value for each in facts], [f"secret of {tenant}"] * 3, f"the facts of tenant {tenant!r}")
                summaries = await store.get_summaries_for_conversation(UNKNOWN, scope)
                same([each.content for each in summaries], [str(tenant)], f"the summaries of tenant {tenant!r}")
        for number, store in enumerate(stores.values()):
            deleted = (await store.delete_fact(UNKNOWN), await store.delete_summary(UNKNOWN))
            same(deleted, (True, True), "the results of the deletes")
            left = [await each.get_fact(UNKNOWN) is not None for each in stores.values()]
            same(left, [False] * (number + 1) + [True] * (len(stores) - number - 1), "which facts are left")


@VECTORS
async def tenants_use_the_same_embeddings_apart(make: Make) -> None:
    async with stores_of_tenants(make) as stores:
        for scope in Scope:
            for tenant, store in stores.items():
                same(await store.search_similar([1.0, 0.0], scope=scope), [], f"what tenant {tenant!r} finds at first")
                await store.save_embedding(Embedding(id=UNKNOWN, vector=[1.0, 0.0], content=f"{tenant}"), scope)
        for scope in Scope:
            for tenant, store in stores.items():
                found = [each.content for each, _ in await store.search_similar([1.0, 0.0], scope=scope)]
                same(found, [str(tenant)], f"the embeddings that tenant {tenant!r} finds")
        for number, store in enumerate(stores.values()):
            same(await store.delete_embedding(UNKNOWN), True, "the result of a delete")
            left = [len(await each.search_similar([1.0, 0.0])) for each in stores.values()]
            same(left, [0] * (number + 1) + [1] * (len(stores) - number - 1), "how many embeddings are left")
