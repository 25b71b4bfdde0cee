"""config.toml: its order among the sources, what is refused, and how it is read again."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import portal
from agent_runtime_core._core.clock import Clock
from agent_runtime_core.config import RuntimeConfig, get_config
from agent_runtime_core.errors import InvalidArgument, UnknownSetting
from agent_runtime_core.testing import VirtualClock
from agent_runtime_core.turns import ConfigChanged, ConfigLoader, ProviderSettings, ProviderSteps, TurnSettings

FULL = """
[runtime]
default_model = "gpt-4o-mini"
max_retries = 5
trace_sinks = ["noop"]

[model_prices."gpt-4o"]
input = 2.5
output = 10

[turns]
max_in_flight = 4
remote_steps = true
max_unsent_bytes = 65536

[providers.openai]
api_key = "sk-secret"
base_url = "https://user:secret@example.org/v1"
organization = "org-1"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def loader_of(path: Path, text: str = "", environ: dict[str, str] | None = None) -> ConfigLoader:
    path.write_text(text)
    return ConfigLoader(path, environ={} if environ is None else environ)


def pack(folder: Path, name: str, text: str = "") -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "pack.toml").write_text(f'name = "{name}"\n{text}')


@pytest.mark.sentence(
    "001", "ConfigLoader: load & hot-reload `config.toml`, env-vars, personality defaults; expose typed settings"
)
def test_every_section_becomes_one_typed_value(path: Path) -> None:
    settings = loader_of(path, FULL).current
    assert settings.version == 1
    assert settings.runtime == RuntimeConfig(
        default_model="gpt-4o-mini",
        max_retries=5,
        trace_sinks=("noop",),
        model_prices={"gpt-4o": {"input": 2.5, "output": 10}},
        max_unsent_bytes=65536,
    )
    assert settings.turns == TurnSettings(max_in_flight=4, remote_steps=True, max_unsent_bytes=65536)
    openai = settings.providers["openai"]
    assert openai.options() == {
        "api_key": "sk-secret",
        "base_url": "https://user:secret@example.org/v1",
        "organization": "org-1",
    }
    assert settings.packs.names() == ["default"]


def test_without_a_file_there_are_the_defaults_and_the_environment() -> None:
    settings = ConfigLoader(None, environ={"AGENT_RUNTIME_MAX_RETRIES": "9"}).current
    assert settings.runtime == RuntimeConfig(max_retries=9)
    assert settings.turns == TurnSettings(max_in_flight=16, remote_steps=False, max_unsent_bytes=131072)


def test_an_empty_file_is_all_defaults(path: Path) -> None:
    assert loader_of(path).current.runtime == RuntimeConfig()


