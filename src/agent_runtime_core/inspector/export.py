"""Export a run as an HTML file: everything that its page asks for, as an object from path to answer."""

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
from .redaction import redacted_answers
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

    The file opens from disk and needs no network. It has all that is stored of the run. Secrets in URLs are replaced
    by ***.

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

    `about` also has "run_id", "redacted", "exported_at", and "left_out": sentences about what the file does not have.
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
    """Return the row of a run and those of its child runs, level by level, and what is left out."""
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
