"""What the script answers, in whatever pieces it arrives."""

from __future__ import annotations

import pytest

from agent_runtime_core._engines.redis_answers import Answers
from agent_runtime_core.errors import StorageError

WHOLE = b"*2\r\n$3\r\n[1]\r\n$6\r\na\r\nb\r\n\r\n*0\r\n-NOSCRIPT what?\r\n*1\r\n$0\r\n\r\n"
TAKEN = [[b"[1]", b"a\r\nb\r\n"], [], "NOSCRIPT what?", [b""]]


@pytest.mark.parametrize("size", range(1, len(WHOLE) + 1))
def test_answers_are_taken_when_they_are_there_in_full(size: int) -> None:
    answers, taken = Answers(), []
    for at in range(0, len(WHOLE), size):
        answers.add(WHOLE[at : at + size])
        while (answer := answers.take()) is not None:
            taken.append(answer)
    assert taken == TAKEN


@pytest.mark.parametrize("size", range(1, 30))
def test_numbers_are_taken_as_texts_where_they_may_be(size: int) -> None:
    whole = b"*3\r\n$9\r\nsubscribe\r\n$1\r\na\r\n:12\r\n*2\r\n$4\r\npong\r\n$0\r\n\r\n"
    answers, taken = Answers(numbers=True), []
    for at in range(0, len(whole), size):
        answers.add(whole[at : at + size])
        while (answer := answers.take()) is not None:
            taken.append(answer)
    assert taken == [[b"subscribe", b"a", b"12"], [b"pong", b""]]


@pytest.mark.parametrize("data", [b":1\r\n", b"+OK\r\n", b"*1\r\n:1\r\n", b"$3\r\nabc\r\n"])
def test_what_no_script_of_ours_answers_is_refused(data: bytes) -> None:
    answers = Answers()
    answers.add(data)
    with pytest.raises(StorageError, match="an answer that is none"):
        answers.take()
