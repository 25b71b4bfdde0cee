"""Hooks of MkDocs, which `mkdocs.yml` names: they pass each page through `site_pages`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from scripts import site_pages  # noqa: E402 - the path is set above

_sources: dict[str, str] = {}
_navigation: list[Navigation] = []


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are files at the root of the repository."""
    _sources.clear()
    for name, path in site_pages.ROOT_PAGES.items():
        files.append(File.generated(config, path, content=(ROOT / name).read_text("utf-8")))
    return files


def on_nav(nav: Navigation, **_: Any) -> Navigation:
    """Remember the navigation for llms.txt."""
    _navigation[:] = [nav]
    return nav


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Change a page's Markdown for the site."""
    path = page.file.src_uri
    names = {there: here for here, there in site_pages.ROOT_PAGES.items()}
    markdown = site_pages.for_the_site(markdown, names.get(path, f"docs/{path}"), site_pages.FILES_ADDRESS)
    page.meta.setdefault("search", {"boost": site_pages.search_boost(path)})
    if path.startswith("reference/api/"):
        support, errors = ((ROOT / "docs" / each).read_text("utf-8") for each in ("support.md", "reference/errors.md"))
        return site_pages.ApiPages(support, errors).expanded(markdown)
    _sources[path] = markdown
    return markdown


def on_post_build(*, config: MkDocsConfig) -> None:
    """Write llms.txt, and the Markdown of each page next to the page."""
    site = Path(config.site_dir)
    for path, markdown in _sources.items():
        (site / path).write_text(markdown, "utf-8")
    phrases = site_pages.phrases((ROOT / "docs" / "index.md").read_text("utf-8"))
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for page in _navigation[0].pages:
        path = page.file.src_uri
        if path in _sources and path != "index.md":
            # The title of a decision says what it is.
            decision = path.startswith("decisions/")
            phrase = phrases.get(path) or ("" if decision else site_pages.summary_of(_sources[path]))
            sections.setdefault(_section(page), []).append((str(page.title), path, phrase))
    intro = "Coding agents: `agent_runtime_core/skill.md` in the installed package is a short guide for you."
    text = site_pages.llms_txt(str(config.site_name), str(config.site_description), sections, intro)
    (site / "llms.txt").write_text(text, "utf-8")


def _section(page: Page) -> str:
    """Return the titles of the sections a page is in."""
    titles = [str(each.title) for each in reversed(list(page.ancestors))]
    return ": ".join(titles) or "Pages"
