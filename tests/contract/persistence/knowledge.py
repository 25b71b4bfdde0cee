"""Cases for what the knowledge stores of this package do in addition to the contract."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import datetime as dt
import math
from array import array
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

from agent_runtime_core.errors import InvalidArgument, TooManyVectors, UnserialisableResult
from agent_runtime_core.persistence.models import Embedding, Fact, Scope, Summary, new_id
from agent_runtime_core.testing.clock import START, VirtualClock
from agent_runtime_core.testing.contracts.checks import Cases, opened, refused, same
from agent_runtime_core.testing.contracts.persistence.knowledge import HOUR, NAIVE, NOON, Case, Make
from tests.contract.persistence.fixtures import HOSTILE, TYPED, fenced

BUILT_IN: Cases[Case] = Cases()


@BUILT_IN
async def the_newest_fact_of_a_key_counts(make: Make) -> None:
    async with opened(make) as store:
        facts = [Fact(key="a", value=n, created_at=at) for n, at in enumerate([NAIVE, NOON + 2 * HOUR, NAIVE + HOUR])]
        for fact in facts:
            await store.save_fact(fact)
        same((await store.get_fact_by_key("a")).value, 1, "the newest of its key")
        same([fact.value for fact in await store.list_facts()], [1, 2, 0], "the list, the newest first")
        same([fact.value for fact in await store.list_facts(limit=1)], [1], "the newest of all")
        await store.delete_fact(facts[1].id)
        same((await store.get_fact_by_key("a")).value, 2, "the newest that is left")


@BUILT_IN
async def an_expired_fact_is_gone(make: Make) -> None:
    clock = VirtualClock()
    async with opened(make, clock=clock) as store:
        ends = dt.datetime.fromtimestamp(START + 60, dt.UTC)
        kept = Fact(key="a", value="kept", created_at=NAIVE)
        fact = Fact(key="a", value="expires", expires_at=ends.replace(tzinfo=None))
        for each in (kept, fact):
            await store.save_fact(each)
        clock.advance(59)
        same(await store.get_fact_by_key("a"), fact, "the fact before its end")
        clock.advance(1)
        same(await store.get_fact(fact.id), None, "the fact at its end")
        same(await store.get_fact_by_key("a"), kept, "the one of its key that has not expired")
        same((await store.list_facts(), await store.search_facts("expires")), ([kept], []), "what is listed and found")
        same(await store.delete_fact(fact.id), False, "deleting what has expired")


@BUILT_IN
async def summaries_of_many_conversations_are_found(make: Make) -> None:
    async with opened(make) as store:
        a, b, c = new_id(), new_id(), new_id()
        old = Summary(content="old", conversation_id=a, conversation_ids=[b, a], created_at=NAIVE)
        new = Summary(content="new", conversation_ids=[b], created_at=NOON + HOUR)
        for summary in (new, old):
            await store.save_summary(summary)

        async def of(conversation: UUID) -> list[str]:
            return [each.content for each in await store.get_summaries_for_conversation(conversation)]

        same([await of(each) for each in (a, b, c)], [["old"], ["new", "old"], []], "those of three, the newest first")
        old.conversation_ids = [c]
        await store.save_summary(old)
        same([await of(each) for each in (a, b, c)], [["old"], ["new"], ["old"]], "those once they were changed")
        await store.delete_summary(old.id)
        same([await of(each) for each in (a, b, c)], [[], ["new"], []], "those that are left")


@BUILT_IN
async def summaries_saved_at_once_leave_no_link_behind(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        summary, conversations = Summary(content="s"), [new_id() for _ in range(8)]
        saves = [dataclasses.replace(summary, conversation_ids=[each]) for each in conversations]
        await asyncio.gather(*(to.save_summary(each) for each, to in zip(saves, [store, beside] * 4, strict=True)))
        [last] = (await store.get_summary(summary.id)).conversation_ids
        for each in conversations:
            expected = [summary.id] if each == last else []
            same(
                [one.id for one in await store.get_summaries_for_conversation(each)],
                expected,
                "those of a conversation",
            )


@BUILT_IN
async def keys_are_any_text(make: Make) -> None:
    async with opened(make) as store:
        for key in HOSTILE:
            await store.save_fact(Fact(key=key, value=key))
        for key in HOSTILE:
            found = await store.get_fact_by_key(key)
            same(found and (found.key, found.value), (key, key), f"the fact of {key!a:.40}")
        same(len(await store.list_facts(limit=1000)), len(HOSTILE), "how many facts there are")


@BUILT_IN
async def values_are_kept_as_they_are(make: Make) -> None:
    async with opened(make) as store:
        fact = Fact(key="a", value=copy.deepcopy(TYPED), metadata=copy.deepcopy(TYPED))
        await store.save_fact(fact)
        fact.value["pair"] = "changed by its writer"
        found = await store.get_fact(fact.id)
        same((found.value, found.metadata), (TYPED, TYPED), "values of many types")
        with refused(UnserialisableResult, "a value without JSON form"):
            await store.save_fact(dataclasses.replace(fact, value=object()))
        nameless: Any = ("", 5)
        for bad in (Fact(key=key, value=1) for key in nameless):
            with refused(InvalidArgument, f"a fact with the key {bad.key!r}"):
                await store.save_fact(bad)
        same((await store.get_fact(fact.id)).value, TYPED, "the fact after that")


@BUILT_IN
async def what_could_not_be_read_again_is_refused(make: Make) -> None:
    async with opened(make) as store:
        fact = Fact(key="a", value=1)
        await store.save_fact(fact)
        fields: list[dict[str, Any]] = [
            *({"fact_type": bad} for bad in ("no.such", None, 7)),
            *({name: "today"} for name in ("created_at", "expires_at")),
        ]
        writes: list[tuple[Any, Any]] = [
            *((store.save_fact, dataclasses.replace(fact, **each)) for each in fields),
            (store.save_summary, Summary(content="s", created_at="today")),  # type: ignore[arg-type]
            (store.save_summary, Summary(content="s", conversation_ids=None)),  # type: ignore[arg-type]
            (store.save_embedding, Embedding(vector=[1.0], content="e", created_at="today")),  # type: ignore[arg-type]
            *((write, bad) for write in (store.save_fact, store.save_summary, store.save_embedding)
              for bad in ("a", None)),
        ]  # fmt: skip
        for write, bad in writes:
            with refused(InvalidArgument, f"{write.__name__}({bad!r:.80})"):
                await write(bad)
        with refused(InvalidArgument, "a search for no text"):
            await store.search_facts(None)
        same(await store.list_facts(), [fact], "the facts after that")


@BUILT_IN
async def a_vector_without_direction_is_refused(make: Make) -> None:
    async with opened(make) as store:
        kept = Embedding(vector=[1, 2], content="whole numbers")
        await store.save_embedding(kept)
        bad: Any
        for bad in ([], [0.0, 0.0], [1.0, math.nan], [math.inf, 1.0], ["a"], None, 5, [1j], [10**400]):
            with refused(InvalidArgument, f"an embedding of {bad!r:.40}"):
                await store.save_embedding(dataclasses.replace(kept, vector=bad))
            with refused(InvalidArgument, f"a search for {bad!r:.40}"):
                await store.search_similar(bad)
        with refused(InvalidArgument, "dimensions that are not those of the vector"):
            await store.save_embedding(Embedding(vector=[1.0, 2.0], content="", dimensions=3))
        with refused(InvalidArgument, "a search for another length"):
            await store.search_similar([1.0, 2.0, 3.0])
        with refused(InvalidArgument, "a limit below 0"):
            await store.search_similar([1.0, 2.0], -1)
        [(found, _)] = await store.search_similar(array("d", [1.0, 2.0]))
        same(found, kept, "what is found after that")
        same({type(each) for each in found.vector}, {float}, "of what its vector is")
        same(await store.search_similar([1.0, 2.0], 0), [], "the nearest none")


@BUILT_IN
async def vectors_of_several_lengths_are_apart(make: Make) -> None:
    async with opened(make) as store:
        for vector in ([1.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]):
            await store.save_embedding(Embedding(vector=vector, content=str(len(vector))))
        same([each.content for each, _ in await store.search_similar([1.0, 0.0])], ["2"], "those of two")
        same([each.content for each, _ in await store.search_similar([1.0, 0.0, 0.0])], ["3", "3"], "those of three")


@BUILT_IN
async def equally_near_ones_are_in_order_of_age(make: Make) -> None:
    async with opened(make) as store:
        for n in (3, 1, 2, 0):
            vector = [1.0 * (n + 1), 2.0 * (n + 1)]
            await store.save_embedding(Embedding(vector=vector, content=str(n), created_at=NAIVE + n * HOUR))
        same([each.content for each, _ in await store.search_similar([1.0, 2.0], 3)], ["0", "1", "2"], "the order")


@BUILT_IN
async def huge_and_tiny_vectors_are_compared(make: Make) -> None:
    async with opened(make) as store:
        for content, vector in (("huge", [1e308, 1e308]), ("tiny", [5e-324, 0.0]), ("against", [-1.0, 0.0])):
            await store.save_embedding(Embedding(vector=vector, content=content))
        found = await store.search_similar([1e-320, 0.0])
        same([each.content for each, _ in found], ["tiny", "huge", "against"], "the order")
        scores = [score for _, score in found]
        same(
            [math.isclose(a, b) for a, b in zip(scores, [1.0, math.sqrt(0.5), -1.0], strict=True)], [True] * 3, "scores"
        )


@BUILT_IN
async def what_others_write_is_found(make: Make) -> None:
    async with opened(make, place="one") as store, opened(make, place="one") as beside:
        made = [Embedding(vector=[math.cos(n), math.sin(n)], content=str(n)) for n in range(40)]

        async def nearest(n: float) -> str:
            [(found, _)] = await store.search_similar([math.cos(n), math.sin(n)], 1)
            return str(found.content)

        await beside.save_embedding(made[0])
        same(await nearest(5), "0", "the only one")
        for each in made[1:20]:
            await beside.save_embedding(each)
        same(await nearest(7), "7", "one that another has written")
        await beside.delete_embedding(made[7].id)
        await beside.save_embedding(dataclasses.replace(made[8], vector=made[3].vector, created_at=NAIVE))
        same((await nearest(8), await nearest(3)), ("2", "8"), "what is near once one was deleted and one changed")
        await asyncio.gather(*(beside.save_embedding(each) for each in made[20:]), *(nearest(1) for _ in range(5)))
        for n in range(20, 40):
            same(await nearest(n), str(n), "one of many written at once")


@BUILT_IN
async def too_many_vectors_are_refused(make: Make) -> None:
    async with opened(make, place="one", max_vectors=5) as store:
        made = [Embedding(vector=[1.0, n], content=str(n)) for n in range(1, 7)]
        for each in made[:5]:
            await store.save_embedding(each)
        with refused(TooManyVectors, "a sixth embedding"):
            await store.save_embedding(made[5])
        await store.save_embedding(made[0])
        same(len(await store.search_similar([1.0, 1.0])), 5, "how many there are")
        await store.save_embedding(made[5], Scope.GLOBAL)
        await store.delete_embedding(made[0].id)
        await store.save_embedding(made[5])
        with refused(TooManyVectors, "the sixth again"):
            await store.save_embedding(made[0])
    async with opened(make, place="one", max_vectors=4) as narrow:
        with refused(TooManyVectors, "a search among more than there may be"):
            await narrow.search_similar([1.0, 1.0])


@BUILT_IN
async def a_session_is_seen_by_those_who_know_its_id(make: Make) -> None:
    async with opened(make, place="one") as mine, opened(make, place="one") as another:
        fact = Fact(key="a", value=1)
        await mine.save_fact(fact, Scope.SESSION)
        await mine.save_embedding(Embedding(vector=[1.0], content="a"), Scope.SESSION)
        same(await mine.get_fact_by_key("a", Scope.SESSION), fact, "a fact of the session")
        same(len(await mine.search_similar([1.0], scope=Scope.SESSION)), 1, "an embedding of the session")
        same(await another.get_fact_by_key("a", Scope.SESSION), None, "that of another session")
        same(await another.search_similar([1.0], scope=Scope.SESSION), [], "an embedding of another session")
        same(await mine.get_fact_by_key("a"), None, "a fact of the project")


@BUILT_IN
async def a_superseded_claim_writes_nothing(make: Make) -> None:
    async with opened(make) as store:
        fact, summary = Fact(key="a", value=1), Summary(content="s", conversation_id=new_id())
        embedding = Embedding(vector=[1.0, 2.0], content="e")
        await store.save_fact(fact)
        await store.save_summary(summary)
        await store.save_embedding(embedding)

        async def state() -> Any:
            found = await store.search_similar([1.0, 2.0])
            return await store.list_facts(), await store.get_summary(summary.id), found

        writes: dict[str, Callable[[], Awaitable[Any]]] = {
            "save_fact": lambda: store.save_fact(Fact(key="late", value=1)),
            "delete_fact": lambda: store.delete_fact(fact.id),
            "save_summary": lambda: store.save_summary(dataclasses.replace(summary, content="late")),
            "delete_summary": lambda: store.delete_summary(summary.id),
            "save_embedding": lambda: store.save_embedding(dataclasses.replace(embedding, content="late")),
            "delete_embedding": lambda: store.delete_embedding(embedding.id),
        }
        await fenced(store.documents(Scope.PROJECT).commits, writes, state)
