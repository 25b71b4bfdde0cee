"""Settings: their sources, their order, and what is refused."""

from __future__ import annotations

import dataclasses
import os

import pytest

from agent_runtime_core.config import RuntimeConfig, configure, get_config, place_of, reset_config, variable_of
from agent_runtime_core.errors import InvalidArgument, UnknownSetting
from tests.support.cases import for_each


def test_the_defaults() -> None:
    assert dataclasses.asdict(get_config()) == {
        "model_provider": "openai",
        "default_model": "gpt-4o",
        "openai_api_key": None,
        "anthropic_api_key": None,
        "backend_url": None,
        "queue_backend": "memory",
        "event_bus_backend": "memory",
        "state_store_backend": "memory",
        "redis_url": None,
        "sqlite_path": None,
        "durability": "full",
        "payload_codec": None,
        "redact": None,
        "redact_stored": False,
        "run_timeout_seconds": 300,
        "stall_timeout_seconds": None,
        "heartbeat_interval_seconds": 30,
        "lease_ttl_seconds": 60,
        "max_retries": 3,
        "max_crashes": 3,
        "retry_backoff_base": 2,
        "retry_backoff_max": 300,
        "park_after": 5.0,
        "max_unsent_bytes": 131072,
        "model_prices": {},
        "trace_sinks": (),
        "tracing_backend": None,
        "langfuse_enabled": False,
        "langfuse_public_key": None,
        "langfuse_secret_key": None,
        "langfuse_host": None,
        "langfuse_content": False,
    }


def test_the_program_wins_over_the_environment_and_that_over_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_RUNTIME_DEFAULT_MODEL", "from-env")
    monkeypatch.setenv("AGENT_RUNTIME_MODEL_PROVIDER", "anthropic")
    config = configure(default_model="from-program")
    assert (config.default_model, config.model_provider, config.max_retries) == ("from-program", "anthropic", 3)
    assert get_config() is config


def test_configure_starts_afresh() -> None:
    configure(max_retries=7)
    assert configure(default_model="x").max_retries == 3


def test_reset_reads_the_environment_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_config().redis_url is None
    monkeypatch.setenv("AGENT_RUNTIME_REDIS_URL", "redis://a")
    assert get_config().redis_url is None
    reset_config()
    assert get_config().redis_url == "redis://a"


PRICES = {"m": {"input": 1, "output": 2}}


@pytest.mark.parametrize(
    "prices",
    [
        1, "x", {"m": 1}, {"m": {"input": 1}}, {"m": {"input": 1, "output": -1}}, {"m": {"input": 1, "output": True}},
        {"m": {"input": 1, "output": 2, "other": 3}}, {1: PRICES["m"]},
    ],
)  # fmt: skip
def test_prices_that_cannot_be_used(prices: object) -> None:
    with pytest.raises(InvalidArgument, match=r"model_prices must be .*USD per million tokens"):
        configure(model_prices=prices)


@pytest.mark.parametrize("sinks", ["langfuse", [1], [""], None])
def test_sinks_that_cannot_be_used(sinks: object) -> None:
    with pytest.raises(InvalidArgument, match="trace_sinks must be a list of trace sinks or their names, got"):
        configure(trace_sinks=sinks)


def test_a_truth_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_RUNTIME_LANGFUSE_ENABLED", "maybe")
    with pytest.raises(InvalidArgument, match="AGENT_RUNTIME_LANGFUSE_ENABLED must be true or false, got 'maybe'"):
        configure()
    monkeypatch.delenv("AGENT_RUNTIME_LANGFUSE_ENABLED")
    with pytest.raises(InvalidArgument, match="langfuse_enabled must be true or false, got 1"):
        configure(langfuse_enabled=1)


def test_every_setting_has_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: dict[str, object] = {}
    others: dict[str, tuple[str, object]] = {
        "trace_sinks": ("noop, a.b:C", ("noop", "a.b:C")),
        "langfuse_enabled": ("true", True),
        "langfuse_content": ("on", True),
        "redact_stored": ("yes", True),
        "model_prices": ('{"m":{"input":1,"output":2}}', PRICES),
        "stall_timeout_seconds": ("60", 60),
    }
    for field in dataclasses.fields(RuntimeConfig):
        if field.name in others:
            text, wanted[field.name] = others[field.name]
            monkeypatch.setenv(f"AGENT_RUNTIME_{field.name.upper()}", text)
            continue
        value: object = 7 if isinstance(field.default, (int, float)) else "normal"
        keys = {"openai_api_key": "OPENAI_API_KEY", "anthropic_api_key": "ANTHROPIC_API_KEY"}
        monkeypatch.setenv(keys.get(field.name, f"AGENT_RUNTIME_{field.name.upper()}"), str(value))
        wanted[field.name] = value
    assert dataclasses.asdict(configure()) == wanted


