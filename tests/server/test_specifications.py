"""The flows of the API, as a client in another process sees them, through servers started from the command line.

Each runs on a SQLite file with one server, and on Redis with two: the client submits to one and reads from the other.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.sync.client import ClientConnection, connect
from websockets.sync.connection import Connection

from tests.server.conftest import TOKEN, Served
from tests.server.served_turns import PIECE
from tests.support.backends import POSTGRES
from tests.support.pages import blocks_of
from tests.support.processes import PATIENCE, ROOT, Command

Servers = tuple[Served, Served]
#: Bytes of an answer that a run produces for a client that reads nothing: 128 KiB of the run, 64 KiB that the kernel
#: has not sent, the buffers of the connection, and one piece of each.
MOST_UNREAD = 320 * 1024


@pytest.fixture(params=["sqlite", "redis", POSTGRES])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return (
        str(tmp_path / "agents.db")
        if request.param == "sqlite"
        else str(request.getfixturevalue(f"{request.param}_url"))
    )


@pytest.fixture
def start(store: str, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Servers]:
    """`start(*arguments)`: where to submit and where to read; on Redis two servers, else one."""
    monkeypatch.setenv("ARC_TEST_STORE", store)

    def servers(*args: str) -> Servers:
        given = args or ("--url", store)
        first = serve(*given)
        return first, serve(*given) if "://" in store else first

    return servers


def socket_to(server: Served, **options: Any) -> ClientConnection:
    url = f"ws://127.0.0.1:{server.port}/api/v1/socket"
    return connect(url, subprotocols=["agent-runtime", f"bearer.{TOKEN}"], max_size=None, **options)  # type: ignore[list-item]


def frames_until(connection: Connection, kind: str) -> Iterator[dict[str, Any]]:
    while True:
        frame = json.loads(connection.recv(PATIENCE))
        yield frame
        if frame["type"] == kind:
            return


def completed(client: httpx.Client, run_id: str) -> dict[str, Any]:
    """Poll the run until it has finished, as a client without a stream does."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        run: dict[str, Any] = client.get(f"/api/v1/runs/{run_id}").json()
        if run["status"] in ("completed", "failed"):
            return run
    raise AssertionError("the run does not finish")


@pytest.mark.sentence(
    "003", "`RunResponse`: `run_id`, `status`, `steps`, `result`, `error`, `created_at`, `updated_at`"
)
@pytest.mark.sentence("003", "A step entry has `step_number`, `tool_name`, `tool_input`, `result`, `attempt`")
@pytest.mark.sentence("003", "`POST /runs` answers 201")
@pytest.mark.sentence("003", "`GET /runs/{run_id}` answers the run, and 404 for an unknown one")
def test_a_prompt_is_submitted_polled_and_completed(start: Callable[..., Servers]) -> None:
    writing, reading = start()
    with writing.client() as client, reading.client() as reader:
        created = client.post("/api/v1/runs", json={"prompt": "add 12 and 30"})
        assert created.status_code == 201
        run = created.json()
        assert created.headers["location"].endswith(f"/api/v1/runs/{run['run_id']}")
        assert run["status"] in ("pending", "running", "completed")
        done = completed(reader, run["run_id"])
        assert (done["status"], done["result"], done["error"]) == ("completed", 42, None)
        [step] = done["steps"]
        assert step["step_number"] == 1
        assert step["tool_name"] == "calculator"
        assert step["result"] == {"success": True, "output": 42, "error": None}
        assert done["created_at"] <= done["updated_at"]
        assert reader.get("/api/v1/runs/00000000-0000-0000-0000-000000000000").status_code == 404


@pytest.mark.sentence("003", "`RunCreate`: `prompt`, `max_steps` (default 10, from 1 to 100)")
@pytest.mark.sentence("003", "Error responses: wrong input is 422")
def test_an_invalid_prompt_gets_422(serve: Callable[..., Served]) -> None:
    bodies: list[tuple[dict[str, Any], str]] = [
        ({"prompt": "add 1 and 2", "max_steps": 0}, "max_steps"),
        ({"prompt": "add 1 and 2", "max_steps": 101}, "max_steps"),
        ({"prompt": 7}, "prompt"),
        ({"prompt": "add 1 and 2", "steps": 3}, "steps"),
    ]
    with serve().client() as client:
        for body, field in bodies:
            answer = client.post("/api/v1/runs", json=body)
            assert answer.status_code == 422, body
            assert [each["field"] for each in answer.json()["errors"]] == [field]


@pytest.mark.sentence("003", "If planning or a step fails, the run is `failed` with an error")
def test_a_prompt_that_cannot_be_planned_fails_with_a_reason(start: Callable[..., Servers]) -> None:
    writing, reading = start()
    with writing.client() as client, reading.client() as reader:
        run = client.post("/api/v1/runs", json={"prompt": "sing a song"}).json()
        done = completed(reader, run["run_id"])
    assert (done["status"], done["result"]) == ("failed", None)
    assert done["error"].startswith("PlanningError: ")


