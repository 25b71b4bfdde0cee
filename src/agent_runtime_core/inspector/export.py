"""One HTML file that shows a run. Its contents can be left out."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import aclosing
from functools import lru_cache
from html.parser import HTMLParser
from typing import Any, Final, NamedTuple
from uuid import UUID

from .._core.validation import Shown, must
from .._views.export import events_of
from .._views.journal import journal_view
from .._views.messages import messages_view
from .._views.overview import about_view
from .._views.page import page_files
from .._views.plain import iso_time, without_secrets
from .._views.plan import plan_view
from .._views.runs import run_view
from .._views.timeline import step_details, timeline_view
from ..queue.records import RunRow
from ..runner.run_client import RunClient
from .script_bundle import bundled

#: The id of the element with the data, which source.js reads.
DATA_ID: Final = "exported-data"
_STATIC: Final = "static/"
#: In a file there is no other file, and no text may end the element of the style sheet.
_FOREIGN_STYLE: Final = re.compile(r"@import|url\((?!\s*[\"']?data:)|</style|<!--", re.IGNORECASE)


class _Parts(NamedTuple):
    """The file before and after its data."""

    before: str
    after: str


def html_page(data: Mapping[str, Any]) -> str:
    """Return a file that shows `data`, an object from path to answer.

    The data is text in an element that no browser executes. `<` is escaped in it, so no text of a run is markup.
    """
    before, after = _page()
    # Pure ASCII: lone surrogates and the line separators U+2028 and U+2029 are JSON escapes, too.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"{before}{text}{after}"


@lru_cache(maxsize=1)
def _page() -> _Parts:
    files = {path: each.content.decode().replace("\r\n", "\n") for path, each in page_files().items()}
    index = _Index(files["index.html"])
    script = bundled(files, index.script)
    styles = "".join(f"/* {path} */\n{_style(path, files[path])}" for path in index.styles)
    icon = base64.b64encode(page_files()[index.icon].content).decode()
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(styles)}; img-src data:; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    charset = '<meta charset="utf-8">'
    if charset not in index.kept or "</body>" not in index.kept or "</head>" not in index.kept:
        raise must("index.html", f"have {charset}, </head> and </body>", Shown("a page without one of them"))
    # The policy applies to what follows it.
    page = index.kept.replace(
        charset,
        f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">',
        1,
    )
    page = page.replace("</head>", f"<style>{styles}</style>\n</head>", 1)
    start, _, end = page.rpartition("</body>")
    return _Parts(
        f'{start}<script type="application/json" id="{DATA_ID}">', f"</script>\n<script>{script}</script>\n</body>{end}"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _style(path: str, text: str) -> str:
    if found := _FOREIGN_STYLE.search(text):
        raise must(path, "load nothing, because the page is also one file", found[0], "Use a data: URL")
    return text


class _Index(HTMLParser):
    """The script, the style sheets and the icon that index.html loads, and the page without these elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.script, self.icon = "", ""
        self.styles: list[str] = []
        self.kept = text
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get("src") or given.get("href") or ""
        if not address:
            return
        path, end = address.removeprefix(_STATIC), ""
        if tag == "script" and given.get("type") == "module":
            self.script, end = path, "</script>"
        elif tag == "link" and given.get("rel") == "stylesheet":
            self.styles.append(path)
        elif tag == "link" and given.get("rel") == "icon":
            self.icon = path
        else:
            raise must("index.html", "load a module, style sheets and an icon only", Shown(f"{tag} {address!r}"))
        self.kept = self.kept.replace(f"{self.get_starttag_text()}{end}\n", "", 1)


#: Most runs in a file: the run, its child runs, theirs, and so on.
MAX_RUNS: Final = 100
#: Most events of a run in a file: a browser reads them all when it opens the file.
MAX_EVENTS: Final = 50_000
#: Most characters of the inputs of model calls of a run. Each input repeats the conversation before it.
MAX_REQUESTS: Final = 8 << 20


async def run_html(runner: RunClient, run_id: UUID | str, *, redact: bool = False) -> str:
    """Return an HTML file that shows a run and its child runs, as the command `export RUN --html` writes it.

    The file opens from disk and needs no network. It contains all that is stored of the run. Secrets in URLs are
    replaced by ***.

    Args:
        runner: The runner on the store, which may be read-only.
        run_id: The run, or the id you passed as `run_id`.
        redact: Leave out contents: inputs, outputs, payloads of events, messages, error messages and metadata. Names,
            states, times, tokens, costs and types of errors stay. Keys are replaced by a hash.

    Raises:
        UnknownRun: No such run is stored.

    Example:
        >>> import asyncio
        >>> from agent_runtime_core import AgentRunner
        >>> from agent_runtime_core.inspector import run_html
        >>> async def main():
        ...     async with AgentRunner.open("agents.db", read_only=True) as runner:
        ...         return await run_html(runner, "order-7", redact=True)
        >>> text = asyncio.run(main())  # doctest: +SKIP
    """
    return html_page(await exported_data(runner, await runner.queue.require(run_id), redact=redact))


