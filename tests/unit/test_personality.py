"""Personality packs: read, refused, selected, reloaded; and what a turn takes from one."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core._core.codec.typed import codec_for
from agent_runtime_core.errors import InvalidArgument, UnknownSetting, UnknownTool
from agent_runtime_core.limits import RunLimits
from agent_runtime_core.testing import MockLLMClient, VirtualClock
from agent_runtime_core.tools import ToolRegistry, tool
from agent_runtime_core.turns import MemorySettings, PersonalityInstance, PersonalityPackManager, Sampling
from agent_runtime_core.turns.personality import Reading, read_until_stable
from tests.support.cases import for_each

FULL = """
name = "helper"
description = "Helps with orders."
provider = "openai"
model = "gpt-4o-mini"
temperature = 0.2
top_p = 0.9
max_tokens = 500
tools = ["search", "add"]
system = "system.md"
default = true

[prompts]
greeting = "greeting.md"
parting = "greeting.md"

[memory]
history_messages = 20
history_tokens = 4000
remember = false

[limits]
max_turns = 5
max_cost_usd = 0.5
"""


def write(folder: Path, name: str = "helper", text: str | None = None, **files: str) -> Path:
    home = folder / name
    home.mkdir(parents=True, exist_ok=True)
    (home / "pack.toml").write_text(f'name = "{name}"\n' if text is None else text)
    for file, content in files.items():
        (home / f"{file}.md").write_text(content)
    return home


def full(folder: Path) -> Path:
    return write(folder, "helper", FULL, system="You help {{customer}}.", greeting="Hello {{ customer }}!")


@tool
def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@tool
def search(text: str) -> str:
    """Searches."""
    return text


@tool
def delete() -> None:
    """Deletes all."""


def registry(*tools: Any) -> ToolRegistry:
    made = ToolRegistry()
    for each in tools:
        made.register(each)
    return made


def test_a_pack_with_everything(tmp_path: Path) -> None:
    full(tmp_path)
    manager = PersonalityPackManager(tmp_path)
    assert manager.get() == PersonalityInstance(
        name="helper",
        description="Helps with orders.",
        system_prompt="You help {{customer}}.",
        prompts={"greeting": "Hello {{ customer }}!", "parting": "Hello {{ customer }}!"},
        tools=("search", "add"),
        provider="openai",
        model="gpt-4o-mini",
        sampling=Sampling(temperature=0.2, top_p=0.9, max_tokens=500),
        memory=MemorySettings(history_messages=20, history_tokens=4000, remember=False),
        limits=RunLimits(max_turns=5, max_cost_usd=0.5),
        default=True,
        version=1,
    )
    assert manager.list_packs() == [manager.get("helper")]


def test_a_pack_with_a_name_only(tmp_path: Path) -> None:
    write(tmp_path)
    instance = PersonalityPackManager(tmp_path).get()
    assert instance == PersonalityInstance(name="helper")
    assert (instance.tools, instance.memory, instance.prompt()) == (None, MemorySettings(), "")


def test_without_a_folder_there_is_one() -> None:
    manager = PersonalityPackManager()
    assert [each.name for each in manager.list_packs()] == ["default"]
    assert manager.get() is manager.select({}) is manager.select(None) is manager.get("default")
    assert manager.reload() is False
    with pytest.raises(InvalidArgument, match=r"unknown personality 'defalt'\. Did you mean 'default'\?"):
        manager.get("defalt")


def test_an_instance_is_frozen_and_known_by_its_content(tmp_path: Path) -> None:
    full(tmp_path / "one")
    full(tmp_path / "other")
    one, other = (PersonalityPackManager(tmp_path / each).get() for each in ("one", "other"))
    assert one.digest == other.digest
    assert dataclasses.replace(one, version=7).digest == one.digest
    assert dataclasses.replace(one, model="x").digest != one.digest
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.model = "x"  # type: ignore[misc]


def test_an_instance_keeps_its_form_as_a_recorded_value(tmp_path: Path) -> None:
    full(tmp_path)
    instance = PersonalityPackManager(tmp_path).get()
    encode, decode = codec_for(PersonalityInstance)
    assert decode(encode(instance)) == instance
    json.loads(encode(instance))


async def test_the_sampling_is_what_a_client_takes() -> None:
    client = MockLLMClient(responses=["yes"])
    options = Sampling(temperature=0.5, max_tokens=7).options()
    assert options == {"temperature": 0.5, "max_tokens": 7}
    assert Sampling().options() == {}
    await client.generate([{"role": "user", "content": "?"}], **options)


# -- choosing one


@pytest.mark.sentence(
    "001", "TurnManager: accept `TurnEvent` from API layer, attach `trace_id`, pick personality, load session context"
)
def test_a_turn_names_its_personality_or_gets_the_default(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b", 'name = "b"\ndefault = true\n')
    manager = PersonalityPackManager(tmp_path)
    assert manager.select({"personality": "a", "other": 1}).name == "a"
    assert manager.select({"personality": None}).name == manager.select().name == "b"
    assert manager.current.names() == ["a", "b"]
    with pytest.raises(InvalidArgument, match="personality must be the name of a personality, got 3"):
        manager.select({"personality": 3})
    assert PersonalityPackManager(tmp_path, default="a").get().name == "a"
    with pytest.raises(InvalidArgument, match="unknown default personality 'c'"):
        PersonalityPackManager(tmp_path, default="c")


def test_the_only_pack_is_the_default(tmp_path: Path) -> None:
    write(tmp_path, "only")
    assert PersonalityPackManager(tmp_path).get().name == "only"


def test_one_pack_must_be_the_default_and_one_only(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b")
    with pytest.raises(InvalidArgument, match="must have default = true, got none of a, b"):
        PersonalityPackManager(tmp_path)
    write(tmp_path, "a", 'name = "a"\ndefault = true\n')
    write(tmp_path, "b", 'name = "b"\ndefault = true\n')
    with pytest.raises(InvalidArgument, match="must have default = true, got a, b"):
        PersonalityPackManager(tmp_path)


# -- its tools


@pytest.mark.sentence(
    "001",
    "`TurnManager` fetches the desired `PersonalityInstance` and passes its system-prompt & tools to `PlanExecutor`",
)
def test_a_personality_has_the_tools_it_allows() -> None:
    every = registry(delete, add, search)

    def names(tools: tuple[str, ...] | None) -> list[str]:
        allowed = PersonalityInstance(name="a", tools=tools).allowed(every)
        return [each.name for each in allowed.list_tools()]

    assert names(None) == ["delete", "add", "search"]
    assert names(()) == []
    assert names(("search", "add")) == ["search", "add"]
    assert [each.name for each in every.list_tools()] == ["delete", "add", "search"]


async def test_a_tool_that_is_not_allowed_cannot_be_called() -> None:
    allowed = PersonalityInstance(name="a", tools=("add",)).allowed(registry(delete, add))
    assert await allowed.execute("add", {"a": 1, "b": 2}) == 3
    with pytest.raises(UnknownTool, match="unknown tool 'delete'"):
        await allowed.execute("delete", {})


def test_an_allowed_tool_that_is_not_registered_is_named_when_the_pack_is_taken(tmp_path: Path) -> None:
    write(tmp_path, "a", 'name = "a"\ntools = ["serch"]\n')
    tools = registry(search)
    manager = PersonalityPackManager(tmp_path, tools=tools)
    for take in (manager.get, manager.select):
        with pytest.raises(UnknownTool, match=r"personality 'a' allows .* tool 'serch'. Did you mean 'search'\?"):
            take()
    tools.register(dataclasses.replace(search, name="serch"))
    assert manager.get().name == "a"


# -- its prompts


def test_only_names_in_braces_are_replaced(tmp_path: Path) -> None:
    full(tmp_path)
    instance = PersonalityPackManager(tmp_path).get()
    assert instance.prompt(values={"customer": "Ada"}) == "You help Ada."
    assert instance.prompt("greeting", {"customer": "{{customer}} {0.__class__} %s $x"}) == (
        "Hello {{customer}} {0.__class__} %s $x!"
    )
    with pytest.raises(
        InvalidArgument, match=r"must have a value for \{\{customer\}\} of the prompt, got values for na"
    ):
        instance.prompt(values={"name": "Ada"})
    with pytest.raises(InvalidArgument, match=r"unknown prompt 'greting'\. Did you mean 'greeting'"):
        instance.prompt("greting")


@for_each(
    "text",
    ["{{a.b}}", "{{a[0]}}", "{{ a|b }}", "{{a()}}", "{a}", "{{}}", "{{ä}}", "{% a %}", "${a}", "{{1}}", "{{a\n}}"],
)
def test_what_is_no_name_in_braces_stays(text: str) -> None:
    assert PersonalityInstance(name="a", system_prompt=text).prompt(values={"a": "x", "b": "y"}) == text


def test_values_are_texts_or_numbers() -> None:
    instance = PersonalityInstance(name="a", system_prompt="{{x}}")
    assert [instance.prompt(values={"x": value}) for value in ("a", 3, 0.5)] == ["a", "3", "0.5"]
    bad: list[Any] = [None, True, ["a"], object()]
    for value in bad:
        with pytest.raises(InvalidArgument, match=r"the value of \{\{x\}\} must be a string or a number"):
            instance.prompt(values={"x": value})


# -- what is refused


@for_each(
    ("text", "message"),
    [
        ("", "helper/pack.toml: name must be set, got no name. Add name = 'helper'"),
        ("name = 'other'", "helper/pack.toml: name must be the name of its folder 'helper', got 'other'"),
        ("name = '../x'", r"helper/pack.toml: name must be .*, got '../x'"),
        (
            "name = 'helper'\ntemprature = 1",
            r"helper/pack\.toml: unknown setting 'temprature'\. Did you mean 'temperature'\?",
        ),
        ("name = 'helper'\ntemperature = 3", "temperature must be a number from 0 to 2.*, got 3"),
        ("name = 'helper'\ntemperature = nan", "temperature must be .*, got nan"),
        ("name = 'helper'\ntop_p = '1'", "top_p must be a number from 0 to 1.*, got '1'"),
        ("name = 'helper'\nmax_tokens = 0.5", "max_tokens must be an integer of at least 1.*, got 0.5"),
        ("name = 'helper'\nmodel = ''", r"helper/pack\.toml: model must be a non-empty string, got ''"),
        ("name = 'helper'\ntools = 'add'", "tools must be a list.*, got 'add'"),
        ("name = 'helper'\ntools = ['a', 'a']", "tools must be .* each once, got"),
        ("name = 'helper'\ntools = ['']", "tools must be a list of the names"),
        ("name = 'helper'\ndefault = 1", "default must be true or false.*, got 1"),
        ("name = 'helper'\nprompts = 1", "prompts must be a table.*, got '.*'"),
        (
            "name = 'helper'\n[memory]\nhistory = 1",
            r"helper/pack\.toml: \[memory\]: unknown setting 'history'\. Did you mean 'history_tokens'\?",
        ),
        (
            "name = 'helper'\n[memory]\nhistory_messages = -1",
            r"\[memory\] history_messages must be an integer of at least 0, got -1",
        ),
        (
            "name = 'helper'\n[memory]\nhistory_tokens = 0",
            r"\[memory\] history_tokens must be an integer of at least 1, got 0",
        ),
        ("name = 'helper'\n[memory]\nremember = 'no'", r"\[memory\] remember must be .*true or false.*, got 'no'"),
        (
            "name = 'helper'\n[limits]\nmax_turn = 1",
            r"helper/pack\.toml: \[limits\]: unknown limit 'max_turn'\. Did you mean 'max_turns'\?",
        ),
        (
            "name = 'helper'\n[limits]\nmax_turns = 0",
            r"helper/pack.toml: \[limits\] max_turns must be an integer of at least 1",
        ),
        ("name = 'helper'\nsystem = 'gone.md'", "helper/gone.md not found"),
        ("name = 'helper'\n[prompts]\na = 'gone.md'", "helper/gone.md not found"),
        ("name = 'helper'\n[prompts]\nsystem = 'system.md'", r"\[prompts\] system must be the top-level key system"),
        ("name = 'helper'\n[prompts]\na = 1", r"\[prompts\] a must be the name of a file.*, got 1"),
        ("name = 'helper'\nsystem = '../secret'", "system must be .*file in the pack's own folder.*, got '../secret'"),
        (
            "name = 'helper'\nsystem = '/etc/passwd'",
            "system must be .*file in the pack's own folder.*, got '/etc/passwd'",
        ),
        ("name = 'helper'\nsystem = '..'", "system must be .*file in the pack's own folder.*, got '..'"),
        ("name = 'helper'\nsystem = 'C:x'", "system must be .*file in the pack's own folder.*, got 'C:x'"),
        ("name = 'helper'\nsystem = '..\\x'", "file in the pack's own folder"),
        ('name = "helper"\nsystem = "a\\u0000b"', "file in the pack's own folder"),
        ("name = 'helper'\nsystem = 'sub'", "helper/sub must be a regular file"),
        ("name = 'helper'\nsystem = 'link.md'", "helper/link.md must be inside its folder"),
        ("name = 'helper'\nsystem = 'long.md'", "helper/long.md must have at most 262,144 bytes"),
        ("name = 'helper'\nsystem = 'latin.md'", "helper/latin.md must be UTF-8, got .* at byte 1"),
        ("name = 'helper'\nsystem = 'empty.md'", "helper/empty.md must not be empty"),
        ("name = 'helper'\nsystem =", "helper/pack.toml must be valid TOML"),
    ],
)
def test_a_pack_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    home = write(tmp_path / "packs", "helper", text, long="x" * 300_000, empty=" \n")
    (home / "sub").mkdir()
    (home / "latin.md").write_bytes(b"a\xe9")
    (tmp_path / "secret").write_text("secret")
    (home / "link.md").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidArgument, match=message) as caught:
        PersonalityPackManager(tmp_path / "packs")
    assert isinstance(caught.value, UnknownSetting) == ("unknown " in message)


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="gone must be readable, got an error: No such file"):
        PersonalityPackManager(tmp_path / "gone")
    with pytest.raises(InvalidArgument, match="must contain at least one pack"):
        PersonalityPackManager(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match=r"empty/pack\.toml not found"):
        PersonalityPackManager(tmp_path)


def test_what_is_no_pack_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path)
    for name in (".git", "__pycache__"):
        (tmp_path / name).mkdir()
    (tmp_path / "README.md").write_text("Packs.")
    assert PersonalityPackManager(tmp_path).current.names() == ["helper"]


def test_a_pack_is_not_taken_from_elsewhere_and_links_inside_are_followed(tmp_path: Path) -> None:
    packs = tmp_path / "packs"
    home = write(packs / ".v1", "helper", 'name = "helper"\nsystem = "system.md"\n', real="Hello.")
    (home / "system.md").symlink_to("real.md")
    (packs / "helper").symlink_to(".v1/helper")
    assert PersonalityPackManager(packs).get().system_prompt == "Hello."
    write(tmp_path, "outside")
    (packs / "outside").symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidArgument, match="personality 'outside' must be inside"):
        PersonalityPackManager(packs)


def test_nothing_in_a_pack_is_executed(tmp_path: Path) -> None:
    home = full(tmp_path)
    for file in ("__init__.py", "pack.py", "tools.py", "conftest.py"):
        (home / file).write_text("raise SystemExit('executed')")
    (home / "system.md").write_text("{{customer}} {{__import__('os').system('touch executed')}}")
    instance = PersonalityPackManager(tmp_path).get()
    assert "__import__" in instance.prompt(values={"customer": "Ada"})
    assert not (tmp_path / "executed").exists()


# -- reloading


def test_a_reload_takes_what_has_changed_and_nothing_else(tmp_path: Path) -> None:
    home = full(tmp_path)
    write(tmp_path, "other")
    manager = PersonalityPackManager(tmp_path)
    before, other = manager.get(), manager.get("other")
    assert manager.reload() is False
    os.utime(home / "pack.toml", (1, 1))
    (home / "notes.txt").write_text("Not of the pack.")
    (home / "pack.toml").write_text(f"# A comment.\n{FULL}")
    assert manager.reload() is False
    assert manager.get() is before
    (home / "system.md").write_text("You help {{customer}}!")
    assert manager.reload() is True
    assert (manager.get().system_prompt, manager.get().version) == ("You help {{customer}}!", 2)
    assert manager.get("other") is other
    assert before.system_prompt == "You help {{customer}}."


def test_packs_come_and_go(tmp_path: Path) -> None:
    full(tmp_path)
    manager = PersonalityPackManager(tmp_path)
    home = write(tmp_path, "second")
    assert manager.reload() is True
    assert manager.current.names() == ["helper", "second"]
    (home / "pack.toml").unlink()
    home.rmdir()
    assert manager.reload() is True
    assert manager.current.names() == ["helper"]


def test_a_pack_that_breaks_stays_as_it_was_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = full(tmp_path)
    write(tmp_path, "other")
    manager = PersonalityPackManager(tmp_path)
    before = manager.get()
    (home / "system.md").unlink()
    write(tmp_path, "other", 'name = "other"\nmodel = "m"\n')
    assert [manager.reload(), manager.reload()] == [True, False]
    assert manager.get() is before
    assert manager.get("other").model == "m"
    assert [(name, str(error)) for name, error in manager.errors.items()] == [
        ("helper", "helper/system.md not found. Create it.")
    ]
    assert len(caplog.records) == 1
    full(tmp_path)
    assert manager.reload() is False
    assert manager.errors == {}
    assert manager.get() is before


def test_a_new_pack_that_is_broken_is_left_out_until_it_is_good(tmp_path: Path) -> None:
    full(tmp_path)
    manager = PersonalityPackManager(tmp_path)
    write(tmp_path, "second", "")
    assert manager.reload() is False
    assert list(manager.errors) == ["second"]
    with pytest.raises(InvalidArgument, match="unknown personality 'second'"):
        manager.get("second")
    write(tmp_path, "second")
    assert manager.reload() is True
    assert manager.get("second").version == 1


def test_packs_that_do_not_agree_stay_as_they_were(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, "a", 'name = "a"\ndefault = true\n')
    write(tmp_path, "b")
    manager = PersonalityPackManager(tmp_path)
    before = manager.current
    write(tmp_path, "b", 'name = "b"\ndefault = true\n')
    assert [manager.reload(), manager.reload()] == [False, False]
    assert manager.current is before
    assert "got a, b" in str(manager.errors[""])
    assert len(caplog.records) == 1
    write(tmp_path, "a")
    assert manager.reload() is True
    assert (manager.get().name, manager.errors) == ("b", {})
    (tmp_path / "a" / "pack.toml").rename(tmp_path / "kept.toml")
    tmp_path.rename(tmp_path.with_name("moved"))
    assert manager.reload() is False
    assert "must be readable" in str(manager.errors[""])
    assert manager.get().name == "b"


async def test_a_watched_folder_may_go_and_come_back(tmp_path: Path) -> None:
    packs, clock = tmp_path / "packs", VirtualClock()
    full(packs)
    manager = PersonalityPackManager(packs, clock=clock)
    watcher = asyncio.create_task(manager.watch(interval=5))

    async def look(seconds: float) -> None:
        await clock.until_sleeping()
        clock.advance(seconds)
        await clock.until_sleeping()

    await look(0.1)
    packs.rename(tmp_path / "away")
    await look(5)
    await look(0.1)
    assert "must be readable" in str(manager.errors[""])
    assert manager.get().name == "helper"
    (tmp_path / "away" / "helper" / "system.md").write_text("Back.")
    (tmp_path / "away").rename(packs)
    await look(5)
    await look(0.1)
    assert (manager.get().system_prompt, manager.errors) == ("Back.", {})
    watcher.cancel()
    await asyncio.wait({watcher})


def test_files_that_change_with_every_reading_are_not_taken() -> None:
    numbers = itertools.count()
    reading = read_until_stable(lambda: Reading({"pack.toml": b"%d" % next(numbers)}), "personality 'helper'")
    assert (
        reading.problem
        == "personality 'helper' must not change while it is read, got 5 different versions. Load it again."
    )
    assert next(numbers) < 20


async def test_watching_a_folder(tmp_path: Path) -> None:
    home, clock = full(tmp_path), VirtualClock()
    manager = PersonalityPackManager(tmp_path, clock=clock)
    watcher = asyncio.create_task(manager.watch(interval=5))

    async def look(seconds: float) -> None:
        await clock.until_sleeping()
        clock.advance(seconds)
        await clock.until_sleeping()

    await look(0.1)
    (home / "pack.toml").write_text(FULL.replace("system.md", "new.md"))  # the first file of an edit of two
    await look(5)
    (home / "new.md").write_text("New.")
    await look(0.1)
    assert (manager.get().version, manager.errors) == (1, {})
    await look(0.1)
    watcher.cancel()
    await asyncio.wait({watcher})
    assert (manager.get().system_prompt, manager.get().version, manager.errors) == ("New.", 2, {})
