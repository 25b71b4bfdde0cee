"""The server of `agent-runtime inspect`: it reads everything, changes nothing, and answers this machine only."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, InvalidArgument
from agent_runtime_core._views.page import HEADERS, page_files
from agent_runtime_core.inspector.local_server import ROUTES, LocalServer
from tests.support.local_client import PATHS, LocalClient, inspecting
from tests.support.processes import OF_RUN, PATIENCE, Child, until
from tests.support.read_only import listing, write_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    asyncio.run(write_store(tmp_path / "store" / "agents.db"))
    return tmp_path / "store" / "agents.db"


@pytest.fixture
def server(store: Path) -> Iterator[LocalServer]:
    with inspecting(store) as server:
        yield server


@pytest.fixture
def client(server: LocalServer) -> Iterator[LocalClient]:
    client = LocalClient(server.port)
    yield client
    client.close()


def test_each_endpoint_answers_and_changes_nothing(store: Path, server: LocalServer, client: LocalClient) -> None:
    before = listing(store.parent)
    for path in PATHS:
        response = client.data(path)
        assert response.status == 200, (path, response.body)
        assert response.headers["cache-control"] == "no-store"
        assert response.headers["content-type"] == "application/json"
        assert response.headers.items() >= {name.lower(): value for name, value in HEADERS.items()}.items()
    assert listing(store.parent) == before
    about = (client.data("about")).json
    assert (about["scopes"], about["live"], about["read_only"], about["store"]) == (["read"], "poll", True, str(store))


def test_a_step_has_its_contents(client: LocalClient) -> None:
    (row,) = (client.data("runs/a_run/timeline")).json["items"]
    step = (client.data(f"runs/a_run/steps/{row['step_id']}")).json
    assert (step["name"], step["output"]) == ("one", 1)
    unknown = client.data("runs/a_run/steps/none")
    assert (unknown.status, unknown.problem) == (404, "not-found")


def test_the_page_and_its_files_are_served(client: LocalClient) -> None:
    page = client.send("/")
    assert page.body == page_files()["index.html"].content
    for name, file in page_files().items():
        found = client.send(f"/static/{name}")
        assert (found.status, found.body) == (200, file.content)
        assert {each: found.headers[each.lower()] for each in file.headers} == file.headers
    known = page_files()["main.js"].headers["ETag"]
    again = client.send("/static/main.js", headers={"Host": "localhost", "If-None-Match": known})
    assert (again.status, again.body) == (304, b"")


def test_the_page_names_its_modules_so_that_they_load_at_once(client: LocalClient) -> None:
    preloaded = re.findall(r"<static/([^>]+)>; rel=modulepreload", client.send("/").headers["link"])
    assert set(preloaded) == {name for name in page_files() if name.endswith(".js")}
    assert client.send("/static/main.js").headers.get("link") is None


def test_head_is_get_without_a_body(client: LocalClient) -> None:
    for target in ("/", "/static/style.css", "/api/v1/about", "/api/v1/runs/a_run", "/api/v1/runs/none"):
        get, head = client.send(target), client.send(target, "HEAD")
        assert (head.status, head.body) == (get.status, b"")
        assert {**head.headers, "x-request-id": ""} == {**get.headers, "x-request-id": ""}


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "INVENTED"])
def test_other_methods_are_rejected(client: LocalClient, method: str) -> None:
    response = client.send("/api/v1/runs/a_run/cancel", method)
    assert (response.status, response.problem) == (405, "method-not-allowed")
    assert response.headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "127.0.0.1:1", "127.9.9.9", "[::1]:8000"])
def test_a_loopback_host_is_accepted(client: LocalClient, host: str) -> None:
    assert (client.send("/api/v1/about", headers={"Host": host})).status == 200


@pytest.mark.parametrize("target", ["/", "/static/main.js", "/api/v1/about"])
@pytest.mark.parametrize(
    "host",
    ["", "example.com", "localhost.example.com", "127.0.0.1.nip.io", "0.0.0.0", "10.0.0.1", "127.0.0.1@x", "[::]"],
)
def test_another_host_is_rejected(client: LocalClient, target: str, host: str) -> None:
    response = client.send(target, headers={"Host": host})
    assert (response.status, response.problem) == (421, "wrong-host")
    missing = client.send(target, headers={})
    assert (missing.status, missing.problem) == (421, "wrong-host")


def test_the_page_of_another_origin_is_rejected(client: LocalClient, server: LocalServer) -> None:
    own = f"127.0.0.1:{server.port}"
    assert (client.send("/api/v1/about", headers={"Host": own, "Origin": f"http://{own}"})).status == 200
    for origin in ("http://example.com", "http://127.0.0.1:1", "null", "http://[::1", f"http://{own}.example.com"):
        response = client.send("/api/v1/about", headers={"Host": own, "Origin": origin})
        assert (response.status, response.problem) == (403, "foreign-origin")


TRICKS: dict[str, int] = {
    "/static/../../pyproject.toml": 404, "/static/%2e%2e/__init__.py": 404, "/static/..%2f__init__.py": 404,
    "/static//etc/passwd": 404, "/static/": 404, "/static": 404, "/static/main.js%00": 404, "/static/main.js/": 404,
    "/..": 404, "/api/v1/../v1/about": 404, "/api/v1": 404, "/api/v1/": 404, "/api/v1/runs/": 404,
    "/api/v1/runs//events": 404, "/api/v1/runs/a_run/": 404, "/api/v1/runs/%00": 404, "/api/v1/runs/a%2Fb": 404,
    "/api/v1/runs/..": 404, "/api/v1/runs/%ff": 404, "/api/v1/runs/a_run%2fevents": 404,
    "/api/v1/runs/" + "x" * 10_000: 414, "/api/v1/runs/" + "x" * 8_000: 404, "/api/v1/runs?q=" + "x" * 10_000: 414,
    "/" + "x" * 70_000: 414, "http://127.0.0.1/api/v1/about": 404, "*": 404, "about": 404,
}  # fmt: skip


@pytest.mark.parametrize("target", TRICKS, ids=range(len(TRICKS)))
def test_a_path_that_is_none_finds_nothing(client: LocalClient, target: str) -> None:
    response = client.send(target)
    assert response.status == TRICKS[target]
    assert response.problem
    assert (client.data("about")).status == 200


async def test_large_and_malformed_requests_are_rejected(server: LocalServer) -> None:
    for head, status in (
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 40_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 200 + b"\r\n", b"431"),
        (b"GET / HTTP/9.9\r\n\r\n", b"505"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET / x y\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", b"421"),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head)
        writer.write_eof()
        async with asyncio.timeout(PATIENCE):
            answer = await reader.read()
        writer.close()
        assert answer.split(b"\r\n", 1)[0].split(b" ")[1] == status
        assert b"application/problem+json" in answer


@pytest.mark.parametrize("before", [b"", b"Content-Length: 0\r\n"])
async def test_a_body_is_not_read_as_the_next_request(server: LocalServer, before: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = b"GET /api/v1/about HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"GET /api/v1/queue HTTP/1.1\r\nHost: localhost\r\n" + before
    writer.write(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
    async with asyncio.timeout(PATIENCE):
        answer = await reader.read()
    writer.close()
    assert answer.count(b"HTTP/1.1 200") == 1
    assert b'"read_only"' not in answer


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("runs?stat=failed", "stat is not a known field. Did you mean 'state'?"),
        ("runs?state=lost", "state.0 must be 'pending', "),
        ("runs?limit=0", "limit must be at least 1."), ("runs?limit=201", "limit must be at most 200."),
        ("runs?limit=many", "limit must be an integer."), ("runs?limit=1.5", "limit must be an integer."),
        ("runs?q=" + "x" * 513, "q must have at most 512 characters."), ("runs?parent=", "parent must not be empty."),
        ("runs?since=yesterday", "since must be a time of RFC 3339 or seconds since 1970"),
        ("runs?since=2&until=1", "since must not be after until."),
        ("runs?cursor=x", "cursor must be `next` of a page with the same filter"),
        ("approvals?cursor=%F0", "cursor must be `next` of a page with the same filter"),
        ("runs/a_run/steps?after=-2", "after must be at least -1."),
        ("runs/a_run/timeline?newest_first=perhaps", "newest_first must be true or false."),
        ("runs/a_run/result?wait=61", "wait must be at most 60."),
        ("runs/a_run/result?wait=nan", "wait must be at most 60."),
        ("runs/a_run/events?" + "types=x&" * 21, "types: There must be at most 20 of them."),
        ("usage?by=hour", "by must be 'agent', 'tenant', 'model' or 'day'."), ("queue?x=1", "x is not a known field."),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_parameter_is_named(client: LocalClient, path: str, message: str) -> None:
    response = client.data(path)
    assert (response.status, response.problem) == (422, "invalid-argument")
    assert response.json["detail"].startswith(message)
    assert len(response.json["errors"]) == 1


def test_a_wrong_position_of_an_event_is_named(client: LocalClient) -> None:
    response = client.data("runs/a_run/events?after=-1")
    assert (response.status, response.problem) == (400, "bad-request")
    assert response.json["errors"][0]["field"] == "after"


@pytest.mark.parametrize("rest", ["", "/result", "/steps", "/steps/x", "/timeline", "/journal", "/messages", "/plan",
                                  "/events", "/events?wait=60", "/compare/a_run"])  # fmt: skip
def test_an_unknown_run_is_not_found(client: LocalClient, rest: str) -> None:
    response = client.data(f"runs/none{rest}")
    assert (response.status, response.problem) == (404, "unknown-run")


def test_cursors_lead_through_the_list(client: LocalClient) -> None:
    keys: list[str] = []
    path = "runs?limit=1"
    while True:
        page = (client.data(path)).json
        keys += [each["key"] for each in page["items"]]
        if page["next"] is None:
            break
        path = f"runs?limit=1&cursor={page['next']}"
    assert keys == ["pending", "a_question", "a_failure", "a_run"]
    first = (client.data("runs?limit=1&agent=a_run")).json
    other = client.data(f"runs?limit=1&agent=a_failure&cursor={first['next']}")
    assert (other.status, other.problem) == (422, "invalid-argument")


def test_a_failure_of_the_code_is_hidden(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agent_runtime_core._views.read_routes.queue_view", _fails)
    response = client.data("queue")
    assert (response.status, response.problem) == (500, "internal-error")
    assert b"secret" not in response.body
    assert "ZeroDivisionError" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        f"UPDATE arc_journal SET body = 'x' WHERE kind = 'ended' AND {OF_RUN}",
        "UPDATE arc_runs SET error = '{', claim_id = '' WHERE run_id = ?",
    ],
)
def test_a_damaged_run_is_listed_with_the_others(store: Path, change: str) -> None:
    def damage(db: sqlite3.Connection) -> int:
        (run_id,) = db.execute("SELECT run_id FROM arc_runs WHERE run_key = 'a_failure'").fetchone()
        if change.startswith("UPDATE arc_runs"):
            db.execute(f"DELETE FROM arc_journal WHERE {OF_RUN}", (run_id,))
        return db.execute(change, (run_id,)).rowcount

    with contextlib.closing(sqlite3.connect(store)) as db, db:
        assert damage(db) == 1
    with inspecting(store) as server, contextlib.closing(LocalClient(server.port)) as client:
        items = {each["key"]: each for each in client.data("runs").json["items"]}
        assert items.keys() == {"pending", "a_question", "a_failure", "a_run"}
        assert items["a_failure"]["error"]["type"] == "StorageCorrupt"
        assert items["a_run"]["error"] is None
        assert client.data("usage").json["total"]["runs"] == 4
        run = client.data("runs/a_failure")
        assert (run.status, run.problem) == (500, "storage-corrupt")
        assert "Restore a backup" in run.json["detail"]


def test_a_file_that_was_deleted_is_named(store: Path, client: LocalClient) -> None:
    assert client.data("runs").status == 200
    for each in store.parent.glob("agents.db*"):
        each.rename(f"{each}.moved")
    response = client.data("runs")
    assert (response.status, response.problem) == (500, "storage-error")
    assert "was deleted or moved while it was open here" in response.json["detail"]


@pytest.mark.parametrize("payload", ["[]", "null", '{"details":', "{"])
def test_a_damaged_question_is_named(store: Path, payload: str) -> None:
    with contextlib.closing(sqlite3.connect(store)) as db, db:
        assert db.execute("UPDATE arc_mail SET payload = ? WHERE kind = 'question'", (payload,)).rowcount == 1
    with inspecting(store) as server, contextlib.closing(LocalClient(server.port)) as client:
        for path in ("approvals", "runs/a_question"):
            response = client.data(path)
            assert (response.status, response.problem) == (500, "storage-corrupt")
            assert "the question " in response.json["detail"]


async def _fails(*_: object) -> Any:
    raise ZeroDivisionError("sec" + "ret")


# -- waiting for events


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


def until_waiting(server: LocalServer) -> None:
    until(lambda: len(server._pending) == 1, "the request waits")


def test_a_finished_run_is_not_waited_for(client: LocalClient) -> None:
    last = client.data("runs/a_run/events").json["items"][-1]["sequence"]
    assert client.data(f"runs/a_run/events?after={last}&wait=60").json == {"items": [], "next": None}
    assert client.data("runs/a_run/result?wait=60").status == 200


def test_a_run_that_has_not_finished_has_no_result_yet(client: LocalClient) -> None:
    response = client.data("runs/pending/result")
    assert (response.status, response.json["state"], response.headers["retry-after"]) == (202, "pending", "1")


@pytest.mark.parametrize("path", ["pending/events", "a_question/events?types=step.*&", "pending/result"])
def test_a_client_that_leaves_ends_its_wait(server: LocalServer, path: str) -> None:
    query = "wait=60" if "?" in path else "?wait=60"
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(f"GET /api/v1/runs/{path}{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        until_waiting(server)
    until(lambda: not server._pending, "the wait is over")


def test_who_waits_when_the_server_stops_is_told(store: Path, thread: ThreadPoolExecutor) -> None:
    with inspecting(store) as server:
        client = LocalClient(server.port)
        request = thread.submit(client.data, "runs/pending/events?wait=60")
        until_waiting(server)
    response = request.result(PATIENCE)
    assert (response.status, response.problem) == (503, "not-available")
    late = client.data("runs")  # the connection is still open
    assert (late.status, late.problem) == (503, "not-available")
    client.close()


def test_a_new_event_of_another_process_ends_the_wait(store: Path, thread: ThreadPoolExecutor) -> None:
    with Child("writes", store, 1, 3600) as child:
        child.expect("ready")
        with inspecting(store) as server:
            client = LocalClient(server.port)
            assert client.data("runs/run%201/events").json == {"items": [], "next": None}
            request = thread.submit(client.data, "runs/run%201/events?types=tick&wait=60")
            until_waiting(server)
            child.tell("")
            events = request.result(PATIENCE).json["items"]
            client.close()
        assert events[0]["type"] == "tick"
        assert child.kill()


def test_all_requests_succeed_while_another_process_writes(store: Path) -> None:
    with Child("writes", store, 1, 3600) as child:
        child.expect("ready")
        child.tell("")
        with inspecting(store) as server:
            client = LocalClient(server.port)
            last = client.data("runs/run%201/events?wait=60").json["items"][-1]["sequence"]
            paths = [*PATHS, "runs/run%201", "runs/run%201/events?after=0"]
            for number in range(100):
                response = client.data(paths[number % len(paths)])
                assert response.status == 200, (number, response.body)
            assert client.data(f"runs/run%201/events?after={last}&wait=60").json["items"]
            client.close()
        assert child.kill()


def test_a_store_on_a_redis_is_read_and_followed(redis_url: str, thread: ThreadPoolExecutor) -> None:
    asyncio.run(write_store(redis_url))

    async def publish() -> None:
        async with AgentRunner.open(redis_url) as runner:
            run_id = (await runner.get_run("pending")).run_id
            await runner.event_bus.publish(run_id, "seen", {"n": 2})

    with inspecting(redis_url) as server:
        client = LocalClient(server.port)
        assert {path: client.data(path).status for path in PATHS} == dict.fromkeys(PATHS, 200)
        assert client.data("about").json["backend"] == "Redis"
        assert redis_url not in client.data("about").body.decode()
        request = thread.submit(client.data, "runs/pending/events?wait=60")
        until_waiting(server)
        asyncio.run(publish())
        assert [each["type"] for each in request.result(PATIENCE).json["items"]] == ["seen"]
        client.close()


def test_a_used_port_is_an_error(store: Path, server: LocalServer) -> None:
    with (
        pytest.raises(InvalidArgument, match=rf"port {server.port} of 127\.0\.0\.1 cannot be used"),
        inspecting(store, server.port),
    ):
        pass


def test_each_route_has_its_own_path() -> None:
    for route in ROUTES:
        parts = route.path.replace("{}", "x").split("/")
        assert [each.path for each in ROUTES if each.ids_in(parts) is not None] == [route.path]
