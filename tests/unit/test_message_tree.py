"""Which message follows which, against a model that writes every path down as the messages are made."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.persistence.message_tree import (
    BrokenHistory,
    branches,
    copies,
    history,
    leaves,
    path,
    replacement,
)
from agent_runtime_core.persistence.models import ConversationMessage
from tests.support.cases import for_each
from tests.support.codec_values import QUICK

WHEN = dt.datetime(2026, 11, 21, tzinfo=dt.UTC)
ROLES = ("user", "assistant", "tool")
MANY = 20_000


def said(n: int, role: str = "user", *, parent: int | None = None, branch: int | None = None) -> ConversationMessage:
    return ConversationMessage(
        id=UUID(int=n),
        role=role,
        content=str(n),
        timestamp=WHEN + dt.timedelta(seconds=n),
        parent_message_id=None if parent is None else UUID(int=parent),
        branch_id=None if branch is None else UUID(int=branch),
    )


def numbers(messages: Sequence[ConversationMessage]) -> list[int]:
    return [message.id.int for message in messages]


class Model:
    """Messages, and to each the path that leads to it, written down when it is made."""

    def __init__(self) -> None:
        self.messages: list[ConversationMessage] = []
        self.paths: dict[int, list[int]] = {}
        self.last: dict[int | None, int] = {}

    def add(self, role: str, parent: int | None, branch: int | None) -> None:
        n = len(self.messages) + 1
        if parent is None:
            before = self.paths[self.last[branch]] if branch in self.last else []
        elif branch not in self.last and self.messages[parent - 1].role == role:
            before = self.paths[parent][:-1]
        else:
            before = self.paths[parent]
        self.messages.append(said(n, role, parent=parent, branch=branch))
        self.paths[n] = [*before, n]
        self.last[branch] = n


@st.composite
def models(draw: st.DrawFn) -> Model:
    model = Model()
    for _ in range(draw(st.integers(0, 30))):
        known = len(model.messages)
        parent = draw(st.none() | st.integers(1, known)) if known else None
        model.add(draw(st.sampled_from(ROLES)), parent, draw(st.sampled_from([None, 1001, 1002, 1003, 1004])))
    return model


@QUICK
@given(models())
def test_every_walk_is_the_path_that_was_made(model: Model) -> None:
    for n, expected in model.paths.items():
        assert numbers(path(model.messages, UUID(int=n))) == expected


@QUICK
@given(models())
def test_every_message_is_on_the_way_to_a_leaf(model: Model) -> None:
    ends = leaves(model.messages)
    reached = {n for leaf in ends for n in model.paths[leaf.int]}
    assert reached == set(model.paths)
    assert not any(leaf.int in each[:-1] for leaf in ends for each in model.paths.values())


@QUICK
@given(models())
def test_branches_tell_where_they_begin_and_end(model: Model) -> None:
    found = {branch.id: branch for branch in branches(model.messages)}
    assert {None if id_ is None else id_.int for id_ in found} == set(model.last)
    for id_, branch in found.items():
        own = [message for message in model.messages if message.branch_id == id_]
        before = model.paths[own[0].id.int][:-1]
        assert branch.leaf == own[-1].id
        assert branch.messages == len(own)
        assert branch.follows == (UUID(int=before[-1]) if before else None)
        assert branch.updated_at == own[-1].timestamp
        parent = own[0].parent_message_id
        stands_for = parent is not None and model.messages[parent.int - 1].role == own[0].role
        assert branch.replaces == (parent if stands_for else None)
        assert numbers(history(model.messages, branch_id=id_)) == model.paths[own[-1].id.int]
        assert history(model.messages, active=id_) == history(model.messages, branch_id=id_)


@QUICK
@given(models(), st.data())
def test_an_edit_leaves_every_path_whole(model: Model, data: st.DataObject) -> None:
    if not model.messages:
        return
    old = data.draw(st.sampled_from(model.messages))
    edited = replacement(model.messages, old.id, "edited", {})
    answer = ConversationMessage(role="assistant", content="anew", branch_id=edited.branch_id)
    again = replacement([*model.messages, edited, answer], answer.id, "once more", {})
    messages = [*model.messages, edited, answer, again]
    for n, expected in model.paths.items():
        assert numbers(path(messages, UUID(int=n))) == expected
    before = path(messages, old.id)[:-1]
    assert path(messages, answer.id) == [*before, edited, answer]
    assert path(messages, again.id) == [*before, edited, again]


@QUICK
@given(models())
def test_copies_of_a_path_are_a_main_line(model: Model) -> None:
    for n in model.paths:
        there = path(model.messages, UUID(int=n))
        made = copies(there)
        assert [each.metadata["forked_from"] for each in made] == [str(each.id) for each in there]
        assert history(made) == made
        assert {each.id for each in made}.isdisjoint(each.id for each in there)


def test_without_a_choice_it_is_the_active_branch_then_the_main_line_then_the_last_message() -> None:
    messages = [said(1), said(2, branch=9), said(3)]
    assert numbers(history(messages)) == [1, 3]
    assert numbers(history(messages, UUID(int=9))) == [2]
    assert numbers(history(messages, UUID(int=8))) == [1, 3]
    assert numbers(history(messages, UUID(int=9), branch_id=None)) == [1, 3]
    assert numbers(history(messages, leaf=UUID(int=1))) == [1]
    assert numbers(history(messages[1:2])) == [2]
    assert history(messages[1:2], branch_id=None) == []
    assert history([]) == []
    with pytest.raises(InvalidArgument, match=str(UUID(int=8))):
        history(messages, branch_id=UUID(int=8))


@for_each(
    "messages",
    [
        [said(1, parent=77)],
        [said(1), said(2, "assistant", parent=77)],
        [said(1), said(2, parent=77, branch=9)],
        [said(1, parent=1)],
        [said(1), said(2, parent=2, branch=9)],
        [said(1, parent=2, branch=8), said(2, parent=1, branch=9)],
        [said(1, parent=3, branch=7), said(2, parent=1, branch=8), said(3, parent=2, branch=9)],
        [said(1, parent=2), said(2, "assistant", parent=1)],
        [said(1), said(2, "assistant", parent=3), said(3, parent=2)],
        [said(1), said(1)],
    ],
    ids=lambda messages: ",".join(f"{n.id.int}<{n.parent_message_id and n.parent_message_id.int}" for n in messages),
)
def test_parents_that_lead_nowhere_are_an_error(messages: list[ConversationMessage]) -> None:
    with pytest.raises(BrokenHistory):
        path(messages, messages[-1].id)


def test_a_broken_branch_does_not_hide_the_others() -> None:
    messages = [said(1), said(2, "assistant"), said(3, parent=77, branch=9)]
    assert numbers(history(messages)) == [1, 2]
    with pytest.raises(BrokenHistory, match=str(UUID(int=77))):
        history(messages, UUID(int=9))


def test_many_messages_are_walked() -> None:
    line = [said(n, ROLES[n % 2]) for n in range(1, MANY + 1)]
    assert len(history(line)) == MANY
    named = [said(n, ROLES[n % 2], parent=n - 1 if n > 1 else None) for n in range(1, MANY + 1)]
    assert len(history(named)) == MANY
    assert leaves(named) == [UUID(int=MANY)]


def test_many_edits_of_an_edit_are_walked() -> None:
    edits = [said(1), said(2)] + [said(n, parent=n - 1, branch=n) for n in range(3, MANY + 1)]
    assert numbers(path(edits, UUID(int=MANY))) == [1, MANY]
    assert len(branches(edits)) == MANY - 1
    assert len(leaves(edits)) == MANY - 1
    assert leaves([*edits[:2], *edits[:1:-1]])[-1] == UUID(int=3)


def test_many_branches_in_a_circle_end() -> None:
    circle = [said(n, parent=n % MANY + 1, branch=n) for n in range(1, MANY + 1)]
    with pytest.raises(BrokenHistory, match="cycle"):
        path(circle, UUID(int=5))


def test_only_free_fields_of_a_replacement_are_given() -> None:
    messages = [said(1, "tool")]
    made = replacement(messages, UUID(int=1), [1], {"metadata": {"n": 1}, "tool_call_id": "c"})
    assert (made.role, made.content, made.metadata, made.tool_call_id) == ("tool", [1], {"n": 1}, "c")
    assert made.parent_message_id == UUID(int=1)
    for name in ("role", "content", "parent_message_id", "branch_id", "color"):
        with pytest.raises(InvalidArgument, match=name):
            replacement(messages, UUID(int=1), "x", {name: "x"})
