"""What other tests believe of their servers and of the proxy before them."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator

import pytest

from tests.support import redis_servers as servers
from tests.support.processes import until
from tests.support.redis_protocol import Link, Refused, Unfinished, read, request
from tests.support.redis_proxy import Cut, When
from tests.support.redis_servers import RedisCluster, RedisServer, free_port

pytestmark = pytest.mark.redis


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Cut]:
    with Cut(redis_server.port) as proxy:
        yield proxy


@pytest.fixture
def key(redis_server: RedisServer, redis_url: str) -> str:
    """A key of this test alone, that is not there."""
    return f"{{{redis_url.rpartition('=')[2]}}}:n"


def count(server: RedisServer, key: str) -> int:
    return int(server.ask("GET", key) or 0)


# -- one server


def test_a_server_has_its_options_and_a_folder_that_goes_with_it() -> None:
    with RedisServer(maxmemory_policy="allkeys-lru", appendonly="yes") as server:
        assert server.ask("CONFIG", "GET", "maxmemory-policy") == [b"maxmemory-policy", b"allkeys-lru"]
        assert server.info()["role"] == "master"
        assert server.info()["tcp_port"] == str(server.port)
        assert list(server.folder.glob("appendonlydir*"))
        folder, pid = server.folder, server.pid
    assert not folder.exists()
    assert not server.alive
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_with_a_password_has_it_in_its_url() -> None:
    with RedisServer(requirepass="hush") as server:
        assert server.url == f"redis://:hush@127.0.0.1:{server.port}/0"
        assert server.ask("PING") == b"PONG"
        with Link(server.port) as stranger, pytest.raises(Refused, match="NOAUTH"):
            stranger.ask("PING")


@pytest.mark.parametrize(("appendonly", "kept"), [("yes", b"1"), ("no", None)])
def test_a_killed_server_comes_back_on_its_port_with_what_it_wrote(appendonly: str, kept: bytes | None) -> None:
    with RedisServer(appendonly=appendonly) as server:
        port, pid, life = server.port, server.pid, server.info()["run_id"]
        server.ask("SET", "a", 1)
        server.write_out()
        server.kill()
        assert not server.alive
        with pytest.raises(ConnectionError):
            server.ask("PING")
        server.restart(maxmemory="100mb")
        assert (server.port, server.ask("GET", "a")) == (port, kept)
        assert server.pid != pid
        assert server.info()["run_id"] != life
        assert server.info()["maxmemory"] == str(100 << 20)


def test_a_stopped_server_answers_nobody_until_it_goes_on() -> None:
    with RedisServer() as server, server.link() as link:
        server.stop()
        link.send("PING")
        link._socket.settimeout(0.05)
        with pytest.raises(TimeoutError):
            link.receive()
        server.cont()
        link._socket.settimeout(10)
        assert link.receive() == b"PONG"
        server.stop()
    assert not server.alive


def test_a_port_that_was_taken_in_between_is_left_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        ports = itertools.chain([taken, taken], iter(free_port, None))
        monkeypatch.setattr(servers, "free_port", lambda below: next(ports))
        with RedisServer() as server:
            assert server.port != taken
            assert server.ask("PING") == b"PONG"


def test_an_option_it_does_not_know_is_an_error_with_its_words() -> None:
    with pytest.raises(AssertionError, match="no-such-option"), RedisServer(no_such_option="1"):
        pass


def test_where_no_server_is_the_test_is_skipped_on_a_laptop_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise servers.Absent("none here")

    monkeypatch.setattr(servers, "program", nowhere)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="have to run in CI: none here"), RedisServer():
        pass
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="none here"), RedisServer():
        pass


def test_tests_share_a_server_and_no_prefix(redis_server: RedisServer, redis_url: str, key: str) -> None:
    assert redis_url.startswith(f"{redis_server.url}?prefix=t")
    assert redis_server.ask("EXISTS", key) == 0
    redis_server.ask("SET", key, 1)


def test_that_other_test_left_nothing_under_this_prefix(redis_server: RedisServer, key: str) -> None:
    assert redis_server.ask("EXISTS", key) == 0
    redis_server.ask("SET", key, 1)


# -- a cluster


def test_a_cluster_takes_writes_where_the_slot_is(redis_cluster: RedisCluster) -> None:
    cluster = redis_cluster
    assert len(set(cluster.urls)) == 3
    homes = set()
    for tag in "abcdefghijkl":
        home = cluster.node_of(f"{{{tag}}}:x")
        homes.add(home.port)
        assert home.ask("SET", f"{{{tag}}}:x", 1) == b"OK"
        assert cluster.node_of(f"{{{tag}}}:y") is home
    assert homes == {node.port for node in cluster.nodes}
    home = cluster.node_of("{a}")
    stranger = next(node for node in cluster.nodes if node is not home)
    with pytest.raises(Refused, match=f"MOVED .*:{home.port}"):
        stranger.ask("GET", "{a}:x")
    assert home.info()["cluster_enabled"] == "1"


# -- the proxy


def test_a_proxy_passes_on_and_counts(proxy: Cut, redis_server: RedisServer, key: str) -> None:
    big = b"\r\n$-1*" * 100_000
    with Link(proxy.port) as one, Link(proxy.port) as two:
        assert one.ask("SET", key, big) == b"OK"
        assert two.ask("GET", key) == big
        for _ in range(3):
            one.send("PING")
        assert [one.receive() for _ in range(3)] == [b"PONG"] * 3
        assert two.ask("HELLO", 3)[b"proto"] == 3
        with pytest.raises(Refused):
            two.ask("NONSENSE")
    assert proxy.connections == 2
    assert proxy.asked == ["SET", "GET", "PING", "PING", "PING", "HELLO", "NONSENSE"]
    assert proxy.cuts == 0


# when, whether the server carried the request out, what the client reads of the reply
CUTS = [("before", 0, b""), ("middle", 1, b":1"), ("after", 1, b"")]


@pytest.mark.parametrize(("when", "applied", "heard"), CUTS, ids=[row[0] for row in CUTS])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_connection_is_cut_at_the_nth_request(
    proxy: Cut, redis_server: RedisServer, key: str, when: When, applied: int, heard: bytes, n: int
) -> None:
    redis_server.ask("SET", key, -(n - 1))
    with Link(proxy.port) as link:
        link.ask("PING")
        proxy.cut(when, n)
        for i in range(n - 1):
            assert link.ask("INCR", key) == i + 2 - n
        with pytest.raises(EOFError, match=f"after {heard!r}$"):
            link.ask("INCR", key)
        assert proxy.cuts == 1
    assert count(redis_server, key) == applied
    with Link(proxy.port) as again:
        assert again.ask("INCR", key) == applied + 1


@pytest.mark.parametrize(("when", "applied", "heard"), CUTS, ids=[row[0] for row in CUTS])
def test_a_pipeline_is_cut_in_its_midst(
    proxy: Cut, redis_server: RedisServer, key: str, when: When, applied: int, heard: bytes
) -> None:
    proxy.cut(when, 3)
    with Link(proxy.port) as link:
        link._socket.sendall(request("DECR", key) + request("INCR", key) + request("INCR", key) * 3)
        assert [link.receive(), link.receive()] == [-1, 0]
        with pytest.raises((EOFError, ConnectionResetError)):
            link.receive()
        assert bytes(link._unread) == heard
    assert count(redis_server, key) == applied


def test_a_stalled_connection_stays_open_and_silent(proxy: Cut, redis_server: RedisServer, key: str) -> None:
    proxy.cut("stall", 1)
    with Link(proxy.port, seconds=0.1) as link, Link(proxy.port) as other:
        with pytest.raises(TimeoutError):
            link.ask("INCR", key)
        until(lambda: proxy.cuts == 1, "the request to be carried out")
        assert other.ask("INCR", key) == 2
        link.send("INCR", key)
        with pytest.raises(TimeoutError):
            link.receive()
        assert other.ask("GET", key) == b"2"
    assert proxy.cuts == 1


def test_all_connections_are_dropped_at_once(proxy: Cut) -> None:
    with Link(proxy.port) as one, Link(proxy.port) as two:
        one.ask("PING")
        two.ask("PING")
        assert proxy.drop() == 2
        for link in (one, two):
            with pytest.raises((EOFError, ConnectionResetError)):
                link.receive()
    assert proxy.drop() == 0
    with Link(proxy.port) as link:
        assert link.ask("PING") == b"PONG"


def test_replies_are_late(proxy: Cut, key: str) -> None:
    proxy.delay = 0.05
    with Link(proxy.port) as link:
        began = time.monotonic()
        for _ in range(20):
            link.send("PING")
        assert [link.receive() for _ in range(20)] == [b"PONG"] * 20
        assert time.monotonic() - began >= 0.05
        proxy.delay = 0
        assert link.ask("PING") == b"PONG"


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_is_published_is_no_reply(
    proxy: Cut, redis_server: RedisServer, key: str, protocol: int, when: When
) -> None:
    with Link(proxy.port) as link:
        link.ask("HELLO", protocol)
        assert link.ask("SUBSCRIBE", key) == [b"subscribe", key.encode(), 1]
        for _ in range(2):
            redis_server.ask("PUBLISH", key, "x")
            assert link.receive() == [b"message", key.encode(), b"x"]
        proxy.cut(when, 2)
        link.send("PING")
        assert link.receive() in (b"PONG", [b"pong", b""])
        with pytest.raises((EOFError, ConnectionResetError)):
            link.ask("PING")
    assert proxy.cuts == 1


def test_a_subscription_can_be_cut_too(proxy: Cut, redis_server: RedisServer, key: str) -> None:
    proxy.cut("after", 2)
    with Link(proxy.port) as link:
        link.ask("HELLO", 3)
        with pytest.raises(EOFError):
            link.ask("SUBSCRIBE", key)


def test_a_server_that_is_down_ends_the_connection() -> None:
    with RedisServer() as server, Cut(server.port) as proxy:
        with Link(proxy.port) as link:
            assert link.ask("PING") == b"PONG"
            server.kill()
            with pytest.raises((EOFError, ConnectionError)):
                link.receive()
        with Link(proxy.port) as link, pytest.raises((EOFError, ConnectionError)):
            link.ask("PING")
        server.restart()
        with Link(proxy.port) as link:
            assert link.ask("PING") == b"PONG"


def test_what_the_proxy_cannot_follow_fails_the_test(redis_server: RedisServer) -> None:
    proxy = Cut(redis_server.port).__enter__()
    with Link(proxy.port) as link:
        link._socket.sendall(b"PING\r\n")
        with pytest.raises((EOFError, ConnectionError)):
            link.receive()
    with pytest.raises(AssertionError, match="could not be followed"):
        proxy.__exit__(None, None, None)


# -- the protocol

MESSAGES = [
    (b"+OK\r\n", b"OK"),
    (b":-12\r\n", -12),
    (b"$5\r\na\r\nb\0\r\n", b"a\r\nb\0"),
    (b"$0\r\n\r\n", b""),
    (b"$-1\r\n", None),
    (b"*-1\r\n", None),
    (b"_\r\n", None),
    (b"*0\r\n", []),
    (b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n", [b"a", [1]]),
    (b"%1\r\n+k\r\n%1\r\n+j\r\n#t\r\n", {b"k": {b"j": True}}),
    (b"~1\r\n,1.5\r\n", [1.5]),
    (b">2\r\n+message\r\n$1\r\nx\r\n", [b"message", b"x"]),
    (b"|1\r\n+ttl\r\n:3\r\n$1\r\nx\r\n", b"x"),
    (b"=7\r\ntxt:abc\r\n", b"txt:abc"),
    (b"(123456789012345678901234567890\r\n", 123456789012345678901234567890),
]


@pytest.mark.parametrize(("raw", "value"), MESSAGES, ids=[repr(row[0]) for row in MESSAGES])
def test_a_message_ends_where_it_ends(raw: bytes, value: object) -> None:
    assert read(raw + b"+next\r\n") == (value, len(raw))
    for end in range(len(raw)):
        with pytest.raises(Unfinished):
            read(raw[:end])


def test_a_server_reads_what_the_link_sends(redis_server: RedisServer, key: str) -> None:
    assert redis_server.ask("ECHO", b"\0\r\n$") == b"\0\r\n$"
    assert read(request("SET", "k", 1)) == ([b"SET", b"k", b"1"], len(request("SET", "k", 1)))
    with pytest.raises(ValueError, match="no message begins"):
        read(b"PING\r\n")
