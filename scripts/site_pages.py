"""Change the Markdown of docs/ for the site: pure functions, which need no MkDocs.

The pages are written to be read on a forge too, so a few things have to be changed for the site: links to files that
are not in docs/, the `<!-- docs: … -->` comments of the tests, and the languages of blocks that no highlighter knows.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import inspect
import pkgutil
import posixpath
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

PACKAGE = "agent_runtime_core"
#: Files at the root of the repository that are pages of the site.
ROOT_PAGES = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md", "CHANGELOG.md": "changelog.md"}
#: Address of the repository's files, such as "https://example.org/project/blob/main". It is empty until the project has
#: one. Then name the project in `[project.urls]` of pyproject.toml and in SECURITY.md too.
FILES_ADDRESS = ""

#: Public methods that only this library calls, by class. The pages do not list them.
INTERNAL = {
    "AgentRunner": "claim_run insert_run new_execution new_run services tenant_of_new_run",
    "Context": "recorded_value started_without",
    "ContextManager": "change_turn forget_turn save_turn",
    "EventBus": "stored_rows",
    "Orchestrator": "insert_run new_run",
    "PersistenceManager": "document_stores",
    "QueuedRun": "of",
    "RunClient": "document_stores",
    "RunInfo": "of",
    "RunnerConfig": "of on",
    "RuntimeConfig": "chosen codec encode_contents placed redaction",
    "RunQueue": "acted_ops assign blocking_claims claim_request claim_rows confirm confirmed_op ended_op expiry_now "
    "give_back insertion may_lack_steps new_row notify_cancelled post_op require try_give_back try_release "
    "unchanged_update unknown_run",
    "StateStore": "status_ops",
    "StepExecutor": "open_journal",
    "StepProcessor": "publish_delta",
    "StoredAudit": "keep_at_most",
    "StoredConversations": "read_history",
    "SyncRunContext": "call_on_loop for_thread recorded_value runs_on started_without",
    "ToolRegistry": "execute_read run_checked run_once",
    "TurnManager": "handle_step_result_event new_run start_published",
}

#: The search prefers a page with a greater number. The first prefix of its path counts.
_BOOSTS = (
    ("guide/write-a-backend", 0.5),
    ("guide/", 4.0),
    ("troubleshooting", 4.0),
    ("tutorial", 3.0),
    ("concepts", 3.0),
    ("reference/api/", 0.2),
    ("reference/", 2.0),
    ("decisions/", 0.1),
    ("design", 0.2),
    ("evidence", 0.1),
    ("changelog", 0.2),
    ("migration", 0.3),
)
_FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)")
_DIRECTIVE = re.compile(r" *<!-- docs: (?P<verb>\S+)(?: (?P<rest>.*?))? *-->")
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]+)\]\((?P<target>[^)\s]+)\)")
_LABEL = re.compile(r"^\| `([\w.]+)` \| (stable|provisional|internal) \|", re.MULTILINE)
_ERROR = re.compile(r"^#{2,4} `?(\w+)`?$", re.MULTILINE)
_ENTRY = re.compile(r"^ {4}(?P<names>[\w*, .]+?)(?: \([^)]*\))?:", re.MULTILINE)
_ITEM = re.compile(r"^ *[-*] \[[^\]]+\]\((?P<target>[^)#\s]+)\)(?:: (?P<phrase>.+))?$", re.MULTILINE)


def for_the_site(markdown: str, page: str, address: str = "") -> str:
    """Return the Markdown of a page as the site needs it.

    Args:
        markdown: The page as it is in the repository.
        page: Its path in the repository, such as `docs/guide/redis.md`.
        address: Address of the repository's files, which links to other files begin with. Without one they become
            text.
    """
    lines = []
    for line, in_block in _with_blocks(markdown.splitlines()):
        lines.append(line if in_block else _LINK.sub(lambda found: _link(found, page, address), line))
    return "\n".join(lines) + "\n"


def _with_blocks(lines: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it belongs to a fenced block; without directives."""
    closing, title = "", ""
    for line in lines:
        if closing:
            if line.strip().startswith(closing) and not line.strip().strip(closing[0]):
                closing = ""
            yield line, True
        elif directive := _DIRECTIVE.fullmatch(line):
            title = directive["rest"] if directive["verb"] == "file" else title
        elif fence := _FENCE.fullmatch(line):
            closing = fence["fence"]
            yield fence["indent"] + closing + _info(fence["info"].strip(), title), True
            title = ""
        else:
            yield line, False


