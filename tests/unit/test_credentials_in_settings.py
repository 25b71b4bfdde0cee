"""No text about a setting shows a password, whatever the setting is called and however the password is written."""

from __future__ import annotations

import itertools
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_runtime_core import config as process
from agent_runtime_core._core.settings import shown_setting
from agent_runtime_core._core.validation import without_credentials
from agent_runtime_core.cli.main import main
from agent_runtime_core.config import FIELDS, VARIABLES, RuntimeConfig, from_environment, reset_config
from agent_runtime_core.events import get_event_bus
from agent_runtime_core.limits import RunLimits
from agent_runtime_core.llm import get_llm_client
from agent_runtime_core.queue import get_queue
from agent_runtime_core.runner import AgentRunner, RunnerConfig
from agent_runtime_core.state import get_state_store
from agent_runtime_core.tracing import get_trace_sink
from agent_runtime_core.turns.settings import PersonalitySettings, Sources
from tests.support.cases import for_each

CANARY = "canary"
WRITTEN = (
    "app:{}@db:6379", "app:{}@db:6379/0?prefix=a", ":{}@db", "app:a@{}@db", "app:{}/b@db", "//app:{}@db", "/app:{}@db",
    "redis://app:{}@db:6379", "redis://:{}@db", "redis+sentinel://app:{}@a,b:1/0", "postgres://app:{}@db/name",
    "postgresql://db/x?listen_url=postgresql%3A%2F%2Fapp%3A{}%40db%2Fx", "postgresql://db/x?sslpassword={}&schema=a",
    "redis:app:{}@db", "app:a?token=b{}@db", "app:a\n{}@db", "their_package.module:app:{}@db", "at redis://app:{}@db",
    "db:6379?password={}", "redis://db?password=a@{}&x=1", "db?token={}", "db/0?x=1&access_key={}",
    "host=db password={}", "db;client_secret={}", '{{"password": "{}"', "their_package.module?password={}:Class",
    "redis?api-key={}", "Authorization: Bearer {}", "authorization: {}", "Proxy-Authorization:Basic {}", "Bearer {}",
    "authorization=Bearer%20{}", "x=1,authorization=Basic {}", "X-Api-Key: {}", "x-api-key:{}", "Cookie: sid={}; a=b",
    "X-Auth-Token:{}", "Basic {}", "Digest {}", '{{"Authorization": "Bearer {}"}}',
    "('Authorization', 'Bearer {}')",
)  # fmt: skip
texts = st.builds(
    lambda written, before, after: written.format(f"{before}{CANARY}{after}"),
    st.sampled_from(WRITTEN),
    st.text("aZ0%._~!$+,-", max_size=4),
    st.text("aZ0%._~!$+,-", max_size=4),
)
secret_names = st.sampled_from(
    ["password", "db_password", "dbPassword", "client_secret", "api_key", "PWD", "token", "Authorization", "X-Api-Key"]
)


class Service:
    """An object whose repr shows all that it has."""

    def __init__(self, url: Any) -> None:
        self.url = url

    def __repr__(self) -> str:
        return f"Service({self.url!r})"

    def trace(self, event: Any) -> None: ...


named = st.dictionaries(secret_names, st.just(CANARY))
headers = st.tuples(secret_names, st.just(CANARY)) | st.just({"default_headers": {"x-tenant": CANARY}})
names = texts | st.just("a")
values = st.recursive(
    texts | texts.map(Service) | texts.map(Path) | texts.map(str.encode) | named | headers,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(names, inner, max_size=3),
    max_leaves=4,
)


def said_by(make: Callable[[], Any]) -> list[str]:
    """Return the texts of what this makes, or of the error that it raises."""
    try:
        made = make()
    except Exception as error:  # noqa: BLE001 - whatever it is
        return [str(error), repr(error), "".join(traceback.format_exception(error))]
    return [repr(made), str(made)]