async def exported_data(runner: RunClient, row: RunRow, *, redact: bool) -> dict[str, Any]:
    """Return the answers of the API about a run and its child runs, by their paths below `api/v1/`.

    `about` also contains "run_id", "redacted", "exported_at", and "left_out": sentences about what the file lacks.
    """
    rows, left_out = await _with_children(runner, row)
    answers: dict[str, Any] = {}
    for each in rows:
        await _add_run(runner, each, answers, left_out.append)
    about = {
        **about_view(runner, (), hide_store=True), "live": "none", "read_only": True, "run_id": row.run_id,
        "redacted": redact, "exported_at": iso_time(runner.queue.clock.wall(), "seconds"), "left_out": left_out,
    }  # fmt: skip
    found: dict[str, Any] = without_secrets({"about": about, **(redacted_answers(answers) if redact else answers)})
    return found


async def _with_children(runner: RunClient, row: RunRow) -> tuple[list[RunRow], list[str]]:
    """Return the row of a run and the rows of its child runs, level by level, and what is left out."""
    rows, next_ = [row], 0
    while next_ < len(rows):
        children = await runner.queue.children(rows[next_].run_id)
        if len(rows) + len(children) > MAX_RUNS:
            return [*rows, *children][:MAX_RUNS], [f"child runs after the first {MAX_RUNS - 1}"]
        rows += children
        next_ += 1
    return rows, []


async def _add_run(runner: RunClient, row: RunRow, answers: dict[str, Any], leave_out: Callable[[str], None]) -> None:
    records = await runner.state_store.records(row.run_id)
    path = f"runs/{row.run_id}"
    answers[path] = await run_view(runner, row, records=records)
    events = await _events(runner, row)
    if len(events) > MAX_EVENTS:
        leave_out(f"events of run {row.run_id} after the first {MAX_EVENTS:,}")
    answers[f"{path}/events"] = {"items": events[:MAX_EVENTS], "next": None}
    answers[f"{path}/messages"] = await messages_view(runner, row, records=records)
    answers[f"{path}/plan"] = await plan_view(runner, row, records)
    answers[f"{path}/journal"] = journal_view(records)
    answers[f"{path}/timeline"] = timeline_view(row, records)
    room = MAX_REQUESTS
    for step in step_details(row, records):
        if step["kind"] == "model":
            room -= len(json.dumps(step["input"]))
            if room < 0:
                step["input"] = None
        answers[f"{path}/steps/{step['step_id']}"] = step
    if room < 0:
        leave_out(f"the inputs of later model calls of run {row.run_id}: its messages have them")


async def _events(runner: RunClient, row: RunRow) -> list[Any]:
    found: list[Any] = []
    async with aclosing(events_of(runner, row)) as events:
        async for each in events:
            found.append(each)
            if len(found) > MAX_EVENTS:
                break
    return found


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: What an exported file has in place of a content.
LEFT_OUT: Final = "[left out]"

#: Fields that stay: states, times, counts, numbers, ids that this library made, and types.
KEPT: Final = _words(
    "action agent agent_key asked_at at attempt attempts cancel_requested child_run_id cost_usd created_at deadline "
    "duration_ms ended_at ev generation kind model ms nev next next_step number parent pos priority "
    "queued_behind_key request_id run_id scheduled_at seq sequence started_at state status step_id step_number "
    "time tokens tool tool_name total total_steps trace_id tries updated_at"
)
#: Fields with fields of their own, or lists of such values.
NESTED: Final = _words("actions attempts children edges items nodes questions steps waiting_for")
#: Of these, all numbers stay.
COUNTS: Final = frozenset({"limits", "usage"})
#: Of these, the types stay.
ERRORS: Final = frozenset({"error", "error_info"})
#: Fields of a record of the journal that stay. Its `state` is a checkpoint, and so a content.
RECORD: Final = _words("seq kind claim_id attempt time pos total tries ms ev nev step_id name key")
#: What the caller chose, and a person may recognize. A hash shows which of them are the same.
HASHED: Final = _words("by concurrency_key conversation_id idempotency_key list worker")
#: Objects of the caller. A page may read their fields.
_OBJECTS: Final = frozenset({"metadata", "payload"})
#: Names of tools. A model may call a tool that does not exist, under any name.
_TOOLS: Final = frozenset({"label", "tool", "tool_name"})
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_TYPE: Final = re.compile(r"[\w.:-]{1,120}")
_NUMBERS: Final = r"\d{1,3}(?::\d{1,3})*(?:@[0-9a-f]{16})?"
_STEP_KEY: Final = re.compile(rf"((?:[a-z]:)*):?(?:{_NUMBERS})?")
_ITEM: Final = re.compile(r"\[(.*)\]", re.DOTALL)