def _info(info: str, title: str) -> str:
    if info == "output":
        return ' { .text .output .no-copy title="Output" }'
    return f'{info or "text"} title="{title}"' if title else info


def _link(found: re.Match[str], page: str, address: str) -> str:
    text, (target, _, heading) = found["text"], found["target"].partition("#")
    if not target or ":" in target or target.startswith("/"):
        return found[0]
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    on_site = site_path(path)
    if on_site is not None:
        here = posixpath.dirname(site_path(page) or "")
        link = posixpath.relpath(on_site, here or ".")
        return f"[{text}]({link}{'#' * bool(heading)}{heading})"
    if address:
        return f"[{text}]({address.rstrip('/')}/{path}{'#' * bool(heading)}{heading})"
    plain = text.strip("`")
    if plain in {path, posixpath.basename(path), posixpath.splitext(posixpath.basename(path))[0]}:
        return f"`{path}`"
    return f"{text} (`{path}`)"


def site_path(path: str) -> str | None:
    """Return where the site has a file of the repository; None if it has no such page."""
    return ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)


def search_boost(path: str) -> float:
    """Return how much the search prefers a page: guides before reference, reference before records of the past."""
    return next((boost for prefix, boost in _BOOSTS if path.startswith(prefix)), 1.0)


def phrases(index: str) -> dict[str, str]:
    """Return what docs/index.md says about each page, by the page's path."""
    return {found["target"]: found["phrase"].strip() for found in _ITEM.finditer(index) if found["phrase"]}


def summary_of(markdown: str) -> str:
    """Return the first sentence of a page, as plain text."""
    prose = "\n".join(line for line, in_block in _with_blocks(markdown.splitlines()) if not in_block)
    for part in re.split(r"\n\s*\n", prose):
        text = " ".join(part.split())
        if text and text[0] not in "#|-*<!:":
            text = re.sub(r"\[([^\[\]]+)\]\([^)]*\)", r"\1", text)
            return textwrap.shorten(re.split(r"(?<=[.!?:]) ", text)[0].rstrip(":."), 150, placeholder=" …")
    return ""


def llms_txt(name: str, summary: str, sections: Mapping[str, Sequence[tuple[str, str, str]]], intro: str = "") -> str:
    """Return the text of llms.txt, as llmstxt.org describes it.

    Args:
        name: Name of the project.
        summary: What it is, in one sentence.
        sections: The pages of each section: title, path and a phrase.
        intro: A paragraph before the sections.
    """
    parts = [f"# {name}", f"> {summary}", *([intro] if intro else [])]
    for section, pages in sections.items():
        links = [f"- [{title}]({path}){f': {phrase}' if phrase else ''}" for title, path, phrase in pages]
        parts.append(f"## {section}\n\n" + "\n".join(links))
    return "\n\n".join(parts) + "\n"


def labels(support: str) -> dict[str, str]:
    """Return the stability label of each module, from docs/support.md."""
    return dict(_LABEL.findall(support))


def public_modules() -> list[str]:
    """Return the names of the public modules below the package; the command line is none of them."""
    package = importlib.import_module(PACKAGE)
    return sorted(
        each.name for each in pkgutil.iter_modules(package.__path__) if each.name[0] != "_" and each.name != "cli"
    )


def public_names(module: ModuleType) -> list[str]:
    """Return the public names of a module: its `__all__`, else the names of the package that it defines."""
    names = getattr(module, "__all__", None)
    if names is None:
        package = importlib.import_module(PACKAGE)
        names = [name for name in vars(module) if name in package.__all__]
    return list(names)


def identifier(module: str, name: str) -> str:
    """Return the path of a public name. MkDocs takes a path of a module and of a function for that of the module."""
    found = importlib.import_module(module)
    if hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None:
        return f"{getattr(found, name).__module__}.{name}"
    return f"{module}.{name}"


