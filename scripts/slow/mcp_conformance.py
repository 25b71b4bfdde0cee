#!/usr/bin/env python3
"""Run the conformance suite of the Model Context Protocol: scripts/slow/mcp_conformance.py [SCENARIO]...

Installs the npm package @modelcontextprotocol/conformance and its Node in build/mcp-conformance. The suite calls a
server of `create_mcp_server` (`mcp_conformance.py serve PORT`) and is called by `MCPTools` (`... client URL`), once for
each version of the protocol that a scenario is for. Prints a table. A run of all scenarios also writes
docs/evidence/suites/mcp.json, which `scripts/evidence.py` shows. Exits with 1 if a check failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "mcp-conformance"
RESULT = ROOT / "docs" / "evidence" / "suites" / "mcp.json"
PACKAGE, NODE = "@modelcontextprotocol/conformance", "node@22"
VERSION = "0.2.0-alpha.12"
PROTOCOLS = ("2025-06-18", "2025-11-25", "2026-07-28")

#: What the server or the client does not offer. These scenarios are skipped.
NOT_OFFERED = {
    "server": {
        "no notifications of tasks": r"tasks-status-notifications$",
        "agents are tools; no prompts, resources, completions, logging and sampling": (
            r"prompts-|resources-|sep-2164-|completion-|logging-|caching$|sep-2640-|tools-call-(with-logging|sampling)$"
            r"|input-required-result-(basic-sampling|basic-list-roots|non-tool-request|multiple-input-requests"
            r"|capability-check)$"
        ),
        "a result is text and JSON, no images, audio or resources": (
            r"tools-call-(image|audio|embedded-resource|mixed-content)$"
        ),
    },
    "client": {"a custom `mcp.Client` of the SDK authenticates": r"auth/", "no skills": r"sep-2640-"},
}


#: Checks of scenarios that are for a server that works in another way, and why ours does not.
DIFFERENT = {
    r"sep-2575-(server-rejects-undeclared-capability|missing-capability-http-400)$": "no tool needs a capability",
    r"tasks-sync-tool-call$|tasks-headers-tolerate-|sep-2663-legacy-task-param-|tasks-result-type-complete-": (
        "each call of a client with tasks is a task"
    ),
    r"sep-2663-mrtr-synchronous-before-task-creation$": "a question of a task is a state of the task",
    r"sep-2663-tasks-get-status-failed$": "a run that fails is a completed task with isError",
    r"sep-2663-server-returns-missing-capability-": "no tool needs the extension",
    r"sep-2322-(elicitation-incomplete|ignore-unexpected-params)$": "the server chooses the keys of its questions",
}


@dataclass(frozen=True)
class Outcome:
    """The checks of a scenario with one version of the protocol."""

    leg: str
    scenario: str
    protocol: str
    passed: int
    failed: int
    problems: tuple[str, ...]
    different: tuple[str, ...]


def installed() -> list[str]:
    """Return the command of the suite."""
    package = FOLDER / "node_modules" / PACKAGE
    if not package.exists() or json.loads((package / "package.json").read_text("utf-8"))["version"] != VERSION:
        FOLDER.mkdir(parents=True, exist_ok=True)
        npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(FOLDER)]
        subprocess.run([*npm, f"{PACKAGE}@{VERSION}", NODE], check=True)
    return [str(FOLDER / "node_modules" / "node" / "bin" / "node"), str(package / "dist" / "index.js")]


def scenarios(suite: list[str]) -> dict[str, dict[str, list[str]]]:
    """Return the versions of the protocol that each scenario is for, by leg."""
    listed = subprocess.run([*suite, "list"], check=True, capture_output=True, text=True).stdout
    found: dict[str, dict[str, list[str]]] = {}
    leg = ""
    for line in listed.splitlines():
        if heading := re.match(r"(\w+)( \w+)? scenarios", line):
            leg = "" if heading[2] else heading[1].lower()
        elif leg and (entry := re.match(r"  - (\S+) \[(.*)\]", line)):
            versions = [each for each in entry[2].split(",") if each in PROTOCOLS]
            found.setdefault(leg, {})[entry[1]] = versions or ([entry[2]] if entry[2] == "extension" else [])
    return found


def reason_to_skip(leg: str, scenario: str) -> str | None:
    return next((why for why, pattern in NOT_OFFERED[leg].items() if re.match(pattern, scenario)), None)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Yield the URL of the server, a process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "serve", str(port)]
    with (folder / "server.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            while True:
                if process.poll() is not None:
                    sys.exit((folder / "server.log").read_text("utf-8"))
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.05)
            yield f"http://localhost:{port}/mcp"
        finally:
            process.terminate()


def outcome(suite: list[str], leg: str, scenario: str, protocol: str, folder: Path, url: str) -> Outcome:
    """Run a scenario."""
    output = folder / "results"
    shutil.rmtree(output, ignore_errors=True)
    target = ["--url", url] if leg == "server" else ["--command", f"{sys.executable} {__file__} client"]
    version = ["--spec-version", protocol] if protocol in PROTOCOLS else []
    command = [*suite, leg, *target, "--scenario", scenario, *version, "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    checks = [each for path in output.rglob("checks.json") for each in json.loads(path.read_text("utf-8"))]
    statuses = Counter(each["status"] for each in checks)
    bad = [each for each in checks if each["status"] in ("FAILURE", "WARNING")]
    reasons = {
        each["id"]: next((why for ids, why in DIFFERENT.items() if re.match(ids, each["id"])), None) for each in bad
    }
    problems = [
        f"{each['id']}: {each.get('errorMessage') or each['description']}"
        for each in bad
        if reasons[each["id"]] is None
    ]
    if not statuses["SUCCESS"] and not bad:
        problems = [f"no check: {(done.stdout + done.stderr).strip()[-300:]}"]
    different = [f"{name}: {why}" for name, why in reasons.items() if why is not None]
    return Outcome(leg, scenario, protocol, statuses["SUCCESS"], len(problems), tuple(problems), tuple(different))


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as text."""
    lines = [f"{'leg':7} {'scenario':45} {'protocol':11} {'passed':>6} {'failed':>6}"]
    for each in outcomes:
        lines.append(f"{each.leg:7} {each.scenario:45} {each.protocol:11} {each.passed:6} {each.failed:6}")
        lines += [f"{'':10}{text[:200]}" for text in each.problems]
        lines += [f"{'':10}different: {text}" for text in each.different]
    return "\n".join(lines)


