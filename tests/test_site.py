"""The documentation site: what can be checked without MkDocs. `scripts/docs` builds it, and checks its links."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from scripts import site_check, site_pages
from tests.support.cases import for_each
from tests.support.pages import ROOT

DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text("utf-8")
PAGES = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
NAVIGATION = re.findall(r"^ *- (?:[^#\n]*: )?([\w./-]+\.md)$", CONFIG.partition("\nnav:\n")[2], re.MULTILINE)


def test_every_page_is_in_the_navigation_once() -> None:
    root_pages = set(site_pages.ROOT_PAGES.values())
    assert sorted(PAGES - set(NAVIGATION)) == [], "add one line to the navigation in mkdocs.yml"
    assert sorted(set(NAVIGATION) - PAGES - root_pages) == []
    assert len(NAVIGATION) == len(set(NAVIGATION))


def test_every_public_module_has_an_api_page() -> None:
    there = {path.stem for path in (DOCS / "reference" / "api").glob("*.md")} - {"index", "names"}
    assert there == {site_pages.PACKAGE, *site_pages.public_modules()}
    for name in there:
        dotted = name if name == site_pages.PACKAGE else f"{site_pages.PACKAGE}.{name}"
        page = (DOCS / "reference" / "api" / f"{name}.md").read_text("utf-8")
        assert page == f"# {dotted}\n\n::: {dotted}\n"


def test_the_api_index_links_every_api_page() -> None:
    linked = re.findall(
        r"^- \[\w+\]\((\w+)\.md\): \S", (DOCS / "reference/api/index.md").read_text("utf-8"), re.MULTILINE
    )
    assert linked == [site_pages.PACKAGE, *site_pages.public_modules()]


def test_every_public_module_has_one_stability_label() -> None:
    support = (DOCS / "support.md").read_text("utf-8")
    labels = site_pages.labels(support)
    assert {site_pages.PACKAGE, *site_pages.public_modules()} <= labels.keys()
    assert {name for name, label in labels.items() if label == "internal"} == {"cli"}
    for name in labels:
        assert support.count(f"\n| `{name}` | ") == 1


def test_the_support_matrix_has_the_ranges_of_the_package() -> None:
    support = (DOCS / "support.md").read_text("utf-8")
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    extras = project.partition("[project.optional-dependencies]")[2].partition("\ndocs = [")[0]
    ranges = re.findall(r'"([\w-]+>=[^"]+)"', extras)
    assert len(ranges) == 19
    assert [each for each in ranges if f"`{each}`" not in support] == []
    pythons = re.findall(r"Python :: (3\.\d+)", project)
    assert f"| Python | {', '.join(pythons)} |" in support


def test_each_api_page_names_its_stability_and_each_name_once() -> None:
    api = site_pages.ApiPages((DOCS / "support.md").read_text("utf-8"))
    pages = {
        name: api.expanded((DOCS / "reference" / "api" / f"{name}.md").read_text("utf-8"))
        for name in (site_pages.PACKAGE, *site_pages.public_modules())
    }
    assert "Stability: **stable**" in pages["runner"]
    assert "::: agent_runtime_core.runner.AgentRunner\n" in pages["runner"]
    assert "::: agent_runtime_core.runner.open_run.open_run\n" in pages["runner"]
    assert re.search(r"inherited_members: .*\bget_run\b", pages["runner"])
    assert "[agent_runtime_core.runner][agent_runtime_core.runner.AgentRunner]" in pages[site_pages.PACKAGE]
    entries = re.findall(r"^::: [\w.]+\.(\w+)$", "\n".join(pages.values()), re.MULTILINE)
    twice = {each for each in entries if entries.count(each) > 1}
    # These names mean something else in each of their modules.
    starred = set(re.findall(r"`(\w+)` \* \|", (DOCS / "reference" / "api" / "names.md").read_text("utf-8")))
    assert twice <= starred
    targets = re.findall(r"\]\[([\w.]+)\]", "\n".join(pages.values()))
    assert [each for each in targets if not any(f"::: {each}\n" in f"{page}\n" for page in pages.values())] == []


def test_the_search_prefers_guides() -> None:
    order = ["guide/retries-and-doubt.md", "reference/errors.md", "index.md", "reference/api/errors.md", "evidence.md"]
    boosts = [site_pages.search_boost(page) for page in order]
    assert boosts == sorted(boosts, reverse=True)
    assert len(set(boosts)) == len(order)


def test_an_error_links_to_its_section() -> None:
    api = site_pages.ApiPages(errors="# Errors\n\n## RunBusy\n\n### `LeaseLost`\n")
    page = api.expanded("::: agent_runtime_core.errors\n")
    assert page.count("How to fix it") == 2
    assert "::: agent_runtime_core.errors.RunBusy\n\nHow to fix it: [RunBusy](../errors.md#runbusy).\n" in page
    assert "[LeaseLost](../errors.md#leaselost)" in page


def test_an_api_page_lists_no_internal_method_and_no_member_twice() -> None:
    api = site_pages.ApiPages()
    runner, stores = (api.expanded(f"::: agent_runtime_core.{each}\n") for each in ("runner", "persistence"))
    assert re.search(r"filters: .*\bclaim_run\b", runner)
    inherited = re.search(r"inherited_members: (.*)", runner.partition("runner.AgentRunner\n")[2])
    assert inherited is not None
    assert "get_run" in inherited[1]
    assert "document_stores" not in inherited[1]
    store = stores.partition("persistence.InMemoryMemoryStore")[2].partition("\n\n:::")[0]
    assert "inherited_members" not in store or not re.search(r"\bset\b", store)
    assert "More members: [MemoryStore][agent_runtime_core.persistence.MemoryStore]." in store


def test_the_internal_methods_exist() -> None:
    known: dict[str, type] = {}
    for name in (site_pages.PACKAGE, *(f"{site_pages.PACKAGE}.{each}" for each in site_pages.public_modules())):
        module = importlib.import_module(name)
        for value in (getattr(module, each) for each in site_pages.public_names(module)):
            known |= {each.__name__: each for each in getattr(value, "__mro__", ())}
    internal = [(name, each) for name, methods in site_pages.INTERNAL.items() for each in methods.split()]
    assert [each for each in internal if not hasattr(known[each[0]], each[1])] == []


def test_a_field_without_a_description_is_found() -> None:
    @dataclass
    class Described:
        """A thing.

        Attributes:
            name: Its name.
        """

        name: str
        size: int

    assert site_pages.undescribed(Described) == ["size"]


def test_no_page_has_a_diagram_that_needs_a_script() -> None:
    assert [page for page in PAGES if "```mermaid" in (DOCS / page).read_text("utf-8")] == []


def test_pictures_are_small_and_readable_on_a_dark_page() -> None:
    pictures = list((DOCS / "assets").glob("*.svg"))
    assert pictures
    for path in pictures:
        text = path.read_text("utf-8")
        assert len(text) < 20_000, path.name
        assert "currentColor" in text or re.search(r"""fill="(?:#fff|#ffffff|white)\"""", text), path.name
        assert not re.search(r"<script|(?:href|src)=\"https?:", text), path.name


