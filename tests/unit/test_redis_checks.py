"""What makes a Redis unsafe for runs, found in what INFO and CONFIG GET say; no server is asked here."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from agent_runtime_core._engines.redis.safety_checks import (
    ASKED,
    check,
    findings,
    identity,
    log_daily,
    parsed_config,
    parsed_info,
)
from agent_runtime_core._engines.redis.url import RedisAddress, redis_place
from agent_runtime_core._engines.shared_engine import SafetyFinding
from agent_runtime_core.errors import StorageError, UnsafeRedis
from tests.support.cases import for_each

HERE = redis_place("redis://127.0.0.1:6379/0")
THERE = redis_place("rediss://me:hush@cache.example:6380/0")

INFO: dict[str, object] = {
    "redis_version": "7.2.4",
    "redis_mode": "standalone",
    "run_id": "r1",
    "role": "master",
    "connected_slaves": "0",
    "master_replid": "m1",
    "maxmemory": "1000000",
    "maxmemory_policy": "noeviction",
    "aof_enabled": "1",
    "cluster_enabled": "0",
}
CONFIG: dict[str, object] = {
    "maxmemory": "1000000",
    "maxmemory-policy": "noeviction",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "no-appendfsync-on-rewrite": "no",
    "save": "3600 1",
    "stop-writes-on-bgsave-error": "yes",
    "min-replicas-to-write": "0",
}
# setting, severity, what INFO and CONFIG GET say instead, the value it is reported with, and the place.
UNSAFE: list[Any] = [
    ("maxmemory-policy", "refuse", {}, {"maxmemory-policy": "allkeys-lru"}, "allkeys-lru", HERE),
    ("role", "refuse", {"role": "slave"}, {}, "slave", HERE),
    ("version", "refuse", {"redis_version": "6.0.16"}, {}, "6.0.16", HERE),
    ("appendonly", "warn", {}, {"appendonly": "no"}, "no", HERE),
    ("appendfsync", "warn", {}, {"appendfsync": "no"}, "no", HERE),
    ("maxmemory-policy", "warn", {}, {"maxmemory-policy": "volatile-ttl"}, "volatile-ttl", HERE),
    ("maxmemory", "warn", {}, {"maxmemory": "0"}, "0", HERE),
    ("min-replicas-to-write", "warn", {"connected_slaves": "2"}, {}, "0", HERE),
    ("AUTH", "warn", {}, {}, "none", redis_place("rediss://cache.example")),
    ("TLS", "warn", {}, {}, "no", redis_place("redis://me:hush@10.0.0.1")),
    ("stop-writes-on-bgsave-error", "warn", {}, {"stop-writes-on-bgsave-error": "no"}, "no", HERE),
    ("no-appendfsync-on-rewrite", "warn", {}, {"no-appendfsync-on-rewrite": "yes"}, "yes", HERE),
]


@for_each(
    ("setting", "severity", "info", "config", "value", "place"), UNSAFE, ids=[f"{row[0]}-{row[1]}" for row in UNSAFE]
)
def test_each_unsafe_setting_is_found_alone(
    setting: str, severity: str, info: dict[str, object], config: dict[str, object], value: str, place: RedisAddress
) -> None:
    found = findings(INFO | info, CONFIG | config, place)
    assert [(each.setting, each.severity, each.value) for each in found] == [(setting, severity, value)]
    assert found[0].why
    assert found[0].remedy
    for word in (setting, value, found[0].remedy):
        assert word in str(found[0])


@pytest.mark.parametrize("place", [HERE, THERE, redis_place("unix:///run/x.sock")])
def test_nothing_is_said_of_a_safe_server(place: RedisAddress) -> None:
    assert findings(INFO, CONFIG, place) == []
    assert findings(INFO | {"connected_slaves": "2"}, CONFIG | {"min-replicas-to-write": "1"}, place) == []
    assert findings({**INFO, "connected_slaves": 2, "min_slaves_good_slaves": 2}, _without("min-"), place) == []


def _without(start: str) -> dict[str, object]:
    return {name: value for name, value in CONFIG.items() if not name.startswith(start)}


@pytest.mark.parametrize("version", ["6.2.0", "6.10.1", "7.0", "7.2.4", "8.2.1", "10.0.0", "255.255.255"])
def test_versions_that_will_do(version: str) -> None:
    assert findings(INFO | {"redis_version": version}, CONFIG, HERE) == []


@pytest.mark.parametrize("version", ["6.1.240", "6.0.20", "5.0.14", "2.8.19", "", "seven"])
def test_versions_that_will_not(version: str) -> None:
    with pytest.raises(UnsafeRedis, match=r"Redis 6\.2 or later, or Valkey"):
        check(INFO | {"redis_version": version}, CONFIG, HERE)


@pytest.mark.parametrize(
    ("policy", "severity"),
    [
        ("allkeys-lru", "refuse"),
        ("allkeys-lfu", "refuse"),
        ("allkeys-random", "refuse"),
        ("allkeys-lrm", "refuse"),
        ("eviction", "refuse"),
        ("volatile-lru", "warn"),
        ("volatile-lfu", "warn"),
        ("volatile-random", "warn"),
        ("volatile-ttl", "warn"),
    ],
)
def test_every_policy_but_one_evicts(policy: str, severity: str) -> None:
    by_config = findings(INFO, CONFIG | {"maxmemory-policy": policy}, HERE)
    by_info = findings(INFO | {"maxmemory_policy": policy}, _without("maxmemory-policy"), HERE)
    assert [each.severity for each in by_config] == [each.severity for each in by_info] == [severity]


def test_a_cluster_is_no_trouble() -> None:
    assert findings(INFO | {"redis_mode": "cluster"}, CONFIG, HERE) == []
    assert findings(INFO | {"cluster_enabled": 1}, CONFIG, HERE) == []


def test_a_replica_says_where_its_master_is() -> None:
    info = INFO | {"role": "slave", "master_host": "10.0.0.9", "master_port": 7000}
    with pytest.raises(UnsafeRedis, match=r"role is 'slave'.*name the master in the URL, at 10\.0\.0\.9:7000"):
        check(info, CONFIG, HERE)


def test_a_sentinel_is_no_server_of_runs() -> None:
    with pytest.raises(UnsafeRedis, match="role is 'sentinel'"):
        check({"redis_version": "7.2.4", "redis_mode": "sentinel"}, CONFIG, HERE)


def test_what_a_restart_loses_is_told_by_whether_there_are_snapshots() -> None:
    with_snapshots, without = (
        findings(INFO, CONFIG | {"appendonly": "no", "save": save}, HERE)[0].why for save in ("3600 1", "")
    )
    assert "after the last snapshot" in with_snapshots
    assert "everything" in without


def test_a_server_that_hides_its_settings_is_judged_by_its_info() -> None:
    info = INFO | {"maxmemory_policy": "allkeys-lru", "maxmemory": 0, "aof_enabled": 0, "connected_slaves": 1}
    found = {each.setting: each.value for each in findings(info, None, HERE)}
    hidden = "appendfsync, no-appendfsync-on-rewrite, stop-writes-on-bgsave-error"
    assert found == {
        "maxmemory-policy": "allkeys-lru",
        "maxmemory": "0",
        "appendonly": "no",
        "min-replicas-to-write": "0",
        hidden: "unknown",
    }
    (untold,) = findings(INFO, None, HERE)
    assert (untold.setting, untold.severity) == (hidden, "warn")
    assert "config|get" in untold.remedy


def test_what_must_be_known_and_is_not_is_refused() -> None:
    with pytest.raises(UnsafeRedis) as caught:
        check({}, None, HERE)
    assert caught.value.refused == {"role": "unknown", "version": "unknown", "maxmemory-policy": "unknown"}


def test_every_setting_that_is_asked_for_is_missed_when_it_is_not_told() -> None:
    for name in ASKED:
        told = findings({"redis_version": "7.0.0"}, _without(name), HERE)
        missed = ", ".join(each.setting for each in told if each.value == "unknown")
        assert name in missed or name == "save", name


def test_the_error_names_every_refused_setting_its_value_and_the_way_out() -> None:
    info = INFO | {"role": "slave", "redis_version": "5.0.1"}
    with pytest.raises(UnsafeRedis) as caught:
        check(info, CONFIG | {"maxmemory-policy": "allkeys-lfu", "appendfsync": "no"}, THERE)
    error = caught.value
    assert isinstance(error, StorageError)
    assert error.refused == {"role": "slave", "version": "5.0.1", "maxmemory-policy": "allkeys-lfu"}
    for words in (*error.refused, *error.refused.values(), "noeviction", "6.2 or later", "name the master"):
        assert words in str(error)
    assert "allow_unsafe=1" in str(error)
    assert "rediss://cache.example:6380/0" in str(error)
    assert "appendfsync" not in str(error)


def test_what_is_unsafe_may_be_allowed_and_is_logged_then(caplog: pytest.LogCaptureFixture) -> None:
    info = INFO | {"role": "slave", "run_id": "allowed"}
    with caplog.at_level(logging.WARNING, "agent_runtime_core"):
        allowed = check(info, CONFIG, redis_place("redis://127.0.0.1:6379/0?allow_unsafe=1"))
    assert [each.setting for each in allowed] == ["role"]
    assert ["role is 'slave'" in each for each in caplog.messages] == [True]
    with pytest.raises(UnsafeRedis):
        check(info, CONFIG, redis_place("redis://127.0.0.1:6379/0?allow_unsafe=0"))


def test_a_warning_is_said_once_in_the_life_of_a_server(caplog: pytest.LogCaptureFixture) -> None:
    unsafe = CONFIG | {"appendonly": "no", "stop-writes-on-bgsave-error": "no"}
    with caplog.at_level(logging.WARNING, "agent_runtime_core"):
        for life in ("said-1", "said-1", "said-2"):
            assert len(check(INFO | {"run_id": life}, unsafe, HERE)) == 2
    assert len(caplog.messages) == 4
    assert sum("appendonly is 'no'" in each for each in caplog.messages) == 2
    assert all(each.startswith("redis://127.0.0.1:6379/0: ") for each in caplog.messages)
    with caplog.at_level(logging.WARNING, "agent_runtime_core"):
        check(INFO | {"run_id": "said-1"}, unsafe | {"appendfsync": "no"}, HERE)
    assert "appendfsync" in caplog.messages[4]


def test_the_advice_on_maxmemory_is_logged_by_one_process_a_day(caplog: pytest.LogCaptureFixture) -> None:
    unsafe, asked = CONFIG | {"maxmemory": "0"}, list[str]()

    def first_today(setting: str) -> bool:
        asked.append(setting)
        return len(asked) == 1

    with caplog.at_level(logging.WARNING, "agent_runtime_core"):
        for process in ("today-1", "today-1", "today-2"):
            info = INFO | {"run_id": process}
            log_daily(check(info, unsafe, HERE), info, HERE, first_today)
    assert asked == ["maxmemory", "maxmemory"]
    assert [each.partition(": ")[2][:16] for each in caplog.messages] == ["maxmemory is '0'"]


def test_no_password_is_in_a_finding_an_error_or_the_log(caplog: pytest.LogCaptureFixture) -> None:
    place = redis_place("redis://me:hush@10.0.0.1")
    info = INFO | {"role": "slave", "run_id": "secrets"}
    with caplog.at_level(logging.WARNING, "agent_runtime_core"), pytest.raises(UnsafeRedis) as caught:
        check(info, CONFIG, place)
    found = check(info, CONFIG, redis_place("redis://me:hush@10.0.0.1?allow_unsafe=1"))
    assert "hush" not in f"{caught.value}{found}{caplog.text}"


def test_a_life_of_a_server_has_one_identity() -> None:
    assert identity(INFO) == identity(dict(INFO)) == "r1:m1"
    assert identity({"run_id": b"r1", "master_replid": b"m1"}) == "r1:m1"
    assert len({identity(INFO), identity(INFO | {"run_id": "r2"}), identity(INFO | {"master_replid": "m2"})}) == 3


def test_replies_are_read_as_the_protocol_gives_them() -> None:
    text = "# Server\r\nredis_version:7.2.4\r\nexecutable:/a:b\r\nconfig_file:\r\n\r\n# Replication\r\nrole:master\r\n"
    fields = {"redis_version": "7.2.4", "executable": "/a:b", "config_file": "", "role": "master"}
    assert parsed_info(text) == parsed_info(text.encode()) == fields
    pairs = [b"maxmemory", b"0", b"save", b""]
    settings = {"maxmemory": "0", "save": ""}
    assert parsed_config(pairs) == settings
    assert parsed_config([b"maxmemory", b"0"], [], ["save", ""]) == settings
    assert parsed_config() == {}


def test_a_finding_reads_as_a_sentence() -> None:
    finding = SafetyFinding("role", "slave", "refuse", "which does not keep writes", "name the master")
    assert str(finding) == "role is 'slave', which does not keep writes: name the master"