def main(wanted: list[str]) -> int:
    suite = installed()
    found, skipped = [], Counter[str]()
    with tempfile.TemporaryDirectory() as name, serving(Path(name)) as url:
        for leg, known in scenarios(suite).items():
            for scenario, protocols in known.items():
                if wanted and scenario not in wanted:
                    continue
                if not wanted and (why := reason_to_skip(leg, scenario)) is not None:
                    skipped[f"{leg}: {why}"] += 1
                    continue
                found += [outcome(suite, leg, scenario, each, Path(name), url) for each in protocols]
                print(f"{leg} {scenario}", file=sys.stderr, flush=True)
    print(table(found))
    failed = [each for each in found if each.failed]
    if not wanted:
        differences = [
            f"{each.leg} {each.scenario} ({each.protocol}): {text}" for each in failed for text in each.problems
        ]
        differences += [
            f"{each.leg} {each.scenario} ({each.protocol}): {text}" for each in found for text in each.different
        ]
        differences += [f"skipped, {why}: {count}" for why, count in skipped.items()]
        result = {
            "suite": f"`{PACKAGE}`",
            "version": VERSION, "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}",
            "passed": len(found) - len(failed), "failed": len(failed), "skipped": skipped.total(),
            "differences": differences,
        }  # fmt: skip
        RESULT.parent.mkdir(parents=True, exist_ok=True)
        RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", "utf-8")
    # A scenario with several versions of the protocol counts several times.
    print(f"{len(found) - len(failed)} passed, {len(failed)} failed, {skipped.total()} skipped")
    return 1 if failed else 0