@pytest.mark.sentence("001", "TurnManager: 422 on malformed turn")
@pytest.mark.sentence("001", "StepProcessor produces response chunks to WebSocket & `audit` topic")
def test_a_turn_over_the_socket_arrives_in_deltas(start: Callable[..., Servers]) -> None:
    writing, reading = start("tests.server.served_turns:turns")
    with socket_to(writing) as connection:
        connection.send(json.dumps({"type": "turn", "ref": 1, "turn": {"text": "write 3", "user": "bob"}}))
        refused = json.loads(connection.recv(PATIENCE))
        assert (refused["type"], refused["status"], refused["field"], refused["ref"]) == ("error", 422, "user", 1)
        turn = {"text": "write 3", "turn_id": "t-1"}
        connection.send(json.dumps({"type": "turn", "ref": 2, "turn": turn}))
        frames = list(frames_until(connection, "done"))
    assert frames[0]["type"] == "ack"
    assert frames[0]["ref"] == 2
    assert "".join(frame["delta"] for frame in frames if frame["type"] == "delta") == PIECE * 3
    sequences = [frame["sequence"] for frame in frames if "sequence" in frame]
    assert sequences == list(range(len(sequences)))
    assert frames[-1]["state"] == "succeeded"
    with socket_to(reading) as connection:
        connection.send(json.dumps({"type": "follow", "ref": 3, "run_id": "t-1", "after": sequences[-2]}))
        again = list(frames_until(connection, "done"))
    assert [frame.get("sequence") for frame in again] == [None, sequences[-1], None]


@pytest.mark.sentence("001", "pauses consumption if the output WebSocket buffer exceeds 128 KB")
@pytest.mark.parametrize("apart", [False, True], ids=["one process", "worker apart"])
def test_a_socket_that_is_not_read_pauses_the_run(
    serve: Callable[..., Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    monkeypatch.setenv("ARC_TEST_STORE", str(tmp_path / "agents.db"))
    server = serve("tests.server.served_turns:turns", *(["--no-worker"] if apart else []))
    size = 10 << 20
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    plain.connect(("127.0.0.1", server.port))
    worker = Command("agent_runtime_core", "worker", "tests.server.served_turns:runner") if apart else None
    with (
        worker or contextlib.nullcontext(),
        server.client() as client,
        socket_to(server, sock=plain, max_queue=1, ping_interval=None) as connection,
    ):
        turn = {"text": f"write {size // len(PIECE)}", "turn_id": "long"}
        connection.send(json.dumps({"type": "turn", "turn": turn}))
        ack = json.loads(connection.recv(PATIENCE))
        published = _when_it_pauses(client)
        assert client.get("/api/v1/runs/long").json()["state"] == "running"
        assert 0 < published <= (MOST_UNREAD if sys.platform == "linux" else size - 1)
        frames = list(frames_until(connection, "done"))
    assert ack["type"] == "ack"
    assert sum(len(frame["delta"]) for frame in frames if frame["type"] == "delta") == size


def _when_it_pauses(client: httpx.Client) -> int:
    """Return how many characters of its answer the run has published when it publishes no more."""
    after, before = "", 0  # the last page that is not full, and the characters on the pages before it
    seen, unchanged = -1, 0
    end = time.monotonic() + PATIENCE
    while unchanged < 50:
        assert time.monotonic() < end
        query = "follow=false&types=assistant.delta" + (f"&after={after}" if after else "")
        answer = client.get(f"/api/v1/runs/long/events?{query}")
        if answer.status_code == 429:  # more requests than a caller may send
            time.sleep(0.1)
            continue
        page = answer.json()
        count = before + sum(len(each["payload"]["delta"]) for each in page["items"])
        if page["next"] is not None:
            after, before = page["next"], count
            continue
        unchanged = unchanged + 1 if count == seen and count > 0 else 0
        seen = count
    return seen


def test_the_commands_of_the_readme_add_12_and_30(tmp_path: Path, serve: Callable[..., Served]) -> None:
    blocks = [block.text for block in blocks_of((ROOT / "README.md").read_text("utf-8")) if block.language == "bash"]
    [start] = [text for text in blocks if "agent-runtime serve" in text]
    [call] = [text for text in blocks if text.startswith("curl")]
    install, _, command = start.strip().partition(" && ")
    assert install == "pip install -e '.[server]'"
    words = command.split()
    assert words[:3] == ["agent-runtime", "serve", "--db"]
    database = tmp_path / words[3]
    token = Path(f"{database}.token")
    server = serve("--db", database, "--token-file", token)
    assert len(words) == 4
    answer = subprocess.run(
        ["bash", "-c", call.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")],
        cwd=tmp_path, capture_output=True, timeout=PATIENCE, check=True,
    )  # fmt: skip
    run = json.loads(answer.stdout)
    assert (run["status"], run["result"]) == ("completed", 42)