def test_the_guide_for_coding_agents_is_in_the_package() -> None:
    guide = files("agent_runtime_core").joinpath("skill.md").read_text("utf-8")
    assert guide.startswith("---\nname: agent-runtime-core\n")
    assert len(guide.splitlines()) < 150
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    # Every file of the package is in the wheel: the build has no list of files, and no pattern leaves any out.
    assert '[tool.hatch.build.targets.wheel]\npackages = ["src/agent_runtime_core"]\n\n' in project
    assert "skill" not in (ROOT / ".gitignore").read_text("utf-8")


def test_hooks_of_pre_commit_fetch_nothing() -> None:
    config = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    assert set(re.findall(r"repo: (\S+)", config)) == {"local"}
    assert set(re.findall(r"language: (\S+)", config)) == {"system"}


@for_each(
    ("page", "link", "expected"),
    [
        ("docs/guide/redis.md", "[a](../reference/errors.md#x)", "[a](../reference/errors.md#x)"),
        ("docs/guide/redis.md", "[a](https://example.org)", "[a](https://example.org)"),
        ("docs/guide/redis.md", "[a](#here)", "[a](#here)"),
        ("docs/guide/redis.md", "[changes](../../CHANGELOG.md#060)", "[changes](../changelog.md#060)"),
        ("docs/guide/redis.md", "[README](../../README.md#x)", "`README.md`"),
        ("docs/guide/redis.md", "[`chat.py`](../../examples/chat.py)", "`examples/chat.py`"),
        ("docs/design.md", "[an example](../examples/chat.py)", "an example (`examples/chat.py`)"),
        ("CONTRIBUTING.md", "[design](docs/design.md#layers)", "[design](design.md#layers)"),
        ("SECURITY.md", "[how to help](CONTRIBUTING.md)", "[how to help](contributing.md)"),
        ("docs/design.md", "![picture](assets/layers.svg)", "![picture](assets/layers.svg)"),
        ("docs/design.md", "```text\n[a](../README.md)\n```", "```text\n[a](../README.md)\n```"),
    ],
)
def test_links_are_changed_for_the_site(page: str, link: str, expected: str) -> None:
    assert site_pages.for_the_site(link, page) == f"{expected}\n"


def test_links_to_other_files_use_the_address_of_the_project() -> None:
    changed = site_pages.for_the_site("[tests](../tests/test_site.py)", "docs/design.md", "https://example.org/main/")
    assert changed == "[tests](https://example.org/main/tests/test_site.py)\n"


