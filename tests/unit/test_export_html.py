"""A run as one HTML file: what is in it, that no text in it is markup, and what `--redact` leaves out."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import sqlite3
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, ToolCallingAgent, UnknownRun
from agent_runtime_core.inspector import export, run_html
from agent_runtime_core.inspector.export import DATA_ID, LEFT_OUT, html_page, redacted_answers, short_hash
from agent_runtime_core.interfaces import RunResult
from agent_runtime_core.registry import Registry
from agent_runtime_core.runner import RunnerConfig
from agent_runtime_core.steps import StepExecutor
from agent_runtime_core.tools import Tool, ToolRegistry
from tests.support.cases import for_each
from tests.support.command_line import Commands
from tests.support.hostile_texts import HOSTILE_TEXTS, STORABLE
from tests.support.runs import Script
from tests.support.scripted_model import Scripted, asks, call

CANARY = "quetzal-7731"


class Document(HTMLParser):
    """The elements of a file with their attributes, and the text of those that are not parsed as markup."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []  # of scripts and style sheets
        self._raw: list[str] | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._raw = [] if tag in ("script", "style") else None

    def handle_data(self, data: str) -> None:
        if self._raw is not None:
            self._raw.append(data)

    def handle_endtag(self, tag: str) -> None:
        if self._raw is not None:
            self.texts.append((*self.elements[-1], "".join(self._raw)))
        self._raw = None

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, text) for name, attributes, text in self.texts if name == tag]

    @property
    def data(self) -> dict[str, Any]:
        (text,) = [text for attributes, text in self.of("script") if attributes.get("id") == DATA_ID]
        found: dict[str, Any] = json.loads(text)
        return found


def opened(place: str | Path = "memory://", **options: Any) -> AgentRunner:
    config = RunnerConfig(max_retries=1, park_after=0, lease_ttl_seconds=600)
    return AgentRunner.open(str(place), config=config, registry=Registry(), **options)


# -- the file


def test_a_file_loads_nothing_and_allows_only_its_own_script_and_style() -> None:
    document = Document(html_page({"about": {}}))
    inert, executable = document.of("script")
    assert inert == ({"type": "application/json", "id": DATA_ID}, '{"about":{}}')
    assert executable[0] == {}
    ((_, style),) = document.of("style")
    names = [name for name, _ in document.elements]
    assert names.count("script") == 2
    assert [name for name in names if name in ("iframe", "object", "embed", "base", "form", "img")] == []
    addresses = [each for _, given in document.elements for each in (given.get("src"), given.get("href")) if each]
    assert len(addresses) == 1
    assert addresses[0].startswith("data:image/svg+xml;base64,")
    assert [
        given for _, given in document.elements if any(each.startswith("on") or each == "style" for each in given)
    ] == []
    policies = [given["content"] or "" for _, given in document.elements if given.get("http-equiv")]
    assert len(policies) == 1
    policy = dict(each.strip().split(" ", 1) for each in policies[0].split(";"))
    assert policy == {
        "default-src": "'none'", "img-src": "data:", "base-uri": "'none'", "form-action": "'none'",
        "require-trusted-types-for": "'script'", "trusted-types": "'none'",
        "script-src": hash_of(executable[1]), "style-src": hash_of(style),
    }  # fmt: skip
    # A policy applies only to what comes after it.
    assert names.index("meta") < names.index("style")
    first = [given for name, given in document.elements if name == "meta"][:2]
    assert [*first[0], *first[1]] == ["charset", "http-equiv", "content"]