# -- the server: agents that do what the suite expects of its tools


def string(**more: Any) -> dict[str, Any]:
    return {"type": "string", **more}


def form(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties]}


def titled(*values: tuple[str, str]) -> list[dict[str, str]]:
    return [{"const": value, "title": title} for value, title in values]


DEFAULTS = {
    "type": "object",
    "properties": {
        "name": string(default="John Doe"),
        "age": {"type": "integer", "default": 30},
        "score": {"type": "number", "default": 95.5},
        "status": string(enum=["active", "inactive", "pending"], default="active"),
        "verified": {"type": "boolean", "default": True},
    },
}
ENUMS = {
    "type": "object",
    "properties": {
        "untitledSingle": string(enum=["option1", "option2", "option3"]),
        "titledSingle": string(oneOf=titled(("value1", "First Option"), ("value2", "Second Option"))),
        "legacyEnum": string(enum=["opt1", "opt2", "opt3"], enumNames=["Option One", "Option Two", "Option Three"]),
        "untitledMulti": {"type": "array", "items": string(enum=["option1", "option2", "option3"])},
        "titledMulti": {"type": "array", "items": {"anyOf": titled(("value1", "First Choice"), ("value2", "Second"))}},
    },
}
JSON_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {"$anchor": "addressDef", "type": "object", "properties": {"street": string(), "city": string()}}
    },
    "properties": {
        "name": string(),
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": string(enum=["phone", "email"]),
        "phone": string(),
        "email": string(),
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}