@settings(deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FIELDS)), values)
@example("queue_backend", f"app:{CANARY}@db:6379")
@example("trace_sinks", [Service(CANARY)])
def test_the_text_of_a_configuration_shows_no_password(name: str, value: Any) -> None:
    said = said_by(lambda: RuntimeConfig(**{name: value}))
    said += said_by(lambda: Sources.of({"runtime": {name: value}}, {}, Path("config.toml")))
    said += said_by(lambda: from_environment({VARIABLES[name]: str(value)}) and None)
    said += said_by(lambda: PersonalitySettings(default=value, folder=value))
    said += said_by(lambda: RunLimits(max_turns=value))
    said += said_by(lambda: RunnerConfig(worker_id=value))
    if name in RunnerConfig.__dataclass_fields__:
        said += said_by(lambda: RunnerConfig(**{name: value}))
    assert [each for each in said if CANARY in each] == []


@settings(deadline=None, derandomize=True)
@given(texts)
@example(f"app:{CANARY}@db:6379")
def test_the_error_of_a_setting_in_use_shows_no_password(text: str) -> None:
    said: list[str] = []
    for make in (get_queue, get_event_bus, get_state_store, get_trace_sink, get_llm_client):
        said += said_by(lambda make=make: make(text))  # type: ignore[misc]
    for use in (RuntimeConfig.redaction, RuntimeConfig.codec):
        said += said_by(lambda use=use: use(RuntimeConfig(redact=text, payload_codec=text)))  # type: ignore[misc]
    said += said_by(lambda: AgentRunner(trace_sinks=[text]))  # type: ignore[list-item]
    said += said_by(lambda: process.configure(**{text: 1}))
    assert [each for each in said if CANARY in each] == []


#: 7 divides neither the number of names and options nor the number of texts, so each meets most of the others.
EVERY = 7
SHOWN = [
    pytest.param(name, options, written, marks=[pytest.mark.slow] if number % EVERY else [])
    for number, (written, options, name) in enumerate(
        itertools.product(
            WRITTEN, [[], ["--json"]], ["queue_backend", "trace_sinks", "sqlite_path", "default_model", "model_prices"]
        )
    )
]


@pytest.mark.parametrize(("name", "options", "written"), SHOWN)
def test_doctor_shows_no_password(
    name: str, options: list[str], written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLES[name], written.format(CANARY))
    reset_config()
    main(["doctor", *options])
    out, err = capsys.readouterr()
    assert "settings" in out
    assert CANARY not in f"{out}{err}{caplog.text}"


@for_each(
    "text",
    [
        "package.module:Class", "a:model", "llama3:8b", "ada@example.com", "claude@20250101", "host:6379", "worker-1",
        "sqlite:///a@b", "redis://h:6379/0", "a b: c", "max_tokens=3", "C:/data/runs.db", "my_token:Class",
        "auth:Class", "package.auth:Class", "a basic setting", "authorization", "Accept: text/plain",
        "the token limit: 3",
    ],
)  # fmt: skip
def test_a_value_without_credentials_is_shown(text: str) -> None:
    assert without_credentials(text) == text
    assert shown_setting({"a": [text, 1, None, True]}) == {"a": [text, 1, None, True]}


def test_what_is_hidden_is_marked() -> None:
    assert without_credentials("app:pw@db:6379") == "***@db:6379"
    assert shown_setting({"password": "pw", "token": None, "url": ("a:b@c",)}) == {
        "password": "***",
        "token": None,
        "url": ("***@c",),
    }
    assert repr(RuntimeConfig(queue_backend="app:pw@db:6379")).count("queue_backend='***@db:6379'") == 1
    assert repr(RunnerConfig(worker_id="app:pw@db")).startswith("RunnerConfig(worker_id='***@db', run_timeout")
    cycle: list[Any] = []
    cycle.append(cycle)
    assert json.dumps(shown_setting(cycle)).count("[") == 8