def hash_of(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


TEXTS = {
    "all": "\n".join(HOSTILE_TEXTS),
    "ends": "</script></SCRIPT ><script>alert(1)</script><!--<script>--></script>]]>",
    "separators": "\u2028 \u2029 \ufeff \x00 \r\n \x85",
    "lone surrogates": "\ud800 \udfff\ud800",
    "quotes": '"\'`\\ \\" ${1} &quot; &lt;',
    "10 MB": "<\u2028</script" * 1_000_000,
}


@pytest.mark.parametrize("name", TEXTS)
def test_no_text_is_markup_and_each_is_read_as_it_was(name: str) -> None:
    empty, text = html_page({"about": {}}), TEXTS[name]
    data = {"about": {text: [text, {text: None}]}, f"runs/{text}": 1}
    file = html_page(data)
    document = Document(file)
    assert document.data == data
    assert [each for each, _ in document.elements] == [each for each, _ in Document(empty).elements]
    start, end = empty.split('{"about":{}}')
    inert = file.removeprefix(start).removesuffix(end)
    assert len(inert) == len(file) - len(start) - len(end)
    assert inert.isascii()
    assert "<" not in inert
    assert file.encode().decode() == file


def test_values_that_json_lacks_are_rejected() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        html_page({"about": float("nan")})


# -- a run with everything, and one canary in each field


class Answering(ToolCallingAgent):
    """Calls a tool that succeeds and one that fails, asks a person, and answers."""

    key = "support"
    system_prompt = ""
    tools = ToolRegistry()

    def __init__(self, secret: str) -> None:
        self.secret = secret
        self.system_prompt = f"system {secret}"

    def get_llm_client(self) -> Any:
        def say(messages: Any) -> Any:
            if any(each["role"] == "tool" for each in messages):
                return f"answer {self.secret}"
            return asks(
                call("find", {"order": self.secret}, f"c1-{self.secret}"),
                call("broken", {"order": self.secret}, "c2"),
                content=f"thinking {self.secret}",
            )

        return Scripted(say=say, cost=0.25)


async def find(order: str) -> dict[str, str]:
    """Return an order."""
    return {"found": order}


async def broken(order: str) -> str:
    """Fail."""
    raise ConnectionError(f"no {order}")


for _tool in (find, broken):
    Answering.tools.register(Tool.from_function(_tool))


def everything(secret: str) -> Script:
    """Return an agent that has the secret wherever a run has a value."""

    async def body(ctx: Any) -> Any:
        await ctx.emit("order.progress", {"note": secret, "name": secret, "type": secret, "state": secret, secret: 1})
        await ctx.checkpoint({"name": secret, "state": secret})
        await ctx.step("fetch", lambda: {"name": secret, "kind": secret, "items": [secret]}, key=secret)
        await StepExecutor(ctx).map("send", lambda item: item, [secret, "b"], key=str)
        await ctx.call("support", asked(secret), key=secret)
        await ctx.wait_for_signal("paid")
        await ctx.approve("ship", {"question": secret, "name": secret}, schema={"type": "object", "title": secret})
        await ctx.step("last", fail)

    def fail() -> None:
        raise ConnectionError(f"cannot reach {secret}")

    return Script(body, "order")


def asked(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text, "name": text}], "params": {"name": text}}


async def stored_run(runner: AgentRunner, secret: str, key: str = "order-7") -> str:
    """Execute a run that has everything and fails. Return its id."""
    runner.registry.register(everything(secret))
    runner.registry.register(Answering(secret))
    await runner.submit(
        "order", {**asked(secret), "conversation_id": secret}, run_id=key, metadata={"name": secret, secret: [secret]},
        concurrency_key=secret,
    )  # fmt: skip
    while await runner.run_once():
        pass
    await runner.signal(key, "paid", {"name": secret, "card": secret})
    while await runner.run_once():
        pass
    await runner.approve(key, "ship", {"comment": secret, "name": secret})
    while await runner.run_once():
        pass
    row = await runner.queue.require(key)
    assert row.status == "failed"
    return row.run_id


