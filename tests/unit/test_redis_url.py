"""What the URL of a Redis says, what it may not say, and that nobody reads its password."""

from __future__ import annotations

import dataclasses
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent_runtime_core._core.validation import redacted_url
from agent_runtime_core._engines.redis.url import RedisAddress, redis_place
from agent_runtime_core.errors import InvalidArgument
from tests.support.cases import for_each


@for_each(
    ("url", "place"),
    [
        ("redis://h", RedisAddress(host="h", port=6379, db=0, prefix="arc")),
        ("redis://h/", RedisAddress(host="h")),
        ("redis://h:7000/3", RedisAddress(host="h", port=7000, db=3)),
        ("redis://h?db=3", RedisAddress(host="h", db=3)),
        ("REDIS://Cache.Example:1", RedisAddress(host="cache.example", port=1)),
        ("rediss://h", RedisAddress(host="h", tls=True)),
        ("redis://:p%40ss%2F@h", RedisAddress(host="h", password="p@ss/")),
        ("redis://me:p:w@h", RedisAddress(host="h", username="me", password="p:w")),
        ("redis://[::1]:7000/1", RedisAddress(host="::1", port=7000, db=1)),
        ("redis://h?prefix=my-app_2.x", RedisAddress(host="h", prefix="my-app_2.x")),
        ("redis://h?allow_unsafe=1", RedisAddress(host="h", allow_unsafe=True)),
        ("redis://h?allow_unsafe=false&prefix=a", RedisAddress(host="h", prefix="a")),
        ("unix:///run/redis.sock", RedisAddress(unix_socket="/run/redis.sock")),
        (
            "unix://me:pw@/run/a%20b.sock?db=2",
            RedisAddress(unix_socket="/run/a b.sock", db=2, username="me", password="pw"),
        ),
    ],
)
def test_what_a_url_says(url: str, place: RedisAddress) -> None:
    assert redis_place(url) == place


