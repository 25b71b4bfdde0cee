"""JSON values in the answers of models: which parts of a text are candidates, and in which order."""

from __future__ import annotations

import pytest

from agent_runtime_core.tools import structured_output
from tests.support.cases import for_each

A = '{"a": "x"}'
NESTED = '{"a": {"b": [1, {"c": "} ] \\" {"}]}}'


def json_texts(text: str) -> list[str]:
    answers, thoughts = structured_output.json_texts(text)
    return answers + thoughts


@for_each(
    "text",
    [
        A,
        f"\n {A} \n",
        f"```json\n{A}\n```",
        f"```JSON\n{A}```",
        f"``` json\n{A}\n```",
        f"```\n{A}\n```",
        f"~~~\n{A}\n~~~",
        f"~~~json\n{A}\n~~~",
        f"````json\n{A}\n````",
        f"```json {A} ```",
        f"Here is the JSON: {A}",
        f"Here is the JSON:{A}. I hope it helps!",
        f"Here it is:\n\n```json\n{A}\n```\nThat's it.",
        f"Here it is:\n\n   ```json5\n   {A}\n   ```\nThat's it.",
        f"Here it is:\n~~~\n{A}\n~~~\nThat's it.",
        f"{A}\n\nThis is the answer [1].",
        f"<think>Which letter? {{a}} or [b]?</think>{A}",
        f"<think>\nIt may be {{'a': 1}}\n</think>\n\n{A}\n",
        f'<thinking>The quote " is open: {{"a": </thinking>{A}',
        f"<THINK>x</THINK>{A}",
        f"<reasoning>x</reasoning>\n```json\n{A}\n```",
        f'<think>A draft: {{"a": "draft"}}</think>{A}',
        f'A draft: {{"a": "draft"}}\n</think>\n{A}',
        f'<think>{{"a": "draft"}}</think>Then <think>{{"a": "draft 2"}}</think>{A}',
        f'<seed:think>A draft: {{"a": "draft"}}</seed:think>{A}',
        f'<think duration="3">A draft: {{"a": "draft"}}</think>{A}',
        f'[THINK]A draft: {{"a": "draft"}}[/THINK]{A}',
        f'\u25c1think\u25b7A draft: {{"a": "draft"}}\u25c1/think\u25b7{A}',
        f'<|channel>thought\nA draft: {{"a": "draft"}}<channel|>{A}',
        f'<|channel|>analysis<|message|>{{"a": "draft"}}<|end|><|start|>assistant<|channel|>final<|message|>{A}',
        f"<think>The answer is {A}</think>",
        f"<think>The answer is {A}",
        f"<think>{A}",
        f'The format is {{"a": ...}}. So: {A}',
        f"The set {{x | x > 1}} and the citation [see 1], then {A}",
        f"[not sure] {A}",
        f"[TODO: this] {A}",
        f"{{{{ template }}}} {A}",
        f"It's 5\" wide: {A}",
    ],
)
def test_the_likeliest_value_is_the_answer(text: str) -> None:
    found = [each for each in json_texts(text) if each[:2] == '{"' and each[-1] == "}" and "..." not in each]
    assert found[0] == A


@for_each(
    "text",
    [
        f'{{"outer": {A}, "rest": ',
        f'{{"outer": {A}, "rest": oops }}',
        f"{{'outer': {A}}}",
        f"{{outer: {A}}}",
        f'{{\n  // a comment\n  "outer": {A}}}',
        f'{{\n  /* a comment */\n  "outer": {A}}}',
        f"Here: [{A}, {A}",
        f'Here: {{"x": "an example {A[:5]} [1, 2]',
        f'Here: {{"list": [1, 2], "n": None, "more": {A}}}',
        f'```json\n{{"outer": {A}, \n```',
        f"[1, 2, {A} 3]",
        f"[1 2 {A}]",
        f'{{"a": [1, {A}}}, "b": 1}}',
    ],
)
def test_a_part_of_a_larger_value_is_never_returned(text: str) -> None:
    found = json_texts(text)
    assert A not in found
    assert "[1, 2]" not in found


def test_values_in_order() -> None:
    text = f'{A} and {NESTED}, <think>[1]</think> then [2, 3] and\n```\n"text"\n```\n'
    assert json_texts(text)[1:] == [A, NESTED, "[2, 3]", '"text"', text[text.index("</think>") + 8 :].strip(), "[1]"]


def test_a_tag_inside_of_a_value_is_part_of_it() -> None:
    value = '{"html": "<think>{\\"a\\": 1}</think>"}'
    assert json_texts(f"Here: {value}")[1:] == [value]
    assert json_texts(value) == [value]


def test_a_value_that_is_no_object_or_array() -> None:
    assert json_texts('"text"') == ['"text"']
    assert json_texts('"[1]"') == ['"[1]"', "[1]"]  # some models encode the value twice
    assert json_texts("<think>Say yes.</think>\n\ntrue\n")[1:] == ["true"]
    assert json_texts("Here:\n```json\n42\n```")[1:] == ["42"]
    assert json_texts("```\n42\n```") == ["42"]
    assert json_texts("plain words") == ["plain words"]
    assert json_texts("") == [""]


@pytest.mark.parametrize(
    "part",
    [
        "{",
        "[",
        '{"',
        '["',
        '{"a":',
        "[1,",
        '{"a":"\\"',
        "[[",
        "{}",
        "<think>",
        "</think>",
        "<think ",
        "<seed:think",
        "[think]",
        "<|channel|>final",
        "```\n",
        '"',
        '\\"',
        "{'a': ",
        "\n```{ ",
    ],
)
def test_a_hostile_text_ends(part: str) -> None:
    # Quadratic time would take hours, and the test would reach its time limit.
    assert json_texts(part * (4 * 1024 * 1024 // len(part)))
    assert A in json_texts(f"{A} {part * 300_000}") or part == "</think>"
