"""Check a built site: links resolve, entries of the API have descriptions, and nothing is loaded from the network.

python scripts/site_check.py site
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: Attributes whose address a browser follows only when the reader clicks.
_CLICKED = {("a", "href"), ("area", "href"), ("form", "action")}
_ADDRESSES = {"href", "src", "srcset", "action", "data", "poster"}
#: Values of `rel` of a <link> that a browser does not load.
_UNLOADED = {"canonical", "next", "prev", "alternate", "edit"}
_IN_CSS = re.compile(r"url\(\s*['\"]?(?P<url>[^)'\"]+)|@import\s+['\"](?P<imported>[^'\"]+)")
#: An entry of the API, or the text of one in which nothing precedes its end or its members.
_ENTRY = re.compile(
    r'<h\d id="(?P<name>[\w.]+)" class="doc doc-heading"|'
    r'<div class="doc doc-contents[^"]*">\s*(?:<p class="doc doc-class-bases">(?:(?!</p>).)*</p>\s*)?'
    r'(?P<empty></div>|<div class="doc doc-children">)',
    re.DOTALL,
)
_IN_LLMS = re.compile(r"\]\((?P<url>[^)\s]+)\)")


@dataclass
class PageParser(HTMLParser):
    """Collects the anchors of a page, and its addresses with whether a browser loads them."""

    ids: set[str] = field(default_factory=set)
    addresses: list[tuple[str, bool]] = field(default_factory=list)
    classes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what a start tag refers to."""
        given = {name: value or "" for name, value in attrs}
        self.classes |= set(given.get("class", "").split())
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        loaded = not (tag == "link" and set(given.get("rel", "").split()) <= _UNLOADED)
        for name in _ADDRESSES & given.keys():
            for each in given[name].split(",") if name == "srcset" else [given[name]]:
                self.addresses.append((each.strip().split(" ")[0], loaded and (tag, name) not in _CLICKED))
        self.addresses += [(url, True) for url in _css(given.get("style", ""))]


def problems(site: Path) -> list[str]:
    """Return what is wrong with a site, with the file it is in."""
    pages = {path.resolve(): _parsed(path) for path in site.rglob("*.html")}
    found = [] if pages else [f"{site}: there is no page"]
    for path, page in pages.items():
        base = site.resolve() if path.name == "404.html" else path.parent
        for address, loaded in page.addresses:
            found += [
                f"{path.relative_to(site.resolve())}: {each}" for each in _wrong(address, loaded, path, base, pages)
            ]
        if "mermaid" in page.classes:
            found.append(f"{path.relative_to(site.resolve())}: the theme loads a script for a mermaid diagram")
        found += [
            f"{path.relative_to(site.resolve())}: {name} has no description" for name in _empty(path.read_text("utf-8"))
        ]
    for path in site.rglob("*.css"):
        text = path.read_text("utf-8")
        found += [f"{path.relative_to(site)}: loads {url}" for url in _css(text) if urlsplit(url).netloc]
    for path in site.glob("llms.txt"):
        urls = [each["url"] for each in _IN_LLMS.finditer(path.read_text("utf-8"))]
        found += [f"llms.txt: no file {url}" for url in urls if not urlsplit(url).netloc and not (site / url).is_file()]
    return sorted(found)


def _parsed(path: Path) -> PageParser:
    parser = PageParser()
    parser.feed(path.read_text("utf-8"))
    return parser


def _empty(page: str) -> Iterator[str]:
    """Yield the names of the entries of the API that have no description."""
    name = ""
    for each in _ENTRY.finditer(page):
        name = each["name"] or name
        if each["empty"]:
            yield name


def _css(text: str) -> Iterator[str]:
    for each in _IN_CSS.finditer(text):
        url = each["url"] or each["imported"]
        if not url.startswith("data:"):
            yield url


def _wrong(address: str, loaded: bool, path: Path, base: Path, pages: dict[Path, PageParser]) -> Iterator[str]:
    url = urlsplit(address)
    if url.scheme == "data" or url.scheme in {"mailto", "javascript"}:
        return
    if url.scheme or url.netloc:
        if loaded:
            yield f"loads {address}"
        return
    if url.path.startswith("/") and path.name != "404.html":
        yield f"{address} is absolute, so it fails in local files"
        return
    target = (base / unquote(url.path).lstrip("/")).resolve() if url.path else path
    target = target / "index.html" if target.is_dir() else target
    if not target.exists():
        yield f"no file for {address}"
    elif url.fragment and target in pages and not _has_anchor(pages[target], url.fragment):
        yield f"no anchor for {address}"


def _has_anchor(page: PageParser, fragment: str) -> bool:
    # Material adds `__` anchors with a script: of tabs, and of line numbers.
    return fragment in page.ids or unquote(fragment) in page.ids or fragment == "__skip"


def main(site: Path) -> int:
    """Print what is wrong with a site, and return the exit code."""
    found = problems(site)
    for each in found:
        print(each, file=sys.stderr)
    print(f"{site}: {len(list(site.rglob('*.html')))} pages, {len(found)} problems")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