async def test_a_file_has_the_run_its_child_runs_and_their_steps() -> None:
    async with opened() as runner:
        run_id = await stored_run(runner, CANARY)
        data = Document(await run_html(runner, "order-7")).data
    about, run = data["about"], data[f"runs/{run_id}"]
    assert (about["live"], about["run_id"], about["redacted"], about["read_only"], about["scopes"]) == (
        "none", run_id, False, True, [],
    )  # fmt: skip
    assert (about["store"], about["left_out"]) == (None, [])
    assert (run["key"], run["state"], run["input"]["params"]) == ("order-7", "failed", {"name": CANARY})
    (child,) = run["children"]
    for each in (run_id, child["run_id"]):
        parts = {path.removeprefix(f"runs/{each}/") for path in data if path.startswith(f"runs/{each}/")}
        rows = data[f"runs/{each}/timeline"]["items"]
        assert parts == {
            "timeline",
            "events",
            "messages",
            "plan",
            "journal",
            *(f"steps/{row['step_id']}" for row in rows),
        }
        assert data[f"runs/{each}/timeline"]["next"] is None
        assert data[f"runs/{each}/events"]["items"][-1]["type"] in ("run.failed", "run.succeeded")
    tools = [data[f"runs/{child['run_id']}/steps/{row['step_id']}"] for row in
             data[f"runs/{child['run_id']}/timeline"]["items"] if row["kind"] == "tool"]  # fmt: skip
    assert [(each["input"], each["output"]) for each in tools[:1]] == [({"order": CANARY}, {"found": CANARY})]
    assert {path.split("/")[1] for path in data if path != "about"} == {run_id, child["run_id"]}


@pytest.mark.parametrize("place", ["memory", "sqlite"])
async def test_redact_leaves_out_every_content(place: str, tmp_path: Path) -> None:
    async with opened("memory://" if place == "memory" else tmp_path / "runs.db") as runner:
        key = f"order-{CANARY}"
        run_id = await stored_run(runner, CANARY, key)
        whole = await run_html(runner, key)
        redacted = await run_html(runner, key, redact=True)
    assert whole.count(CANARY) > 50
    assert redacted.count(CANARY) == 0
    # Not in another form either: as an escape, or in Base64.
    for each in (CANARY.encode().hex(), base64.b64encode(CANARY.encode()).decode()):
        assert each not in redacted
    data = Document(redacted).data
    run = data[f"runs/{run_id}"]
    assert (data["about"]["redacted"], run["key"], run["agent"], run["state"]) == (
        True,
        short_hash(key),
        "order",
        "failed",
    )
    assert (run["input"], run["result"], run["metadata"]) == (LEFT_OUT, None, {})
    assert run["error_info"] == {"type": "StepExecutionError", "message": LEFT_OUT}
    usage = {name: run["usage"][name] for name in ("turns", "tool_calls", "total_tokens", "cost_usd")}
    assert usage == {"turns": 2, "tool_calls": 2, "total_tokens": 240, "cost_usd": 0.5}
    rows = data[f"runs/{run_id}/timeline"]["items"]
    names = [row["name"] for row in rows]
    assert {"fetch", "send", "call:support", "signal:paid", "signal:ship", "last"} <= {*names}
    assert {row["key"] for row in rows if row["name"] == "send"} == {short_hash(CANARY), short_hash("b")}
    last = rows[names.index("last")]
    assert last["error"] == {"type": "ConnectionError", "message": LEFT_OUT}
    assert (last["state"], last["attempts"][0]["state"]) == ("failed", "failed")
    assert last["started_at"] is not None
    events = data[f"runs/{run_id}/events"]["items"]
    assert "order.progress" in [each["type"] for each in events]
    assert [each["payload"] for each in events if each["payload"]] == []
    child = run["children"][0]["run_id"]
    messages = data[f"runs/{child}/messages"]["items"]
    assert [each["role"] for each in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    calls = messages[1]["tool_calls"]
    assert [each["function"] for each in calls] == [
        {"name": "find", "arguments": LEFT_OUT},
        {"name": "broken", "arguments": LEFT_OUT},
    ]
    # A call and its result are still recognized as a pair.
    assert [each["id"] for each in calls] == [each["tool_call_id"] for each in messages[2:4]]


async def test_what_redact_keeps_has_the_same_shape() -> None:
    """Pages read lists and objects; where they expect one, the redacted file has one."""
    async with opened() as runner:
        await stored_run(runner, CANARY)
        whole, redacted = [Document(await run_html(runner, "order-7", redact=redact)).data for redact in (False, True)]
    assert whole.keys() == redacted.keys()
    for path in whole.keys() - {"about"}:
        assert whole[path].keys() == redacted[path].keys() or path.endswith("/messages"), path
        if "items" in whole[path]:
            assert len(whole[path]["items"]) == len(redacted[path]["items"]), path
            for before, after in zip(whole[path]["items"], redacted[path]["items"], strict=True):
                assert path.endswith("/messages") or before.keys() == after.keys(), path


@for_each("text", STORABLE)
def test_keys_and_types_of_any_form_are_left_out(text: str) -> None:
    row = {"key": f"k:{text}", "name": f"send[{text}]", "type": text, "tool": "t", "later_field": text,
           "error": {"type": text, "message": text, "also": text}, "attempts": [{"error": text}, text]}  # fmt: skip
    answers = {
        "runs/1": {"run_id": "1", "key": text, "steps": [row]},
        "runs/1/journal": {"items": [row | {"state": text}]},
    }
    found = json.dumps(redacted_answers(answers), ensure_ascii=False)
    if not re.fullmatch(r"[\w.:-]+|\W", text):  # a number or a type stays; one mark is no content
        assert json.dumps(text, ensure_ascii=False)[1:-1] not in found.replace(json.dumps(LEFT_OUT), "")
    assert found.count("later_field") == 2


def test_a_message_says_who_wrote_it_and_nothing_else() -> None:
    messages = [
        {
            "role": "user",
            "content": "secret",
            "name": "secret",
            "attempt": 3,
            "kind": "secret",
            "metadata": {"a": "secret"},
        },
        {"role": "secret", "content": [{"type": "text", "text": "secret"}]},
        {"role": "assistant", "content": "secret", "invalidated": True, "attempt": 2},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "secret", "name": "find", "args": "secret"}, "secret"],
        },
        "secret",
    ]
    answers = {"runs/1/messages": {"items": messages, "step_ids": [None, None, "0A", None, None], "next": None}}
    found = redacted_answers(answers)["runs/1/messages"]
    assert found["items"] == [
        {"role": "user", "content": LEFT_OUT}, {"role": LEFT_OUT, "content": LEFT_OUT},
        {"role": "assistant", "content": LEFT_OUT, "invalidated": True, "attempt": 2},
        {"role": "assistant", "content": LEFT_OUT, "tool_calls": [
            {"type": "function", "id": short_hash("secret"), "function": {"name": "find", "arguments": LEFT_OUT}},
        ]},
        LEFT_OUT,
    ]  # fmt: skip
    assert found["step_ids"] == [None, None, "0A", None, None]