def test_a_time_limit_may_be_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_RUNTIME_RUN_TIMEOUT_SECONDS", "inf")
    config = configure(stall_timeout_seconds=600)
    assert (config.run_timeout_seconds, config.stall_timeout_seconds) == (float("inf"), 600)


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_RUNTIME_MAX_RETRIES", " ")
    assert configure().max_retries == 3


def test_an_unknown_setting_names_the_nearest_and_changes_nothing() -> None:
    before = configure(max_retries=7)
    with pytest.raises(
        UnknownSetting, match=r"unknown setting 'modle_provider'\. Did you mean 'model_provider'\?"
    ) as caught:
        configure(modle_provider="openai")
    assert isinstance(caught.value, ValueError)
    assert get_config() is before


def test_an_unknown_setting_that_is_like_none_is_told_which_there_are() -> None:
    with pytest.raises(
        UnknownSetting,
        match="Known: anthropic_api_key, backend_url, default_model, durability, event_bus_backend and 27",
    ):
        configure(nope=1)


def test_an_unknown_setting_of_a_configuration_made_by_hand_names_the_nearest() -> None:
    with pytest.raises(UnknownSetting, match=r"unknown setting 'lease_seconds'\. Did you mean 'lease_ttl_seconds'\?"):
        RuntimeConfig(lease_seconds=1)  # type: ignore[call-arg]


@for_each(
    ("name", "text"),
    [
        ("MAX_RETRIES", "three"),
        ("MAX_RETRIES", "1.5"),
        ("MAX_RETRIES", "-1"),
        ("MAX_RETRIES", "0"),
        ("LEASE_TTL_SECONDS", "0"),
        ("LEASE_TTL_SECONDS", "nan"),
        ("RUN_TIMEOUT_SECONDS", "-3"),
        ("HEARTBEAT_INTERVAL_SECONDS", "inf"),
        ("RETRY_BACKOFF_MAX", "9" * 5000),
        ("PARK_AFTER", "-0.1"),
        ("DURABILITY", "most"),
        ("MAX_UNSENT_BYTES", "0"),
        ("MAX_UNSENT_BYTES", "1.5"),
    ],
)
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(f"AGENT_RUNTIME_{name}", text)
    with pytest.raises(InvalidArgument, match=f"^AGENT_RUNTIME_{name} must be .*, got"):
        configure()


@for_each(
    ("name", "value"),
    [
        ("max_retries", -1),
        ("max_retries", 0),
        ("max_retries", True),
        ("max_retries", 2.0),
        ("run_timeout_seconds", 0),
        ("run_timeout_seconds", "300"),
        ("run_timeout_seconds", float("nan")),
        ("run_timeout_seconds", None),
        ("stall_timeout_seconds", 0),
        ("stall_timeout_seconds", -1.0),
        ("stall_timeout_seconds", True),
        ("lease_ttl_seconds", float("inf")),
        ("retry_backoff_base", float("nan")),
        ("park_after", None),
        ("queue_backend", ""),
        ("queue_backend", None),
        ("sqlite_path", 3),
        ("durability", "FULL"),
        ("max_unsent_bytes", 0),
        ("max_unsent_bytes", 1.5),
    ],
)
def test_a_bad_value_is_named(name: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name} must be "):
        configure(**{name: value})


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://u:secret@host/db", r"store URL must be memory://, sqlite:///.*, got 'mysql://\*\*\*@host/db'\."),
        ("REDIS:6379", r"store URL must contain '://', got 'REDIS:'\. Use redis://"),
        ("sqlite://runs.db", r"have three or four slashes .*\. Use sqlite:///relative\.db"),
        ("file:runs.db", "not begin with file:"),
    ],
)
def test_a_store_url_that_cannot_be_used_is_rejected_when_it_is_set(
    monkeypatch: pytest.MonkeyPatch, url: str, said: str
) -> None:
    before = get_config()
    with pytest.raises(InvalidArgument, match=f"^backend_url: .*{said}") as caught:
        configure(backend_url=url)
    assert "secret" not in str(caught.value)
    assert get_config() is before
    reset_config()
    monkeypatch.setenv("AGENT_RUNTIME_BACKEND_URL", url)
    with pytest.raises(InvalidArgument, match=f"^AGENT_RUNTIME_BACKEND_URL: .*{said}") as caught:
        get_config()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["memory://", "sqlite:///a.db", "a.db", "/a/b.db", "redis://h", "rediss://h", "unix:///a.sock", None]
)
def test_every_store_url_that_can_be_opened_can_be_configured(url: str | None) -> None:
    assert configure(backend_url=url).backend_url == url


