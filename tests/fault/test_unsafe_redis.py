"""Real servers, each started with a setting that costs runs: every one is found, and nothing is said of a safe one."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import time

import pytest

from agent_runtime_core._engines.redis.safety_checks import ASKED, check, findings, identity, parsed_config, parsed_info
from agent_runtime_core._engines.redis.url import redis_place
from agent_runtime_core.errors import UnsafeRedis
from tests.support.redis_protocol import Link, Refused
from tests.support.redis_servers import RedisCluster, RedisServer

pytestmark = pytest.mark.redis

SAFE = {"maxmemory": "100mb", "maxmemory_policy": "noeviction", "appendonly": "yes"}
REFUSED = [{"maxmemory_policy": f"allkeys-{how}"} for how in ("lru", "lfu", "random")]
WARNED: list[dict[str, str]] = [
    *({"maxmemory_policy": f"volatile-{how}"} for how in ("lru", "lfu", "random", "ttl")),
    {"maxmemory": "0"},
    {"appendonly": "no"},
    {"appendfsync": "no"},
    {"no_appendfsync_on_rewrite": "yes"},
    {"stop_writes_on_bgsave_error": "no"},
]


def told(link: Link) -> tuple[dict[str, str], dict[str, str] | None]:
    """What a server tells of itself: INFO, and CONFIG GET if it lets us."""
    info = parsed_info(link.ask("INFO"))
    try:
        return info, parsed_config(*(link.ask("CONFIG", "GET", name) for name in ASKED))
    except Refused:
        return info, None


def found(server: RedisServer) -> dict[str, tuple[str, str]]:
    """Severity and value by setting."""
    with server.link() as link:
        every = findings(*told(link), redis_place(server.url))
    return {each.setting: (each.severity, each.value) for each in every}


def test_nothing_is_said_of_a_safe_server() -> None:
    with RedisServer(**SAFE) as server:
        assert found(server) == {}
        with server.link() as link:
            assert check(*told(link), redis_place(server.url)) == []


@pytest.mark.parametrize("unsafe", [*REFUSED, *WARNED], ids=str)
def test_each_setting_is_found_alone(unsafe: dict[str, str]) -> None:
    ((name, value),) = unsafe.items()
    severity = "refuse" if unsafe in REFUSED else "warn"
    with RedisServer(**SAFE | unsafe) as server:
        assert found(server) == {name.replace("_", "-"): (severity, value)}
        with server.link() as link:
            place = redis_place(server.url)
            with contextlib.nullcontext() if severity == "warn" else pytest.raises(UnsafeRedis, match=value):
                check(*told(link), place)
            check(*told(link), dataclasses.replace(place, allow_unsafe=True))


def test_a_replica_is_refused_and_its_master_warned_of() -> None:
    with RedisServer(**SAFE) as master, RedisServer(**SAFE, replicaof=f"127.0.0.1 {master.port}") as replica:
        end = time.monotonic() + 10
        while master.info()["connected_slaves"] == "0":
            assert time.monotonic() < end, replica.log()
            time.sleep(0.01)
        assert found(replica) == {"role": ("refuse", "slave")}
        with replica.link() as link, pytest.raises(UnsafeRedis, match=f"in the URL, at 127.0.0.1:{master.port}"):
            check(*told(link), redis_place(replica.url))
        assert found(master) == {"min-replicas-to-write": ("warn", "0")}
        master.ask("CONFIG", "SET", "min-replicas-to-write", 1)
        assert found(master) == {}
        with master.link() as link:
            assert findings(told(link)[0], None, redis_place(master.url))[0].value == "unknown"


def test_a_cluster_is_safe() -> None:
    with RedisCluster(**SAFE) as cluster:
        for node in cluster.nodes:
            assert found(node) == {}


def test_off_this_machine_a_password_and_tls_are_missed() -> None:
    with RedisServer(**SAFE) as server, server.link() as link:
        place = dataclasses.replace(redis_place(server.url), host="10.0.0.1")
        every = findings(*told(link), place)
    assert [(each.setting, each.severity) for each in every] == [("AUTH", "warn"), ("TLS", "warn")]


def test_a_user_who_may_not_ask_gets_what_can_be_known() -> None:
    with RedisServer(appendonly="no", maxmemory_policy="allkeys-lru") as server, Link(server.port) as link:
        server.ask("ACL", "SETUSER", "app", "on", ">pw", "~*", "&*", "+@all", "-config")
        link.ask("AUTH", "app", "pw")
        info, config = told(link)
        assert config is None
        every = {each.setting: each.value for each in findings(info, config, redis_place(server.url))}
        hidden = "appendfsync, no-appendfsync-on-rewrite, stop-writes-on-bgsave-error"
        assert every == {"maxmemory-policy": "allkeys-lru", "maxmemory": "0", "appendonly": "no", hidden: "unknown"}


def test_a_server_that_was_started_again_is_another_one() -> None:
    with RedisServer(**SAFE) as server:
        before = identity(server.info())
        assert identity(server.info()) == before
        assert all(len(part) == 40 for part in before.split(":"))
        server.restart()
        assert identity(server.info()) != before


def test_the_replies_of_the_redis_package_are_read(redis_server: RedisServer) -> None:
    connection = importlib.import_module("redis").Connection(port=redis_server.port, protocol=2)
    connection.connect()
    try:
        replies = []
        for words in (["INFO"], *(["CONFIG", "GET", name] for name in ASKED)):
            connection.send_command(*words)
            replies.append(connection.read_response())
    finally:
        connection.disconnect()
    with redis_server.link() as link:
        ours, config = told(link)
    theirs = parsed_info(replies[0])
    for name in ("redis_version", "run_id", "master_replid", "role", "maxmemory_policy", "aof_enabled"):
        assert theirs[name] == ours[name]
    assert parsed_config(*replies[1:]) == config
    assert config is not None
    assert set(config) == set(ASKED)