def test_the_project_names_an_address_once_it_has_one() -> None:
    named = {
        "pyproject.toml": "[project.urls]" in (ROOT / "pyproject.toml").read_text("utf-8"),
        "mkdocs.yml": re.search(r"^(?:site|repo)_url:", CONFIG, re.MULTILINE) is not None,
        "SECURITY.md": "no public address" not in (ROOT / "SECURITY.md").read_text("utf-8"),
    }
    assert named == dict.fromkeys(named, bool(site_pages.FILES_ADDRESS))
    assert "://" not in (ROOT / "README.md").read_text("utf-8").replace("http://127.0.0.1:8000/", "")


def test_blocks_are_changed_for_the_site() -> None:
    page = "<!-- docs: file job.py -->\n```python\n1\n```\n<!-- docs: skip-run why -->\n```bash\n2\n```\n"
    page += "\n```output\n3\n```\n"
    assert site_pages.for_the_site(page, "docs/a.md") == (
        '```python title="job.py"\n1\n```\n```bash\n2\n```\n\n``` { .text .output .no-copy title="Output" }\n3\n```\n'
    )


def test_llms_txt_has_the_phrases_of_the_index() -> None:
    phrases = site_pages.phrases("- [Redis](guide/redis.md): many machines\n- [Other](other.md)\n")
    assert phrases == {"guide/redis.md": "many machines"}
    text = site_pages.llms_txt("name", "What it is.", {"Guides": [("Redis", "guide/redis.md", "many machines")]})
    assert text == "# name\n\n> What it is.\n\n## Guides\n\n- [Redis](guide/redis.md): many machines\n"


def test_the_summary_of_a_page_is_its_first_sentence() -> None:
    assert (
        site_pages.summary_of("# Title\n\n```python\n1\n```\n\nYou [run](a.md) a worker. More.\n") == "You run a worker"
    )
    assert site_pages.summary_of("# Title\n") == ""


def _site(folder: Path, body: str, **others: str) -> Path:
    (folder / "index.html").write_text(f'<html><body id="top">{body}</body></html>')
    for name, text in others.items():
        path = folder / name.replace("_", ".")
        path.write_text(text)
    return folder


def test_a_good_site_has_no_problems(tmp_path: Path) -> None:
    body = """<a href="https://example.org">out</a> <a href="#top">up</a> <a href="other.html#part">other</a>
    <link rel="canonical" href="https://example.org/"> <img src="data:image/png;base64,AA">
    <a href="mailto:a@b">m</a>"""
    site = _site(tmp_path, body, other_html='<h2 id="part">Part</h2>', a_css="b { background: url(data:x) }")
    assert site_check.problems(site) == []
    assert site_check.main(site) == 0


@for_each(
    "body",
    [
        '<a href="gone.html">x</a>',
        '<a href="#gone">x</a>',
        '<a href="other.html#gone">x</a>',
        '<a href="/other.html">x</a>',
        '<img src="gone.svg">',
        '<img src="https://example.org/x.png">',
        '<img srcset="other.html 1x, https://example.org/x.png 2x">',
        '<script src="//unpkg.com/x"></script>',
        '<link rel="stylesheet" href="https://example.org/x.css">',
        '<link rel="preconnect" href="https://fonts.gstatic.com">',
        '<iframe src="https://example.org"></iframe>',
        '<p style="background: url(https://example.org/x.png)"></p>',
        '<pre class="mermaid"></pre>',
    ],
)
def test_a_dead_link_or_an_address_that_is_loaded_is_found(body: str, tmp_path: Path) -> None:
    site = _site(tmp_path, body, other_html="<p>Other</p>")
    assert len(site_check.problems(site)) == 1
    assert site_check.main(site) == 1


def test_an_entry_of_the_api_without_a_description_is_found(tmp_path: Path) -> None:
    entry = """<h3 id="{0}" class="doc doc-heading">{0}</h3> <div class="doc doc-contents first">{1}</div>"""
    bases = '<p class="doc doc-class-bases">Bases: <code>Base</code></p>'
    bodies = {"a.full": "<p>Text.</p>", "a.empty": " \n ", "a.based": bases, "a.both": f"{bases}<p>Text.</p>"}
    bodies["a.outer"] = '<div class="doc doc-children"></div>'
    site = _site(tmp_path, "".join(entry.format(*each) for each in bodies.items()))
    assert site_check.problems(site) == [
        f"index.html: {name} has no description" for name in ("a.based", "a.empty", "a.outer")
    ]


def test_style_sheets_and_llms_txt_are_checked(tmp_path: Path) -> None:
    site = _site(tmp_path, "", a_css="@import 'https://example.org/b.css';", llms_txt="- [gone](gone.md)\n")
    assert site_check.problems(site) == ["a.css: loads https://example.org/b.css", "llms.txt: no file gone.md"]


def test_an_empty_site_is_a_problem(tmp_path: Path) -> None:
    assert len(site_check.problems(tmp_path)) == 1