@for_each(
    ("url", "why"),
    [
        ("", "Redis URL must be redis://host:6379/0, rediss://host:6379/0 (TLS) or"),
        ("localhost:6379", "Redis URL must be redis://host:6379/0, rediss://host:6379/0 (TLS) or"),
        ("redis:h", "Redis URL must be redis://host:6379/0, rediss://host:6379/0 (TLS) or"),
        ("http://h", "Redis URL must be redis://host:6379/0, rediss://host:6379/0 (TLS) or"),
        ("redis+sentinel://h", "Redis URL must be redis://host:6379/0, rediss://host:6379/0 (TLS) or"),
        ("redis://", "Redis URL must name a host, got 'redis://"),
        ("redis:///0", "Redis URL must name a host, got 'redis://"),
        ("redis://:6379", "Redis URL must name a host, got 'redis://"),
        ("redis://h:0", "Redis URL must have a port from 1 to 65535, got 'redis://"),
        ("redis://h:65536", "Redis URL must have a port from 1 to 65535, got 'redis://"),
        ("redis://h:x", "Redis URL must have a port from 1 to 65535, got 'redis://"),
        ("redis://[::1", "IPv6"),
        ("redis://h/x", "Redis URL must have a database number of 1 to 5 digits"),
        ("redis://h/-1", "Redis URL must have a database number of 1 to 5 digits, got 'redis://h"),
        ("redis://h/0/1", "Redis URL must have a database number of 1 to 5 digits, got 'redis://h"),
        ("redis://h/\u0661", "Redis URL must have a database number of 1 to 5 digits, got 'redis://h"),
        ("redis://h/1?db=2", "Redis URL must name the database once, in the path or with db="),
        ("redis://h?db=", "Redis URL must have a database number of 1 to 5 digits, got 'redis://h"),
        ("redis://h?db=1&db=2", "Redis URL must have db= only once, got 'redis://h?db=1&db=2'"),
        ("redis://h?prefix=", "must have a prefix of 1 to 64 letters"),
        ("redis://h?prefix=a{b", "Redis URL must have a prefix of 1 to 64 letters, digits, '_', '.' or '-'"),
        ("redis://h?prefix=a:b", "Redis URL must have a prefix of 1 to 64 letters, digits, '_', '.' or '-'"),
        ("redis://h?prefix=a%0d%0ab", "Redis URL must have a prefix of 1 to 64 letters, digits, '_', '.' or '-'"),
        ("redis://h?prefix=\u00e9", "Redis URL must have a prefix of 1 to 64 letters, digits, '_', '.' or '-'"),
        (f"redis://h?prefix={'a' * 65}", "Redis URL must have a prefix of 1 to 64 letters, digits, '_', '.' or '-'"),
        ("redis://h?allow_unsafe=maybe", "Redis URL must have allow_unsafe=1 or allow_unsafe=0"),
        ("redis://h?socket_timeout=3", "Redis URL 'redis://h?socket_timeout=3': unknown option 'socket_timeout'"),
        ("rediss://h?ssl_ca_certs=x", "SSL_CERT_FILE"),
        ("redis://h?password=secret", "before the host"),
        ("redis://secret@h", "Redis URL must have user:password before the @, or :password alone"),
        ("redis://secret:@h", "Redis URL must have user:password before the @, or :password alone"),
        ("redis://:sec#ret@h", "%23"),
        ("redis://h#1", "Redis URL must not have a fragment"),
        ("unix://me:p@/sec?sec@/run/x.sock", "%40"),
        ("unix://me:p@/sec@/run/x.sock", "%40"),
        (":secret@h:1", "Redis URL must be redis://host:6379/0, rediss://host:6379/0 (TLS) or"),
        ("redis:/:secret@h", "Redis URL must be redis://host:6379/0, rediss://host:6379/0 (TLS) or"),
        ("redis:secret", "Redis URL must be redis://host:6379/0, rediss://host:6379/0 (TLS) or"),
        ("redis://:sec/ret@h", "%2F"),
        ("redis://:sec?ret@h", "%3F"),
        ("redis://h\n", "Redis URL must percent-encode spaces, line ends and control characters"),
        ("redis://h /0", "Redis URL must percent-encode spaces, line ends and control characters"),
        ("unix://run/redis.sock", "the whole path of the socket"),
        ("unix://", "the whole path of the socket"),
        ("unix:///", "the whole path of the socket"),
        ("unix:///a%00b", "the whole path of the socket"),
    ],
)
def test_what_no_url_may_say_is_named_with_the_way_out(url: str, why: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        redis_place(url)
    assert why in str(caught.value)
    assert "sec" not in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


def test_a_place_is_named_by_a_text() -> None:
    with pytest.raises(InvalidArgument, match="Redis URL must be a string such as 'redis://host:6379/0', got a bytes"):
        redis_place(b"redis://h")  # type: ignore[arg-type]


@for_each(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://:pw@h", "redis://***@h"),
        ("redis://me:p@w@h:1/2?prefix=a", "redis://***@h:1/2?prefix=a"),
        ("redis://me:p/w@h", "redis://***@h"),
        ("redis://me:p\nw@h", "redis://***@h"),
        ("unix://me:pw@/run/x.sock", "unix://***@/run/x.sock"),
        ("unix:///run/a@b.sock", "unix:///run/a@b.sock"),
        ("redis://h?password=pw&db=1", "redis://h?password=***&db=1"),
        ("redis://h?PASSWORD=pw", "redis://h?PASSWORD=***"),
        ("redis://:pw", "redis://***"),
        ("redis://me:pw/0", "redis://***"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://h:/0", "redis://h:/0"),
        ("me:p/w@h:1", "***@h:1"),
        ("me:pw", "***"),
        ("redis://me:=secret=@h:1", "redis://***@h:1"),
        ("h:6379/1", "h:6379/1"),
        ("sqlite:///a@b:c", "sqlite:///a@b:c"),
        ("no url at all", "no url at all"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, shown: str) -> None:
    assert redacted_url(url) == shown


words = st.text(st.characters(codec="utf-8"), min_size=1)


@settings(deadline=None)
@given(words, words)
def test_any_user_and_password_come_through_encoded(user: str, password: str) -> None:
    place = redis_place(f"redis://{quote(user, safe='')}:{quote(password, safe='')}@h:1/2")
    assert (place.username, place.password, place.host, place.port, place.db) == (user, password, "h", 1, 2)
    assert str(place) == "redis://h:1/2"
    assert repr(place) == repr(redis_place("redis://h:1/2"))


@settings(deadline=None)
@given(st.text(st.characters(codec="ascii"), min_size=1))
@example("=")  # as the name of an option
@example("?token=")
@example("1=")
def test_no_password_is_in_an_error_however_it_is_written(scrawl: str) -> None:
    url = f"redis://me:{scrawl}SECRET{scrawl}@h:x"
    with pytest.raises(InvalidArgument) as caught:
        redis_place(url)
    assert "SECRET" not in str(caught.value)


def test_the_text_of_a_place_shows_where_and_nothing_secret() -> None:
    place = redis_place("rediss://me:hush@[::1]:7000/4?prefix=app")
    assert str(place) == "rediss://[::1]:7000/4"
    assert "hush" not in repr(place)
    assert "'me'" not in repr(place)
    assert str(redis_place("unix:///run/x.sock?db=1")) == "unix:///run/x.sock?db=1"


def test_the_prefix_is_the_hash_tag_of_every_key() -> None:
    assert redis_place("redis://h?prefix=app").tag == "{app}"


@pytest.mark.parametrize(
    ("url", "loopback"),
    [
        ("redis://localhost", True),
        ("redis://127.0.0.1", True),
        ("redis://127.9.9.9", True),
        ("redis://[::1]", True),
        ("unix:///run/x.sock", True),
        ("redis://redis", False),
        ("redis://10.0.0.1", False),
        ("redis://127.example", False),
    ],
)
def test_what_stays_on_this_machine(url: str, loopback: bool) -> None:
    assert redis_place(url).loopback is loopback


def test_two_urls_of_one_place_are_equal_and_can_be_a_key() -> None:
    assert {redis_place("redis://h"), redis_place("redis://h:6379/0?prefix=arc")} == {RedisAddress(host="h")}
    assert dataclasses.replace(RedisAddress(host="h"), password="x") != RedisAddress(host="h")