def test_the_environment_of_the_process_is_the_default(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.touch()
    loader = ConfigLoader(path)
    monkeypatch.setenv("AGENT_RUNTIME_PARK_AFTER", "1.5")
    assert loader.reload() is True
    assert loader.current.runtime.park_after == 1.5


# Each source of the same two settings, lowest first; the value that holds is that of the last one given.
SOURCES = ("pack", "file", "environment", "program")


@pytest.mark.sentence(
    "001", "ConfigLoader: load & hot-reload `config.toml`, env-vars, personality defaults; expose typed settings"
)
@pytest.mark.parametrize("given", range(16))
def test_the_order_of_the_sources(path: Path, tmp_path: Path, given: int) -> None:
    used = [source for bit, source in enumerate(SOURCES) if given & 1 << bit]
    pack(tmp_path / "packs", "helper", 'provider = "pack"\nmodel = "pack"\n' if "pack" in used else "")
    runtime = 'model_provider = "file"\ndefault_model = "file"\n' if "file" in used else ""
    environ = {f"AGENT_RUNTIME_{name}": "environment" for name in ("MODEL_PROVIDER", "DEFAULT_MODEL")}
    loader = loader_of(
        path, f'[personality]\nfolder = "packs"\n[runtime]\n{runtime}', environ if "environment" in used else {}
    )
    program = {"model_provider": "program", "default_model": "program"} if "program" in used else {}
    config = loader.apply(**program)
    assert config is get_config()
    expected = (used[-1], used[-1]) if used else ("openai", "gpt-4o")
    assert (config.model_provider, config.default_model) == expected


def test_the_model_of_a_pack_is_not_asked_of_another_provider(path: Path, tmp_path: Path) -> None:
    pack(tmp_path / "packs", "helper", 'provider = "openai"\nmodel = "gpt-5"\n')
    text = '[personality]\nfolder = "packs"\n'
    assert loader_of(path, text).current.runtime.default_model == "gpt-5"
    other = loader_of(path, text + '[runtime]\nmodel_provider = "anthropic"\n').current.runtime
    assert (other.model_provider, other.default_model) == ("anthropic", "gpt-4o")
    pack(tmp_path / "packs", "helper", 'model = "mine"\n')
    assert loader_of(path, text + '[runtime]\nmodel_provider = "litellm"\n').current.runtime.default_model == "mine"


@pytest.mark.sentence(
    "001", "ConfigLoader: load & hot-reload `config.toml`, env-vars, personality defaults; expose typed settings"
)
def test_the_default_personality_of_the_file_and_of_the_environment(path: Path, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        pack(tmp_path / "there", name, f'model = "m-{name}"\ndefault = {str(name == "a").lower()}\n')
    text = '[personality]\nfolder = "there"\n'
    assert loader_of(path, text).current.packs.get().name == "a"
    chosen = loader_of(path, text + 'default = "b"').current
    assert (chosen.packs.get().name, chosen.personality.default, chosen.runtime.default_model) == ("b", "b", "m-b")
    environ = {"AGENT_RUNTIME_PERSONALITY_DEFAULT": "c", "AGENT_RUNTIME_PERSONALITY_FOLDER": "there"}
    settings = loader_of(path, "", environ).current
    assert (settings.packs.get().name, settings.personality.folder) == ("c", tmp_path / "there")


def test_the_turns_have_variables(path: Path) -> None:
    environ = {
        "AGENT_RUNTIME_TURNS_MAX_IN_FLIGHT": "3",
        "AGENT_RUNTIME_TURNS_REMOTE_STEPS": "no",
        "AGENT_RUNTIME_MAX_UNSENT_BYTES": "7",
    }
    settings = loader_of(path, FULL, environ).current
    assert settings.turns == TurnSettings(max_in_flight=3, remote_steps=False, max_unsent_bytes=7)
    assert settings.runtime.max_unsent_bytes == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[runtme]\n", r"config\.toml: unknown section 'runtme'\. Did you mean 'runtime'\?"),
        ("max_retries = 3\n", r"config.toml: max_retries must be in \[runtime\]"),
        (
            "[runtime]\nmax_retrys = 3\n",
            r"config\.toml: \[runtime\]: unknown setting 'max_retrys'\. Did you mean 'max_retries'\?",
        ),
        (
            "[turns]\nmax_inflight = 3\n",
            r"config\.toml: \[turns\]: unknown setting 'max_inflight'\. Did you mean 'max_in_flight'\?",
        ),
        (
            "[personality]\ndefalt = 'a'\n",
            r"config\.toml: \[personality\]: unknown setting 'defalt'\. Did you mean 'default'\?",
        ),
        (
            "[providers.openai]\nkey = 'sk-1'\n",
            r"config\.toml: \[providers\.openai\]: unknown setting 'key'\. Did you mean 'api_key'\?",
        ),
        (
            "[providers.anthropic]\norganization = 'o'\n",
            r"config\.toml: \[providers\.anthropic\]: unknown setting 'organization'",
        ),
    ],
)
def test_what_nobody_reads_is_refused_with_the_nearest(path: Path, text: str, message: str) -> None:
    with pytest.raises(UnknownSetting, match=message):
        loader_of(path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[runtime]\nmax_retries = 'three'\n", r"^config.toml: \[runtime\] max_retries must be an int.*, got 'three'"),
        ("[runtime]\nmax_retries = true\n", r"^config.toml: \[runtime\] max_retries must be .*, got True"),
        ("[runtime]\npark_after = nan\n", r"^config.toml: \[runtime\] park_after must be .*, got nan"),
        (
            "[runtime]\nredis_url = 2026-11-22\n",
            r"\[runtime\] redis_url must be a non-empty string, or None, got datetime\.date\(2026, 11, 22\)",
        ),
        ("runtime = 3\n", r"^config.toml: runtime must be a table.*, got '\*\*\*'"),
        ("[model_prices]\nm = 3\n", r"^config.toml: \[model_prices\] must be .*USD per million tokens"),
        (
            "[turns]\nmax_in_flight = 0\n",
            r"^config.toml: \[turns\] max_in_flight must be .*an integer of at least 1.*, got 0",
        ),
        ("[turns]\nremote_steps = 1\n", r"^config.toml: \[turns\] remote_steps must be .*true or false.*, got 1"),
        ("[personality]\nfolder = ''\n", r"config\.toml: \[personality\] folder must be a non-empty string, got ''"),
        ("[personality]\nfolder = 'gone'\n", r"^the folder .*gone must be readable, got an error: No such file"),
        ("[personality]\ndefault = 'defualt'\n", r"unknown default personality 'defualt'\. Did you mean 'default'\?"),
        ("[runtime]\nmax_unsent_bytes = 1\n[turns]\nmax_unsent_bytes = 1\n", r"got it in \[runtime\] too"),
        ("[runtime]\nmodel_prices = {}\n[model_prices]\n", r"got it in \[runtime\] too"),
        ("[runtime\n", r"^config.toml must be valid TOML, got an error: .*line 1"),
        ("a = " + "[" * 20_000, r"^config.toml must be valid TOML"),
        ("a = " + "9" * 5_000, r"^config.toml must be valid TOML"),
    ],
)
def test_what_cannot_be_used_is_named(path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        loader_of(path, text)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"AGENT_RUNTIME_MAX_RETRIES": "x"}, "^AGENT_RUNTIME_MAX_RETRIES must be .*, got 'x'"),
        (
            {"AGENT_RUNTIME_TURNS_MAX_IN_FLIGHT": "x"},
            "AGENT_RUNTIME_TURNS_MAX_IN_FLIGHT must be .*an integer of at least 1.*, got 'x'",
        ),
        (
            {"AGENT_RUNTIME_TURNS_REMOTE_STEPS": "x"},
            "AGENT_RUNTIME_TURNS_REMOTE_STEPS must be .*true or false.*, got 'x'",
        ),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(path: Path, environ: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        loader_of(path, "", environ)


@pytest.mark.parametrize(
    "text",
    [
        "[providers]\nopenai = 'sk-secret'\n",
        "[providers.openai]\napi_key = ['sk-secret']\n",
        "[runtime]\nopenai_api_key = ['sk-secret']\n",
        "openai_api_key = 'sk-secret'\n",
        "providers = 'sk-secret'\n",
        "[providers.openai]\napi_key = 'sk-secret\n",
    ],
)
def test_no_secret_is_in_an_error(path: Path, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        loader_of(path, text)
    assert "secret" not in str(caught.value)


def test_no_secret_is_in_the_text_of_the_settings(path: Path) -> None:
    text = repr(loader_of(path, FULL, {"OPENAI_API_KEY": "sk-secret"}).current)
    assert "secret" not in text.replace("langfuse_secret_key", "")
    assert "https://***@example.org/v1" in text
    assert repr(ProviderSettings()) == "ProviderSettings()"


def _no_file(path: Path) -> None:
    path.unlink()


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _loop_of_links(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _long(path: Path) -> None:
    path.write_text("#" * 300_000)


def _latin(path: Path) -> None:
    path.write_bytes(b'[runtime]\ndefault_model = "\xe9"\n')


def _empty(path: Path) -> None:
    path.write_text("\n")


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (_no_file, "not found"),
    (_folder, "must be a regular file"),
    (_pipe, "must be a regular file"),
    (_loop_of_links, "must be readable"),
    (_long, "must have at most 262,144 bytes"),
    (_latin, "must be UTF-8, got .* at byte 27"),
    (_empty, "must not be empty"),
]


@pytest.mark.sentence("001", "ConfigLoader: atomic swap; last-good fallback")
@pytest.mark.parametrize(("break_it", "message"), BROKEN)
def test_a_file_that_cannot_be_read_leaves_the_last_good_one(
    path: Path, caplog: pytest.LogCaptureFixture, break_it: Callable[[Path], None], message: str
) -> None:
    loader = loader_of(path, FULL)
    before = loader.current
    break_it(path)
    for _ in range(3):
        assert loader.reload() is False
    assert loader.current is before
    with pytest.raises(InvalidArgument, match=message):
        raise loader.last_error or AssertionError("no error")
    assert len(caplog.records) == 1
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)
    path.write_text(FULL + "[runtime.model_prices.m]\ninput = 1\noutput = 1\n")
    assert loader.reload() is False  # prices twice
    assert len(caplog.records) == 2
    path.write_text(FULL.replace("5", "6", 1))
    assert loader.reload() is True
    assert loader.current.runtime.max_retries == 6
    assert loader.last_error is None


@pytest.mark.parametrize("break_it", [each for each, _ in BROKEN if each is not _empty])
def test_there_is_no_loader_without_a_good_file(path: Path, break_it: Callable[[Path], None]) -> None:
    path.touch()
    break_it(path)
    with pytest.raises(InvalidArgument, match=r"config\.toml"):
        ConfigLoader(path, environ={})


def test_a_mark_of_windows_editors_is_no_part_of_the_text(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf[runtime]\r\nmax_retries = 8\r\n")
    assert ConfigLoader(path, environ={}).current.runtime.max_retries == 8


@pytest.mark.sentence("001", "ConfigLoader produces config change events")
def test_a_change_is_one_event_that_names_what_differs(path: Path) -> None:
    loader, told = loader_of(path, FULL), list[ConfigChanged]()
    loader.subscribe(told.append)
    path.write_text(FULL.replace("= 5", "= 6").replace("org-1", "org-2").replace("65536", "1"))
    assert [loader.reload(), loader.reload()] == [True, False]
    assert [event.payload() for event in told] == [
        {
            "version": 2,
            "changed": [
                "runtime.max_retries",
                "runtime.max_unsent_bytes",
                "turns.max_unsent_bytes",
                "providers.openai",
            ],
            "path": str(path),
        }
    ]
    assert told[0].event_type == "config.changed"
    assert loader.current.version == 2


def test_a_new_time_a_comment_or_another_order_is_no_change(path: Path) -> None:
    loader, told = loader_of(path, FULL), list[ConfigChanged]()
    loader.subscribe(told.append)
    before = loader.current
    os.utime(path, (1, 1))
    assert loader.reload() is False
    path.write_text("# A comment.\n" + FULL)
    assert loader.reload() is False
    sections = FULL.strip().split("\n\n")
    path.write_text("\n\n".join(reversed(sections)))
    assert loader.reload() is False
    assert loader.current is before
    assert told == []


def test_a_change_that_leaves_length_and_time_is_seen(path: Path) -> None:
    loader = loader_of(path, "[runtime]\nmax_retries = 1\n")
    for count in range(2, 10):
        path.write_text(f"[runtime]\nmax_retries = {count}\n")
        os.utime(path, ns=(10**18, 10**18))
        assert loader.reload() is True
        assert loader.current.runtime.max_retries == count


def test_the_packs_go_on_while_the_file_is_broken(path: Path, tmp_path: Path) -> None:
    pack(tmp_path / "packs", "helper", 'model = "one"\n')
    loader, told = loader_of(path, '[personality]\nfolder = "packs"\n'), list[ConfigChanged]()
    loader.subscribe(told.append)
    path.write_text("[personality")
    pack(tmp_path / "packs", "helper", 'model = "two"\n')
    assert loader.reload() is True
    assert told[0].changed == ("runtime.default_model", "packs.helper")
    assert loader.current.runtime.default_model == "two"
    assert "must be valid TOML" in str(loader.last_error)
    path.write_text('[personality]\nfolder = "packs"\n')
    assert loader.reload() is False
    assert loader.last_error is None


def test_a_broken_pack_is_told_beside_good_settings(path: Path, tmp_path: Path) -> None:
    pack(tmp_path / "packs", "helper", 'model = "one"\n')
    loader = loader_of(path, '[personality]\nfolder = "packs"\n')
    pack(tmp_path / "packs", "helper", "modle = 1\n")
    path.write_text('[personality]\nfolder = "packs"\n[runtime]\nmax_retries = 8\n')
    assert loader.reload() is True
    assert (loader.current.runtime.max_retries, loader.current.packs.get().model) == (8, "one")
    assert "Did you mean 'model'" in str(loader.last_error)


def test_a_default_that_comes_later_is_taken_when_it_is_there(path: Path, tmp_path: Path) -> None:
    pack(tmp_path / "packs", "helper")
    loader = loader_of(path, '[personality]\nfolder = "packs"\n')
    path.write_text('[personality]\nfolder = "packs"\ndefault = "writer"\n')
    assert loader.reload() is False
    assert "unknown default personality 'writer'" in str(loader.last_error)
    pack(tmp_path / "packs", "writer")
    assert loader.reload() is True
    assert loader.current.packs.get().name == "writer"


def test_another_folder_of_packs(path: Path, tmp_path: Path) -> None:
    pack(tmp_path / "packs", "helper")
    loader = loader_of(path, '[personality]\nfolder = "packs"\n')
    pack(tmp_path / "others", "other")
    path.write_text('[personality]\nfolder = "others"\n')
    assert loader.reload() is True
    assert loader.current.packs.names() == ["other"]
    path.write_text("# none\n")
    assert loader.reload() is True
    assert loader.current.packs.names() == ["default"]


def test_a_failing_subscriber_hurts_nobody(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader, told = loader_of(path, FULL), list[int]()

    def fails(event: ConfigChanged) -> None:
        raise RuntimeError("no")

    loader.subscribe(fails)
    end = loader.subscribe(lambda event: told.append(event.version))
    path.write_text("[runtime]\nmax_retries = 1\n")
    assert loader.reload() is True
    assert told == [2]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    end()
    path.write_text("[runtime]\nmax_retries = 2\n")
    assert loader.reload() is True
    assert told == [2]


def test_a_subscriber_may_reload(path: Path) -> None:
    loader, told = loader_of(path, "[runtime]\nmax_retries = 1\n"), list[tuple[str, int]]()

    def again(event: ConfigChanged) -> None:
        told.append(("first", event.version))
        if event.version == 2:
            path.write_text("[runtime]\nmax_retries = 3\n")
            assert loader.reload() is True

    loader.subscribe(again)
    loader.subscribe(lambda event: told.append(("second", event.version)))
    path.write_text("[runtime]\nmax_retries = 2\n")
    assert loader.reload() is True
    assert told == [("first", 2), ("second", 2), ("first", 3), ("second", 3)]


@pytest.mark.parametrize("fn", [None, "x"])
def test_what_is_no_function_cannot_subscribe(path: Path, fn: Any) -> None:
    with pytest.raises(InvalidArgument, match="must be a function"):
        loader_of(path).subscribe(fn)


def test_an_async_subscriber_needs_its_loop(path: Path) -> None:
    async def hear(event: ConfigChanged) -> None: ...

    with pytest.raises(InvalidArgument, match=r"Call subscribe\(\) in a coroutine"):
        loader_of(path).subscribe(hear)


async def test_subscribers_are_called_on_their_loop_in_order(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loader, told = loader_of(path, "[runtime]\nmax_retries = 9\n"), list[tuple[str, int]]()
    here, last = threading.current_thread(), asyncio.Event()

    async def slowly(event: ConfigChanged) -> None:
        assert threading.current_thread() is here
        for _ in range(5 - event.version):
            await asyncio.sleep(0)
        told.append(("async", event.version))
        if event.version == 4:
            last.set()
        raise ValueError("no")

    def at_once(event: ConfigChanged) -> None:
        assert threading.current_thread() is here
        told.append(("sync", event.version))

    loader.subscribe(slowly)
    loader.subscribe(at_once)

    def edit() -> None:
        for count in (1, 2, 3):
            path.write_text(f"[runtime]\nmax_retries = {count}\n")
            assert loader.reload() is True

    await portal.in_thread(edit)
    await last.wait()
    for kind in ("async", "sync"):
        assert [version for which, version in told if which == kind] == [2, 3, 4]
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 3


def test_a_loop_that_is_closed_is_told_nothing(path: Path) -> None:
    loader, told = loader_of(path), list[ConfigChanged]()

    async def subscribe() -> None:
        loader.subscribe(told.append)

    asyncio.run(subscribe())
    path.write_text("[runtime]\nmax_retries = 1\n")
    assert loader.reload() is True
    assert told == []


async def look(clock: VirtualClock, seconds: float) -> None:
    """Let the watcher sleep for that long, and do its next work."""
    await clock.until_sleeping()
    clock.advance(seconds)
    await clock.until_sleeping()


async def test_watching(path: Path) -> None:
    path.write_text(FULL)
    clock, told = VirtualClock(), list[ConfigChanged]()
    loader = ConfigLoader(path, environ={}, clock=clock)
    loader.subscribe(told.append)
    watcher = asyncio.create_task(loader.watch(interval=10))
    await look(clock, 0.1)
    path.write_text(FULL.replace("= 5", "= 6"))
    await look(clock, 9.9)
    assert loader.current.version == 1
    await look(clock, 0.1)  # it has changed
    await look(clock, 0.1)  # and lies still
    assert loader.current.runtime.max_retries == 6
    for _ in range(3):
        await look(clock, 10)
    watcher.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watcher
    assert [event.version for event in told] == [2]


async def test_a_file_that_is_being_written_is_let_finish(path: Path) -> None:
    path.write_text("[runtime]\nmax_retries = 1\n[turns]\nmax_in_flight = 1\n")
    clock = VirtualClock()
    loader = ConfigLoader(path, environ={}, clock=clock)
    watcher = asyncio.create_task(loader.watch(interval=10))
    await look(clock, 0.1)
    with path.open("w", encoding="utf-8") as file:
        await look(clock, 10)
        # Both halves are good TOML, and the first alone would mean another number of turns.
        for part in ("[runtime]\nmax_retries = 2\n", "[turns]\n", "max_in_flight = 2\n"):
            file.write(part)
            file.flush()
            await look(clock, 0.1)
            assert loader.current.turns.max_in_flight == 1
            assert loader.current.version == 1
    await look(clock, 0.1)
    settings = loader.current
    assert (settings.runtime.max_retries, settings.turns.max_in_flight, settings.version) == (2, 2, 2)
    watcher.cancel()
    await asyncio.wait({watcher})


async def test_a_file_that_never_lies_still_is_read_all_the_same(path: Path) -> None:
    path.write_text("")
    clock = VirtualClock()
    loader = ConfigLoader(path, environ={}, clock=clock)
    watcher = asyncio.create_task(loader.watch(interval=10))
    await look(clock, 0.1)
    path.write_text("[runtime]\nmax_retries = 8\n")
    looks = 0
    await look(clock, 10)
    while loader.current.version == 1:
        os.utime(path, (looks, looks))
        await look(clock, 0.1)
        looks += 1
        assert looks < 100
    assert looks > 10
    watcher.cancel()
    await asyncio.wait({watcher})


async def test_the_watcher_never_blocks_the_loop(path: Path) -> None:
    path.write_text("")
    clock = VirtualClock()
    loader, threads = ConfigLoader(path, environ={}, clock=clock), set[threading.Thread]()
    reload, marks = loader.reload, loader.marks

    def noted(fn: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            threads.add(threading.current_thread())
            return fn()

        return call

    vars(loader).update(reload=noted(reload), marks=noted(marks))
    watcher = asyncio.create_task(loader.watch())
    await look(clock, 0.1)
    await look(clock, 1)
    watcher.cancel()
    await asyncio.wait({watcher})
    assert threads
    assert threading.current_thread() not in threads


def test_watching_without_a_loop(path: Path) -> None:
    changed = threading.Event()

    class Ended(Exception):
        pass

    class Impatient(Clock):
        async def sleep(self, seconds: float) -> None:
            if changed.is_set():
                raise Ended
            await asyncio.sleep(0)

    path.write_text("")
    loader = ConfigLoader(path, environ={}, clock=Impatient())
    loader.subscribe(lambda event: changed.set())
    path.write_text("[runtime]\nmax_retries = 8\n")
    with pytest.raises(Ended):
        portal.call(loader.watch)
    assert loader.current.runtime.max_retries == 8


@pytest.mark.parametrize("interval", [0, -1, float("nan"), float("inf"), True, "1"])
async def test_an_interval_that_cannot_be_used(path: Path, interval: Any) -> None:
    with pytest.raises(InvalidArgument, match="interval must be"):
        await loader_of(path).watch(interval)


def test_provider_steps_are_a_table_of_turns(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text('[turns.provider_steps]\nkinds = ["llm_call", "tool_call"]\nfallback = "here"\n', encoding="utf-8")
    found = ConfigLoader(path).current.turns.provider_steps
    assert found == ProviderSteps(kinds=("llm_call", "tool_call"), fallback="here")
    for line, wrong in (
        ('kinds = ["llm"]', r"\[turns\.provider_steps\] kinds must be a list of kinds of steps"),
        ("deadline = 0", r"\[turns\.provider_steps\] deadline must be"),
        ("dedline = 5", r"dedline.*deadline"),
    ):
        path.write_text(f"[turns.provider_steps]\n{line}\n", encoding="utf-8")
        with pytest.raises(InvalidArgument, match=wrong):
            ConfigLoader(path)