def test_the_name_of_a_tool_that_a_model_made_up_is_left_out() -> None:
    called = {"kind": "tool", "name": "tool", "label": "call Ada on 555-0100", "tool": "call Ada", "tool_name": "Ada!"}
    known = {"kind": "tool", "name": "tool", "label": "find_order", "tool": "find_order", "tool_name": "find-order"}
    step = {"kind": "step", "name": "ask the bank", "label": "ask the bank"}
    answers = {"runs/1/timeline": {"items": [called, known, step]}}
    found = redacted_answers(answers)["runs/1/timeline"]["items"]
    assert found[0] == {"kind": "tool", "name": "tool", **dict.fromkeys(("label", "tool", "tool_name"), LEFT_OUT)}
    assert found[1:] == [known, step]


def test_a_step_key_that_counts_stays_readable() -> None:
    keys = [
        "s:0",
        "s:12@0123456789abcdef",
        "k:l:0:1",
        "0",
        "x::0",
        ":0",
        "k:12345",
        "k:Ada",
        "m:Ada",
        "12345",
        "x:Ada:0",
    ]
    answers = {"runs/1/timeline": {"items": [{"key": each} for each in keys]}}
    found = [each["key"] for each in redacted_answers(answers)["runs/1/timeline"]["items"]]
    assert found == [
        "s:0", "s:12@0123456789abcdef", "k:l:0:1", "0", "x::0", ":0", f"k:{short_hash('12345')}",
        f"k:{short_hash('Ada')}", f"m:{short_hash('Ada')}", short_hash("12345"), f"x:{short_hash('Ada:0')}",
    ]  # fmt: skip
    assert re.fullmatch("#[0-9a-f]{8}", short_hash("\ud800"))


async def test_secrets_in_urls_are_replaced() -> None:
    async def body(ctx: Any) -> Any:
        return await ctx.step("connect", lambda: "redis://me:hunter2@host/0")

    async with opened() as runner:
        runner.registry.register(Script(body))
        await runner.execute("script", "r")
        file = await run_html(runner, "r")
    assert "redis://***@host/0" in file
    assert "hunter2" not in file


