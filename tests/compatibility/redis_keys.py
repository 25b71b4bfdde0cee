"""The keys of a Redis server as JSON, and back, by their values: a DUMP of one server version is not for another."""

from __future__ import annotations

from typing import Any

import redis


def read_keys(url: str) -> dict[str, list[Any]]:
    """Return type and value of each key that does not expire; bytes are read as Latin-1."""
    with redis.Redis.from_url(url, encoding="latin-1", decode_responses=True) as server:
        return {key: [server.type(key), _value(server, key)] for key in server.scan_iter("*") if server.ttl(key) < 0}


def _value(server: redis.Redis, key: str) -> Any:
    match kind := server.type(key):
        case "string":
            return server.get(key)
        case "hash":
            return server.hgetall(key)
        case "list":
            return server.lrange(key, 0, -1)
        case "set":
            return sorted(server.smembers(key))
        case "zset":
            return server.zrange(key, 0, -1, withscores=True)
        case "stream":
            return server.xrange(key)
    raise AssertionError(f"no reader for {kind!r} at {key}")


def write_keys(url: str, keys: dict[str, list[Any]]) -> None:
    with redis.Redis.from_url(url, encoding="latin-1", decode_responses=True) as server:
        for key, (kind, value) in keys.items():
            match kind:
                case "string":
                    server.set(key, value)
                case "hash":
                    server.hset(key, mapping=value)
                case "list":
                    server.rpush(key, *value)
                case "set":
                    server.sadd(key, *value)
                case "zset":
                    server.zadd(key, dict(value))
                case "stream":
                    for entry, fields in value:
                        server.xadd(key, fields, id=entry)