def short_hash(text: str) -> str:
    """Return `#` and eight characters that are the same for the same text."""
    return f"#{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def redacted_answers(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answers of an exported file without contents.

    Args:
        answers: The answer of the API by its path, such as `runs/ID/events`.
    """
    found = {}
    for path, answer in answers.items():
        part = path.split("/")[2:3]
        if path == "about":
            found[path] = answer
        elif part == ["messages"]:
            found[path] = {**answer, "items": [_message(each) for each in answer["items"]]}
        elif part == ["journal"]:
            found[path] = {**answer, "items": [_record(each) for each in answer["items"]]}
        else:
            found[path] = _fields(answer)
    return found


def _fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _field(name, value, values) for name, value in values.items()}


def _field(name: str, value: Any, owner: Mapping[str, Any]) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if name in ERRORS and isinstance(value, Mapping):
        return _error(value)
    if name == "records" and isinstance(value, list):
        return [_record(each) for each in value]
    if name in COUNTS and isinstance(value, Mapping):
        return _counts(value)
    if name in NESTED and isinstance(value, Mapping):
        return _fields(value)
    if name in NESTED and isinstance(value, list):
        return [_fields(each) if isinstance(each, Mapping) else _left_out(each) for each in value]
    if name in _TOOLS and isinstance(value, str) and (name != "label" or owner.get("kind") == "tool"):
        return _type(value)
    if name in _TEXTS and isinstance(value, str):
        return _TEXTS[name](value)
    if name == "key":
        return short_hash(value) if "run_id" in owner else _step_key(value)
    if name in KEPT and isinstance(value, str | int | float):
        return value
    return _left_out(value, name)


def _record(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _error(value) if name in ERRORS and isinstance(value, Mapping)
        else _field(name, value, record) if name in RECORD else _left_out(value)
        for name, value in record.items()
    }  # fmt: skip


def _counts(value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers under their names; the names of a nested object are names of models."""
    return {
        name: _counts(each) if isinstance(each, Mapping) else each if isinstance(each, int | float) else _left_out(each)
        for name, each in value.items()
    }


def _error(error: Mapping[str, Any]) -> dict[str, Any]:
    kind = error.get("type")
    return {"type": _type(kind) if isinstance(kind, str) else None, "message": LEFT_OUT}


def _left_out(value: Any, name: str = "") -> Any:
    if value is None:
        return None
    return {} if name in _OBJECTS else LEFT_OUT


def _step_key(key: str) -> str:
    """Return a step key with its kind. The numbers that this library counts stay."""
    found = _STEP_KEY.match(key)
    if found is None or found.end() == len(key):
        return key
    prefix = found[1]
    return prefix + short_hash(key.removeprefix(prefix))


def _name(name: str) -> str:
    """Return the name of a step. The item of a map, as in `send[anna@example.com]`, is a value."""
    return _ITEM.sub(lambda item: f"[{_step_key(item[1])}]", name)


def _type(text: str) -> str:
    return text if _TYPE.fullmatch(text) else LEFT_OUT


def _message(message: Any) -> Any:
    """Return a message in chat format: who wrote it, and the names of the tools that it calls."""
    if not isinstance(message, Mapping):
        return LEFT_OUT
    role = message.get("role")
    found: dict[str, Any] = {"role": role if role in _ROLES else LEFT_OUT, "content": LEFT_OUT}
    if message.get("invalidated") is True and isinstance(attempt := message.get("attempt"), int):
        found |= {"invalidated": True, "attempt": attempt}  # text of an attempt that failed
    if isinstance(call := message.get("tool_call_id"), str):
        found["tool_call_id"] = short_hash(call)
    if isinstance(calls := message.get("tool_calls"), list):
        found["tool_calls"] = [_call(each) for each in calls if isinstance(each, Mapping)]
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "function"}
    if isinstance(each := call.get("id"), str):
        found["id"] = short_hash(each)
    function = call.get("function")
    if isinstance(name := (function if isinstance(function, Mapping) else call).get("name"), str):
        found["function"] = {"name": _type(name), "arguments": LEFT_OUT}
    return found


_TEXTS: Final[dict[str, Callable[[str], str]]] = {
    "name": _name, "label": _name, "reason": _name, "from": _name, "to": _name, "id": _name, "type": _type,
    **dict.fromkeys(HASHED, short_hash),
}  # fmt: skip
