"""The sources of the inspector's page: no way for text to become markup, imports that the export can bundle, and sizes.

The page has no build step, so these files are what browsers load.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from pathlib import Path, PurePosixPath

from agent_runtime_core._views.page import HEADERS, page_files
from agent_runtime_core.inspector.script_bundle import bundled, words_in
from tests.support.cases import for_each
from tests.support.pages import ROOT

STATIC = ROOT / "src" / "agent_runtime_core" / "_views" / "static"
FILES = {path.relative_to(STATIC).as_posix(): path for path in sorted(STATIC.rglob("*")) if path.is_file()}
TEXTS = {name: path.read_text("utf-8") for name, path in FILES.items()}
SCRIPTS = {name: text for name, text in TEXTS.items() if name.endswith(".js")}
OURS = {name: text for name, text in TEXTS.items() if not name.startswith("vendor/")}
#: Of the whole page, in bytes: as it is in the wheel, and the sum of its compressed files.
MOST_BYTES, MOST_COMPRESSED, MOST_VENDORED = 280_000, 110_000, 20_000  # of them 12,500 are licenses
MOST_LINES = 400
#: How text becomes markup or code, or a style that the policy of the page forbids.
FORBIDDEN = {
    "markup": r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|setHTMLUnsafe|createContextualFragment"
    r"|document\.write|DOMParser|srcdoc",
    "code": r"\beval\s*\(|\bnew\s+Function\b|\bimport\s*\(|javascript:|set(?:Timeout|Interval)\(\s*[\"'`]",
    "a style attribute": r"\bstyle\s*=(?!=)|setAttribute\(\s*[\"']style",
    "an inline handler": r"\bon[a-z]+\s*=\s*[\"']",
    "another host": r"(?:https?:)?//(?:[a-z0-9-]+\.)+[a-z]{2,}",
}
#: Names of namespaces. No browser requests them.
NAMESPACES = re.compile(r"http://www\.w3\.org/(?:2000/svg|1999/xhtml|1999/xlink)")
IMPORT = re.compile(r'import (?:\{[^{}]+\}|[A-Za-z_$][\w$]*) from "(\.\.?/[\w./-]+\.js)";$', re.MULTILINE)
EXPORT = re.compile(r"export (?:(?:async )?function|class|const) [A-Za-z_$]|export \{[^{}]+\};$", re.MULTILINE)


def offences(text: str) -> list[str]:
    """What a source has and must not have."""
    text = NAMESPACES.sub("", text)
    return [
        f"{what}: {found[0]}"
        for what, pattern in FORBIDDEN.items()
        for found in re.finditer(pattern, text, re.IGNORECASE)
    ]


@for_each("name", [name for name in OURS if name.endswith((".js", ".css", ".html", ".svg"))])
def test_no_source_makes_markup_code_or_requests_of_text(name: str) -> None:
    assert offences(OURS[name]) == []


@for_each(
    "text",
    [
        "element.innerHTML = text", "<div dangerouslySetInnerHTML=${x} />", "document.write(x)", "eval (x)",
        "new Function(x)", 'import("./x.js")', 'setTimeout("x()", 1)', '<p style="x">', "<p style=${x}>",
        'element.setAttribute("style", x)', '<body onload="x()">', "fetch('https://example.com/x')",
        "@import '//cdn.example.com/x.css'", 'href="javascript:x()"',
    ],
)  # fmt: skip
def test_what_is_forbidden_is_found(text: str) -> None:
    assert len(offences(text)) == 1, offences(text)


def test_one_function_parses_all_data() -> None:
    """An integer beyond 2^53 is exact wherever the page shows it, because `parsed` of source.js reads it."""
    parsing = re.compile(r"JSON\s*\.\s*parse\b|\.json\s*\(|responseType")
    found = {name: len(parsing.findall(text)) for name, text in OURS.items() if name.endswith(".js")}
    assert {name for name, number in found.items() if number} == {"source.js"}
    start = SCRIPTS["source.js"].index("export function parsed(")
    body = SCRIPTS["source.js"][start : SCRIPTS["source.js"].index("\n}\n", start)]
    assert len(parsing.findall(body)) == found["source.js"] == 2


def test_the_vendored_libraries_are_what_was_fetched() -> None:
    listed = json.loads(TEXTS["vendor/vendored.json"])
    assert {f"vendor/{each['file']}" for each in listed} == {name for name in SCRIPTS if name.startswith("vendor/")}
    for each in listed:
        content = FILES[f"vendor/{each['file']}"].read_bytes()
        assert hashlib.sha256(content).hexdigest() == each["sha256"], each["file"]
        assert f"{each['package']} {each['version']} ({each['license']})" in TEXTS["vendor/LICENSES.txt"]
        assert words_in(content.decode(), {"eval", "Function"}) == []
    assert sum(FILES[f"vendor/{each['file']}"].stat().st_size for each in listed) < MOST_VENDORED
    assert "Permission is hereby granted" in TEXTS["vendor/LICENSES.txt"]
    assert "Apache License" in TEXTS["vendor/LICENSES.txt"]


# -- modules


def imports_of(name: str) -> list[str]:
    folder = PurePosixPath(name).parent
    found = []
    for path in re.findall(r'(?:from|import)\s*"(\.[^"]+)"', SCRIPTS[name]):
        parts: list[str] = []
        for part in (folder / path).parts:
            if part == "..":
                parts.pop()
            else:
                parts.append(part)
        found.append("/".join(parts))
    return found


@for_each("name", [name for name in OURS if name.endswith(".js")])
def test_a_module_imports_and_exports_in_the_settled_forms(name: str) -> None:
    text = OURS[name]
    places = words_in(text, {"import", "export"})
    assert [each for each in places if each.depth] == []
    for each in places:
        form = IMPORT if each.text == "import" else EXPORT
        line = text[each.position : text.find("\n", each.position)]
        assert form.match(text, each.position), f"{name}: {line}"
        assert text[each.position - 1 : each.position] in ("", "\n"), f"{name}: {line}"
    # They are at the top: between them there are only comments.
    ends = [found.end() for found in IMPORT.finditer(text)]
    before = IMPORT.sub("", text[: ends[-1]]) if ends else ""
    assert re.sub(r"//[^\n]*|/\*[\s\S]*?\*/", "", before).strip() == "", f"{name}: code before an import"


@for_each("name", [name for name in OURS if name.endswith((".js", ".css"))])
def test_a_module_is_not_too_long_and_ends_in_a_line_break(name: str) -> None:
    text = OURS[name]
    assert text.count("\n") <= MOST_LINES
    assert text.endswith("\n")
    assert "\r" not in text


def test_the_modules_import_each_other_in_no_circle_and_the_page_needs_every_file() -> None:
    script = bundled(SCRIPTS, "main.js")  # a circle is an error
    assert set(re.findall(r"^// (\S+\.js)$\nconst \$module", script, re.MULTILINE)) == set(SCRIPTS)
    index = TEXTS["index.html"]
    loaded = re.findall(r'(?:href|src)="static/([^"]+)"', index)
    assert [each for each in loaded if each not in FILES] == []
    unused = set(FILES) - set(SCRIPTS) - set(loaded) - {"index.html", "vendor/LICENSES.txt", "vendor/vendored.json"}
    assert unused == set()
    for name in SCRIPTS:
        assert set(imports_of(name)) <= set(SCRIPTS), name


# -- what is served and shipped


def test_every_file_of_the_page_is_served_with_a_policy() -> None:
    assert set(page_files()) == set(FILES)
    for name, each in page_files().items():
        assert each.content == FILES[name].read_bytes()
    assert "'unsafe" not in HEADERS["Content-Security-Policy"]


def test_the_wheel_has_every_file_of_the_page() -> None:
    """The build takes the whole package, except what .gitignore names."""
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert '[tool.hatch.build.targets.wheel]\npackages = ["src/agent_runtime_core"]\n\n' in project
    ignored = [line.strip("/") for line in (ROOT / ".gitignore").read_text("utf-8").split() if not line.startswith("#")]
    assert ignored
    for name in FILES:
        path = Path("src/agent_runtime_core/_views/static", name)
        assert [each for each in ignored if path.match(each) or set(path.parts) & {each}] == [], name


def test_the_page_is_small() -> None:
    sizes = {name: path.stat().st_size for name, path in FILES.items()}
    compressed = {name: len(gzip.compress(path.read_bytes(), 9)) for name, path in FILES.items()}
    largest = sorted(sizes, key=lambda name: -sizes[name])[:8]
    shown = ", ".join(f"{name} {sizes[name]:,} ({compressed[name]:,} compressed)" for name in largest)
    total, small = sum(sizes.values()), sum(compressed.values())
    assert total <= MOST_BYTES, f"{total:,} bytes, {small:,} compressed. Largest: {shown}"
    assert small <= MOST_COMPRESSED, f"{small:,} compressed. Largest: {shown}"