# -- limits


async def test_a_file_says_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "MAX_RUNS", 2)
    monkeypatch.setattr(export, "MAX_EVENTS", 3)
    monkeypatch.setattr(export, "MAX_REQUESTS", 10)

    async def parent(ctx: Any) -> Any:
        await ctx.call("support", asked("a"))
        await ctx.call("support", asked("b"))

    async with opened() as runner:
        runner.registry.register(Script(parent, "parent"))
        runner.registry.register(Answering("x"))
        await runner.submit("parent", {}, run_id="p")
        while await runner.run_once():
            pass
        data = Document(await run_html(runner, "p")).data
        run_id = (await runner.queue.require("p")).run_id
    first, second = (each["run_id"] for each in data[f"runs/{run_id}"]["children"])
    assert f"runs/{first}" in data
    assert f"runs/{second}" not in data
    assert data["about"]["left_out"] == [
        "child runs after the first 1",
        f"events of run {run_id} after the first 3",
        f"events of run {first} after the first 3",
        f"the inputs of later model calls of run {first}: its messages have them",
    ]
    assert [each["sequence"] for each in data[f"runs/{run_id}/events"]["items"]] == [0, 1, 2]
    calls = [each for path, each in data.items() if "/steps/" in path and each["kind"] == "model"]
    assert [each["input"] for each in calls] == [None, None]


async def test_an_unknown_run_is_an_error() -> None:
    async with opened() as runner:
        with pytest.raises(UnknownRun, match="run 'nope' not found"):
            await run_html(runner, "nope")


# -- the command


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Commands:
    return Commands(capsys, str(tmp_path / "runs.db"))


async def _work(place: str) -> None:
    async def body(ctx: Any) -> RunResult:
        return RunResult({"text": f"caf\u00e9 {await ctx.step('one', lambda: CANARY)}"})

    async with opened(place) as runner:
        runner.registry.register(Script(body))
        await runner.execute("script", "hello")


@pytest.fixture
def stored(run: Commands) -> Commands:
    asyncio.run(_work(run.url))
    return run


def test_the_command_writes_a_file_or_to_stdout(stored: Commands, tmp_path: Path) -> None:
    code, out, err = stored("export", "hello", "--html")
    assert (code, err) == (0, "")
    assert CANARY in out
    file = tmp_path / "hello.html"
    file.write_text("before")
    assert stored("export", "hello", "--html", "--redact", "--output", str(file)) == (0, "", "")
    text = file.read_bytes().decode()
    assert Document(text).data["about"]["redacted"] is True
    assert CANARY not in text
    lines = tmp_path / "hello.jsonl"
    assert stored("export", "hello", "--output", str(lines)) == (0, "", "")
    assert [json.loads(each)["kind"] for each in lines.read_text("utf-8").splitlines()][:2] == ["run", "step"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--redact"], "--redact needs --html"),
        (["--html", "--jsonl"], "not allowed with argument"),
        (["--html", "--output", "STORE"], "--output must not be the file of the store"),
        (["--html", "--output", "STORE-wal"], "--output must not be the file of the store"),
        (
            ["--html", "--output", "missing/x.html"],
            "--output must be a file that can be written, got 'missing/x.html': No such file or directory. Choose",
        ),
        (["--output", "."], "--output must be a file that can be written, got '.': Is a directory. Choose"),
        (["--html", "--output", ""], "got '': No such file or directory."),
    ],
)
def test_the_command_rejects_what_it_cannot_do(
    stored: Commands, options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = Path(stored.url).read_bytes()
    with contextlib.closing(sqlite3.connect(stored.url)) as conn:  # it has a log while it is open
        assert conn.execute("SELECT count(*) FROM arc_runs").fetchone() == (1,)
        code, out, err = stored("export", "hello", *(each.replace("STORE", stored.url) for each in options))
    assert (code, out) == (2, "")
    assert message in err
    assert Path(stored.url).read_bytes() == before
    assert stored("runs")[0] == 0


def test_the_command_names_an_unknown_run(stored: Commands) -> None:
    assert stored("export", "nope", "--html")[0] == 1