async def serve(port: int) -> None:
    import uvicorn

    from agent_runtime_core import AgentRunner, AgentRuntime, ErrorInfo, RunContext, RunResult
    from agent_runtime_core.integrations.mcp_server import AgentTool, create_mcp_server
    from agent_runtime_core.registry import Registry

    def confirms(field: str) -> Any:
        async def confirm(ctx: RunContext) -> str:
            return f"state-ok: {await ctx.approve('confirm', schema=form(**{field: {'type': 'boolean'}}))}"

        return confirm

    async def rounds(ctx: RunContext) -> str:
        name = await ctx.approve("name", schema=form(name=string()))
        color = await ctx.approve("color", schema=form(color=string()))
        return f"{name} {color}"

    async def two(ctx: RunContext) -> str:
        asked = {"type": "object", "properties": {"name": string(), "confirm": {"type": "boolean"}}}
        return str(await asyncio.gather(*(ctx.approve(each, schema=asked) for each in ("first", "second"))))

    async def sleeps(ctx: RunContext) -> str:
        await ctx.sleep(ctx.params.get("seconds", 0))
        return "done"

    async def steps(ctx: RunContext) -> str:
        for number in range(3):
            await ctx.step(f"step {number}", lambda: None)
        return "done"

    async def asks(ctx: RunContext) -> str:
        asked = form(username=string(description="User's response"), email=string(description="User's email address"))
        return f"User response: {await ctx.approve('user', ctx.params['message'], schema=asked)}"

    def elicits(schema: dict[str, Any]) -> Any:
        async def ask(ctx: RunContext) -> str:
            return f"Elicitation completed: action=accept, content={await ctx.approve('form', schema=schema)}"

        return ask

    def says(text: str) -> Any:
        async def say(ctx: RunContext) -> str:
            return text.format(**ctx.params)

        return say

    async def fails(ctx: RunContext) -> RunResult:
        return RunResult(error=ErrorInfo("Broken", "This tool intentionally returns an error", retriable=False))

    async def greets(ctx: RunContext) -> str:
        return f"Hello, {(await ctx.approve('user_name', schema=form(name=string())))['name']}!"

    tools: dict[str, tuple[Any, dict[str, Any]]] = {
        "test_simple_text": (says("This is a simple text response for testing."), NOTHING),
        "test_error_handling": (fails, NOTHING),
        "test_tool_with_progress": (steps, NOTHING),
        "test_reconnection": (steps, NOTHING),
        "test_streaming_elicitation": (greets, NOTHING),
        "test_logging_tool": (steps, NOTHING),
        "test_elicitation": (asks, form(message=string())),
        "test_elicitation_sep1034_defaults": (elicits(DEFAULTS), NOTHING),
        "test_elicitation_sep1330_enums": (elicits(ENUMS), NOTHING),
        "test_input_required_result_elicitation": (greets, NOTHING),
        "test_input_required_result_request_state": (confirms("ok"), NOTHING),
        "test_input_required_result_multi_round": (rounds, NOTHING),
        "test_input_required_result_tampered_state": (confirms("ok"), NOTHING),
        "test_tool_with_task": (greets, NOTHING),
        "test_x_mcp_header": (
            says("done"),
            {"type": "object", "properties": {"region": string(**{"x-mcp-header": "Region"})}},
        ),
        "json_schema_2020_12_tool": (says("done"), JSON_SCHEMA),
        "greet": (says("Hello, {name}!"), form(name=string())),
        "slow_compute": (sleeps, {"type": "object", "properties": {"seconds": {"type": "number"}}}),
        "failing_job": (fails, NOTHING),
        "confirm_delete": (confirms("confirm"), {"type": "object"}),
        "multi_input": (two, NOTHING),
    }

    class Tool(AgentRuntime):
        key = "tool"
        does: Any = None

        async def run(self, ctx: RunContext) -> RunResult:
            result = await type(self).does(ctx)
            return result if isinstance(result, RunResult) else RunResult({"response": result})

    registry = Registry()
    for name, (does, _) in tools.items():
        registry.register(type(name, (Tool,), {"key": name, "does": staticmethod(does)})())
    async with AgentRunner.open("memory://", registry=registry) as runner:
        agents = [
            AgentTool(name, description=f"The tool {name}.", parameters=schema) for name, (_, schema) in tools.items()
        ]
        app: Any = create_mcp_server(runner, agents, poll_interval=0.1).streamable_http_app()
        await uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", http="h11")).serve()


# -- the client


async def client(url: str) -> None:
    from mcp import Client
    from mcp_types import ElicitResult

    from agent_runtime_core import AgentRuntimeError, open_run
    from agent_runtime_core.integrations.mcp import MCPTools

    context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))

    async def accept(context: object, params: Any) -> ElicitResult:
        """Accept a form with its default values."""
        fields = params.requested_schema.get("properties", {})
        values = {name: each.get("default", each.get("type") == "boolean" or "x") for name, each in fields.items()}
        return ElicitResult(action="accept", content=values)

    async with (
        MCPTools(lambda: Client(url, elicitation_callback=accept), retries=0) as mcp,
        open_run("memory://") as ctx,
    ):
        registry = await mcp.registry(ctx)
        listed = {each.metadata["mcp_tool"]: each for each in registry.list_tools()}
        calls = context.get("toolCalls")
        if calls is None:
            rich = listed.get("json_schema_2020_12_tool")
            known = {"a": 5, "b": 3, "schema": {} if rich is None else rich.parameters}
            calls = [
                {"name": name, "arguments": {key: known.get(key, "x") for key in each.parameters.get("required", ())}}
                for name, each in listed.items()
            ]
        for call in calls:
            # The suite sends null for an argument that is not required. The registry allows only what the schema does.
            arguments = {key: value for key, value in call["arguments"].items() if value is not None}
            try:
                print(await registry.execute(listed[call["name"]].name, arguments, ctx))
            except AgentRuntimeError as error:
                print(error)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", number]:
            asyncio.run(serve(int(number)))
        case ["client", address]:
            asyncio.run(client(address))
        case names:
            sys.exit(main(names))
