"""The page of a run as one HTML file, which opens from disk without a network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from html.parser import HTMLParser
from typing import Any, Final, NamedTuple

from .._core.validation import Shown, must
from .._views.page import page_files
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