class ApiPages:
    """Writes `::: agent_runtime_core.queue` out: each public name once, on the page of the module it belongs to.

    MkDocs reads the source and does not run it, so it does not see an `__all__` that is computed.
    """

    def __init__(self, support: str = "", errors: str = "") -> None:
        """Find the home of each public name.

        Args:
            support: Text of docs/support.md, which has the stability labels.
            errors: Text of docs/reference/errors.md. An entry links to the heading of its name there.
        """
        self.explained = set(_ERROR.findall(errors))
        self.labels = labels(support)
        self.modules = [importlib.import_module(f"{PACKAGE}.{name}") for name in public_modules()]
        self.homes: dict[tuple[str, int], str] = {}
        for module in self.modules:
            for name in public_names(module):
                value = getattr(module, name)
                known = self.homes.setdefault((name, id(value)), module.__name__)
                where = getattr(value, "__module__", None) or ""
                if known != module.__name__ and f"{where}.".startswith(f"{module.__name__}."):
                    self.homes[name, id(value)] = module.__name__

    def expanded(self, markdown: str) -> str:
        """Return a page with each line `::: module` replaced by the documentation of its names."""
        return re.sub(rf"^::: ({PACKAGE}[\w.]*)$", lambda found: self._module(found[1]), markdown, flags=re.MULTILINE)

    def _module(self, dotted: str) -> str:
        module = importlib.import_module(dotted)
        own, others = [], []
        for name in public_names(module):
            home = self.homes.get((name, id(getattr(module, name))), dotted)
            if home == dotted:
                own.append(f"::: {identifier(dotted, name)}{self._options(getattr(module, name))}")
                if name in self.explained:
                    own.append(f"How to fix it: [{name}](../errors.md#{name.lower()}).")
                own += self._about_bases(getattr(module, name))
            else:
                others.append(f"| `{name}` | [{home}][{identifier(home, name)}] |")
        parts = [_docstring(module)]
        label = self.labels.get(dotted.removeprefix(f"{PACKAGE}."))
        if label:
            parts.append(f"Stability: **{label}** ([what it means](../../support.md#stability)).")
        if others:
            parts.append("\n".join(["| Name | Documented in |", "|---|---|", *others]))
        return "\n\n".join([*parts, *own])

    def _options(self, value: object) -> str:
        """Return options of the directive for one name."""
        if not isinstance(value, type):
            return ""
        options = []
        if undescribed(value):
            options.append("show_if_no_docstring: true")  # the check of the site finds those without a description
        internal = internal_methods(value)
        if internal:
            options.append(f'filters: ["!^_", "!^({"|".join(sorted(internal))})$"]')
        members = self._inherited(value) - self._described_elsewhere(value) - internal
        if members:
            options.append(f"inherited_members: [{', '.join(sorted(members))}]")
        return "".join(["\n    options:", *(f"\n      {each}" for each in options)]) if options else ""

    def _home(self, value: type) -> str | None:
        """Return the path of a class that has an entry, else None."""
        home = self.homes.get((value.__name__, id(value)))
        return None if home is None else identifier(home, value.__name__)

    def _bases(self, value: object) -> list[type]:
        """Return the base classes of a class that have entries of their own."""
        bases = value.__mro__[1:] if isinstance(value, type) else ()
        return [each for each in bases if each.__module__.startswith(PACKAGE) and self._home(each)]

    def _inherited(self, value: type) -> set[str]:
        """Return the members of base classes without an entry, which would be missing."""
        hidden = [each for each in value.__mro__[1:] if each.__module__.startswith(PACKAGE) and not self._home(each)]
        return {name for each in hidden for name in vars(each) if not name.startswith("_")}

    def _described_elsewhere(self, value: type) -> set[str]:
        """Return the names of the members that base classes with an entry describe there."""
        return {name for base in self._bases(value) for each in base.__mro__ for name in vars(each)}

    def _about_bases(self, value: object) -> list[str]:
        """Return a line with the base classes that describe the members which the entry of a class leaves out."""
        if not isinstance(value, type) or not self._inherited(value) & self._described_elsewhere(value):
            return []
        bases = [f"[{each.__name__}][{self._home(each)}]" for each in self._bases(value)]
        return [f"More members: {', '.join(bases)}."]


def undescribed(value: type) -> list[str]:
    """Return the fields of a dataclass, an enum or a named tuple that no docstring of its classes describes."""
    names = [*getattr(value, "_fields", ()), *getattr(value, "__dataclass_fields__", ())]
    if issubclass(value, enum.Enum):
        names += value.__members__
    texts = "\n".join(inspect.cleandoc(each.__doc__ or "") for each in value.__mro__ if each is not object)
    described = {name.strip(" *") for each in _ENTRY.finditer(texts) for name in each["names"].split(",")}
    return [each for each in names if not each.startswith("_") and each not in described]


def internal_methods(value: type) -> set[str]:
    """Return the names of the methods of a class that only this library calls."""
    return {name for each in value.__mro__ for name in INTERNAL.get(each.__name__, "").split()}


def _docstring(module: ModuleType) -> str:
    """Return a module's docstring as Markdown: what is drawn with boxes stays as it is."""
    paragraphs = inspect.cleandoc(module.__doc__ or "").split("\n\n")
    return "\n\n".join(f"```text\n{each}\n```" if "──" in each else each for each in paragraphs)
