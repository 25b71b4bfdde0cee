"""Text of users and models: no pattern takes more than linear time, no number of digits an untyped error, and no
reference more memory than a step's input may have."""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import agent_runtime_core
from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.planning import PlanningError, PlanStep, RuleBasedPlanner, built_in_tools, references, resolve
from agent_runtime_core.planning.executor import step_input
from agent_runtime_core.planning.references import _to_text as plain_text
from agent_runtime_core.tools.arguments import read_arguments
from agent_runtime_core.tools.registry import ToolRegistry
from agent_runtime_core.tools.tool import tool
from agent_runtime_core.turns.personality import fill

HANG = 120  # seconds: a ceiling that only catches a hang
LENGTH = 2_500  # characters; a quadratic pattern takes a sixteenth of a second for each text, a cubic one minutes
PIECES = [
    " ", "\n", "\r", "\u2003", "\u2028", "2", "2 ", "2\r", "2,", "a", "a ", "a,", "a.", "A1", "!", ".", ",", "=", "= ",
    ":", "-", "@", "/", "://", "://a", "://a:", "{{", "{{ ", "{{step_1.result", ".a", "%", "(", "\"", "'", "_", ";",
    "1,000,", "0.", "1e", "data:", "data:a;", "password=", "the ", "please ", "and ", "then ", "sk-a", "model ", "ä",
    "\ud800", "٣", "#", "[", "to-do ", "inf ",
]  # fmt: skip


def patterns() -> dict[str, re.Pattern[Any]]:
    """All compiled patterns that a module of the package holds, also inside its tuples, lists and dicts."""
    found: dict[str, re.Pattern[Any]] = {}
    for module in pkgutil.walk_packages(agent_runtime_core.__path__, "agent_runtime_core."):
        if module.name.endswith("__main__"):
            continue
        try:
            names = vars(importlib.import_module(module.name))
        except ImportError:  # an extra is missing
            continue
        for name, value in names.items():
            if not name.startswith("__"):
                found.update((f"{module.name}.{place}", each) for place, each in inside(name, value))
    return found


def inside(place: str, value: object, depth: int = 3) -> Iterator[tuple[str, re.Pattern[Any]]]:
    if isinstance(value, re.Pattern):
        yield place, value
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            yield from inside(f"{place}[{key!r:.20}]", item, depth - 1)
    elif depth and isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from inside(f"{place}[{number}]", item, depth - 1)


def methods_of(place: str) -> set[str]:
    """The methods with which the package uses a pattern: those of its name in its module, else anywhere."""
    module, _, name = place.rpartition(".")
    own = Path(str(sys.modules[module].__file__)).read_text()
    for source in (calls(own), every_call()):
        if used := {method for called, method in source if called == name.partition("[")[0]}:
            return used
    return {"match", "fullmatch", *(["sub"] if name.startswith("_PHRASES") else [])}  # of a list, or passed on


def calls(source: str) -> set[tuple[str, str]]:
    """Names with the methods of a pattern that are called on them."""
    return set(re.findall(r"(?<![A-Za-z_0-9])([A-Za-z_]\w*)\.(search|match|fullmatch|finditer|sub|split)\(", source))


@functools.cache
def every_call() -> set[tuple[str, str]]:
    return calls("".join(path.read_text() for path in Path(agent_runtime_core.__path__[0]).rglob("*.py")))


def hostile(pattern: re.Pattern[Any]) -> Iterator[Any]:
    """Long texts that nearly match: runs of one piece, of the pattern's own words, and these after one of the words."""
    source = pattern.pattern.decode() if isinstance(pattern.pattern, bytes) else pattern.pattern
    words = sorted(set(re.findall(r"[A-Za-z]{2,}(?: [a-z]+)*", re.sub(r"\\.", " ", source))))[:40]
    pieces = [*PIECES, *words, *(f"{word} " for word in words)]
    texts = [
        before + piece * (LENGTH // len(piece)) + after
        for piece in pieces
        for before in ("", "2", "a")
        for after in ("", "!x")
    ]
    texts += [
        f"{word} {piece * (LENGTH // len(piece))}{after}"
        for word in words[:20]
        for piece in (" ", "a", "1")
        for after in ("1", "\0")
    ]
    yield from (
        (each.encode("utf-8", "surrogatepass") for each in texts) if isinstance(pattern.pattern, bytes) else texts
    )


def run_all() -> None:
    """Print each pattern before it runs, so that the last line names one that hangs."""
    for place, pattern in patterns().items():
        sys.stdout.write(f"{place} {pattern.pattern!a:.100}\n")
        sys.stdout.flush()
        for method in methods_of(place):
            for text in hostile(pattern):
                empty = text[:0]
                found = pattern.sub(empty, text) if method == "sub" else getattr(pattern, method)(text)
                if isinstance(found, Iterable) and method == "finditer":
                    list(found)


def test_no_pattern_takes_more_than_linear_time() -> None:
    found = patterns()
    assert len(found) > 60
    assert any(".planning.rule_planner." in place for place in found)
    run_apart("from tests.unit.test_untrusted_text import run_all; run_all()")


def run_apart(code: str) -> None:
    """Run it in a process that can be ended: nothing stops a pattern at work in this one."""
    root = Path(__file__).parents[2]
    try:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=root, timeout=HANG, capture_output=True, text=True, check=False)
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"more than {HANG} s for {(late.stdout or b'').decode().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-2000:]