def test_seconds_may_be_fractions_and_waits_may_park_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_RUNTIME_LEASE_TTL_SECONDS", "0.5")
    config = configure(park_after=0, heartbeat_interval_seconds=0.1)
    assert (config.lease_ttl_seconds, config.park_after, config.heartbeat_interval_seconds) == (0.5, 0, 0.1)


def test_keys_fall_back_to_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(openai_api_key="sk-given")
    assert config.get_anthropic_api_key() is None
    monkeypatch.setenv("OPENAI_API_KEY", "sk-env")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-env")
    assert config.get_openai_api_key() == "sk-given"
    assert config.get_anthropic_api_key() == "sk-ant-env"
    assert configure().get_openai_api_key() == "sk-env"


def test_no_secret_is_in_the_text_of_the_configuration() -> None:
    text = repr(
        configure(
            openai_api_key="sk-secret",
            anthropic_api_key="sk-ant-secret",
            langfuse_secret_key="sk-lf-secret",
            redis_url="redis://user:secret@host:6379/0",
            backend_url="rediss://host/0?password=secret&x=1",
        )
    )
    assert "secret" not in text.replace("langfuse_secret_key", "")
    assert "redis://***@host:6379/0" in text
    assert "openai_api_key='***'" in text
    assert "sqlite:///a@b" in repr(configure(backend_url="sqlite:///a@b"))
    assert "default_model='a:model'" in repr(configure(default_model="a:model"))


@pytest.mark.parametrize(
    "url",
    [
        "redis://h:6379/0?passwd=secret", "redis://h:6379/0?PASSWORD=secret", "redis://:se\ncret@h/0",
        "redis:user:secret@h", "user:secret", "redis://user:secret",
    ],
)  # fmt: skip
def test_a_url_hides_its_password_however_it_is_written(url: str) -> None:
    texts = [repr(RuntimeConfig(redis_url=url))]
    try:
        texts.append(repr(RuntimeConfig(backend_url=url)))
    except InvalidArgument as error:
        texts.append(str(error))
    if "://" in url:
        texts.append(repr(RuntimeConfig(langfuse_host=url)))
    for text in texts:
        assert "cret" not in text.replace("langfuse_secret_key", "")


def test_what_a_file_is_not_named_by_hides_its_password_too() -> None:
    with pytest.raises(InvalidArgument, match=r"\?password=\*\*\*"):
        place_of("sqlite:///a.db?password=secret")


def test_no_secret_is_in_an_error() -> None:
    with pytest.raises(InvalidArgument) as caught:
        configure(openai_api_key=b"sk-secret")
    assert "secret" not in str(caught.value)


def test_a_misspelt_variable_is_told_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AGENT_RUNTIME_MAX_RETRY", "3")
    # What a ConfigLoader reads, and what Kubernetes sets for a service of that name.
    monkeypatch.setenv("AGENT_RUNTIME_TURNS_MAX_IN_FLIGHT", "3")
    monkeypatch.setenv("AGENT_RUNTIME_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("AGENT_RUNTIME_SERVICE_HOST", "10.0.0.1")
    assert configure().max_retries == 3
    assert [each.message for each in caplog.records] == [
        "unknown environment variable AGENT_RUNTIME_MAX_RETRY. Did you mean AGENT_RUNTIME_MAX_RETRIES?"
    ]


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("langfuse_public_key", ["AGENT_RUNTIME_LANGFUSE_PUBLIC_KEY", "LANGFUSE_PUBLIC_KEY"]),
        ("langfuse_secret_key", ["AGENT_RUNTIME_LANGFUSE_SECRET_KEY", "LANGFUSE_SECRET_KEY"]),
        ("langfuse_host", ["AGENT_RUNTIME_LANGFUSE_HOST", "LANGFUSE_BASE_URL", "LANGFUSE_HOST"]),
    ],
)
def test_variables_of_langfuse_are_read_too(name: str, variables: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    assert getattr(configure(), name) is None
    for variable in reversed(variables):
        monkeypatch.setenv(variable, f"of {variable}")
        assert getattr(configure(), name) == f"of {variable}"
        assert variable_of(name, os.environ) == variable
        monkeypatch.setenv(variable, "")
        for weaker in variables[variables.index(variable) + 1 :]:
            assert getattr(configure(), name) == f"of {weaker}"
            break
        monkeypatch.setenv(variable, f"of {variable}")
    assert getattr(configure(**{name: "given"}), name) == "given"
    assert configure().langfuse_enabled is False