def prompts() -> Iterator[str]:
    for piece in (
        *PIECES,
        "thank you ",
        "add 2 and ",
        "2 + ",
        "the result ",
        "remind me to ",
        "to-do ",
        "mark a ",
        "one hundred and ",
    ):
        for before, after in (
            ("", ""),
            ("2", "x"),
            ("add ", "1"),
            ("remind me to ", " as done"),
            ("put ", " on my list x"),
        ):
            text = before + piece * 2000
            yield text[: 2000 - len(after)] + after


async def plan_all() -> None:
    planner, tools = RuleBasedPlanner(), built_in_tools()
    for prompt in prompts():
        sys.stdout.write(f"{prompt!a:.60}\n")
        sys.stdout.flush()
        with contextlib.suppress(PlanningError):
            await planner.create_plan(prompt, tools)


def test_no_prompt_keeps_the_rules_busy() -> None:
    run_apart("import asyncio; from tests.unit.test_untrusted_text import plan_all; asyncio.run(plan_all())")


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [
        (
            "add 2 and 3\r\n\r\nthen multiply by 4",
            [{"operation": "add", "a": 2, "b": 3}, {"operation": "multiply", "a": "{{step_1.result}}", "b": 4}],
        ),
        ("add 2\u2003\u2003and \u2003 3, please, thanks!", [{"operation": "add", "a": 2, "b": 3}]),
        ("what is 2 + 3 = equals please?", [{"operation": "add", "a": 2, "b": 3}]),
        ("add the following two numbers 2 and 3", [{"operation": "add", "a": 2, "b": 3}]),
        ("put milk", [{"action": "add", "text": "milk"}]),
    ],
)
async def test_white_space_and_polite_words_change_nothing(prompt: str, wanted: list[Any]) -> None:
    plan = await RuleBasedPlanner().create_plan(prompt, built_in_tools())
    assert [step.tool_input for step in plan.steps] == wanted


# -- references


@pytest.mark.parametrize("digits", [1, 18, 19, 400, 4301, 100_000])
def test_an_index_of_any_length_is_a_typed_error(digits: int) -> None:
    with pytest.raises(InvalidArgument, match="unknown field") as failure:
        resolve({"a": f"{{{{step_1.result.{'9' * digits}}}}}"}, {1: [1]})
    assert len(str(failure.value)) < 400


@pytest.mark.parametrize(
    "planned",
    [
        {"text": "{{step_1.result}}" * 1500},
        {"texts": ["{{step_1.result}}"] * 1500},
        {"text": ["a {{step_1.result}}"] * 1500},
        {f"a{number}": "{{step_1.result.x}}" for number in range(1500)},
    ],
)
@pytest.mark.parametrize("result", ["x" * 900_000, {"x": ["x" * 900_000]}])
def test_results_are_counted_before_they_are_put_together(
    planned: dict[str, Any], result: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(result, str):
        planned = {name: str(value).replace(".x}}", "}}") for name, value in planned.items()}
    made: list[object] = []

    def counted(value: Any) -> str:
        made.append(value)
        return plain_text(value)

    monkeypatch.setattr(references, "_to_text", counted)
    with pytest.raises(InvalidArgument, match=r"at most 16,777,216 characters together.*Refer to fewer"):
        resolve(planned, {1: result})
    assert len(made) == 19  # the first that would pass the limit ends it


def test_an_input_below_the_limit_is_filled() -> None:
    @tool
    def take(text: str) -> str:
        "Takes a text."
        return text

    tools = ToolRegistry()
    tools.register(take)
    step = PlanStep(2, "take", {"text": "{{step_1.result}}" * 10}, "", depends_on=[1])
    assert step_input(step, {1: "x" * 900_000}, tools)["text"] == "x" * 9_000_000


def test_a_prompt_is_counted_before_it_is_filled() -> None:
    with pytest.raises(InvalidArgument, match="at most 16,777,216 characters"):
        fill("{{ a }}" * 100, {"a": "x" * 900_000})
    assert fill("{{ a }} {{a}}", {"a": 1}) == "1 1"


# -- numbers


@pytest.mark.parametrize("text", ["9007199254740993.0", "9007199254740992.0", "9007199254740993e0", "1e300"])
async def test_a_float_that_may_be_another_integer_is_rejected(text: str) -> None:
    @tool
    def take(n: int) -> int:
        "Takes a number."
        return n

    tools = ToolRegistry()
    tools.register(take)
    arguments = read_arguments(f'{{"n": {text}}}')
    with pytest.raises(Exception, match="n must be an integer"):
        await tools.execute("take", arguments)
    assert await tools.execute("take", read_arguments('{"n": 9007199254740991.0}')) == 9007199254740991
    assert await tools.execute("take", read_arguments('{"n": 9007199254740993}')) == 9007199254740993
