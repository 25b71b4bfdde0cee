"""ES modules as one classic script: the same program in one file, or an error that names the line."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from agent_runtime_core.errors import InvalidArgument
from agent_runtime_core.inspector.script_bundle import UnreadableScript, Word, bundled, words_in
from tests.support.cases import for_each

FILES = {
    "main.js": """\
// The entry.
import { Shape, area as size, shared } from "./pages/shape.js";
import twice from "./vendor/twice.js";
import {
  one,
  two,
} from "./numbers.js";

const text = `export const no = ${[1].map((x) => `import { ${x} } from "y"`)} import a from "b";`;
/* import { nothing } from "./nothing.js"; */
console.log(size(new Shape(2)), twice(one + two), shared === two, text, this === undefined);
""",
    "pages/shape.js": """\
import { two as shared } from "../numbers.js";
import { three } from "./three.js";

export class Shape {
  constructor(side) {
    this.side = side;
  }
}

export function area(shape) {
  return shape.side * shape.side + helper() / 2 / 1;
}

const helper = () => (/["'`/]export/.test("x") ? 1 : three);
export { shared };
""",
    "pages/three.js": "export const three = 4;\n",
    "numbers.js": "const one = 1;\nconst second = 2;\nexport function later() {}\nexport { one, second as two };\n",
    "vendor/twice.js": 'import{one as n}from"../numbers.js";var t=2*n;export default function(s){return s*t}\n',
}
SHOWN = '6 6 true export const no = import { 1 } from "y" import a from "b"; true\n'


def test_each_module_is_a_function_after_those_that_it_imports() -> None:
    script = bundled(FILES, "main.js")
    order = [
        line.removeprefix("// ") for line in script.splitlines() if line.startswith("// ") and line.endswith(".js")
    ]
    assert order == ["numbers.js", "pages/three.js", "pages/shape.js", "vendor/twice.js", "main.js"]
    assert script.startswith('(function () {\n"use strict";\n')
    assert "const { Shape: Shape, area: size, shared: shared } = $module2;" in script
    assert "return { later: later, one: one, two: second };" in script
    assert "const { one: n } = $module0;\nvar t=2*n;const $default = function(s)" in script
    found = words_in(script, {"import", "export"})
    assert found == []


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node")
def test_the_bundle_does_what_the_modules_do() -> None:
    done = subprocess.run(["node", "-"], input=bundled(FILES, "main.js"), capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == (SHOWN, "")


@for_each(
    ("text", "line"),
    [
        ('import * as all from "./a.js";', 1),
        ('import "./a.js";', 1),
        ('import a, { b } from "./a.js";', 1),
        ("import { a } from './a.js';", 1),
        ('import { a } from "preact";', 1),
        ('import { a } from "https://example.com/a.js";', 1),
        ('const a = 1;\nconst b = await import("./a.js");', 2),
        ("\n\nconsole.log(import.meta.url);", 3),
        ('export * from "./a.js";', 1),
        ('export { a } from "./a.js";', 1),
        ("export default 1;", 1),
        ("export default class A {}", 1),
        ("export let a = 1;", 1),
        ("export var a = 1;", 1),
        ("export const { a } = b;", 1),
        ("export function* a() {}", 1),
        ("if (a) {\n  export const b = 1;\n}", 2),
        ("await a;", 1),
        ("const a = `${await b}`;\nawait c;", 2),
        ("const a = {};\nconst $module1 = 1;", 2),
        ("// </script>", 1),
        ("\nconst a = '<!--';", 2),
        ("const a = 'x;", 1),
        ("const a = `x;", 1),
        ("(", 1),
        ("function a() {\n}}", 2),
    ],
)
def test_any_other_form_is_an_error_with_its_line(text: str, line: int) -> None:
    files = {"a.js": "export const a = 1;\n", "pages/x.js": text, "main.js": 'import { y } from "./pages/x.js";'}
    with pytest.raises(InvalidArgument, match=rf"^pages/x\.js, line {line}, must "):
        bundled(files, "main.js")


def test_what_is_imported_must_exist() -> None:
    missing = {"main.js": '\nimport { a } from "./b.js";'}
    with pytest.raises(InvalidArgument, match=r"^main\.js, line 2, must import a file of the page, got 'b\.js'"):
        bundled(missing, "main.js")
    other = {"main.js": 'import { a } from "./b.js";', "b.js": "export const c = 1;"}
    with pytest.raises(InvalidArgument, match=r"must import a name that b\.js exports, got 'a'"):
        bundled(other, "main.js")
    outside = {"main.js": 'import { a } from "../b.js";', "b.js": "export const a = 1;"}
    with pytest.raises(InvalidArgument, match=r"must import a file of the page, got '\.\./b\.js'"):
        bundled(outside, "main.js")


def test_a_circle_is_an_error_that_shows_it() -> None:
    files = {
        "main.js": 'import { a } from "./a.js";',
        "a.js": 'import { b } from "./b.js";\nexport const a = 1;',
        "b.js": 'import { a } from "./a.js";\nexport const b = 1;',
    }
    with pytest.raises(InvalidArgument, match=r"got main\.js > a\.js > b\.js > a\.js"):
        bundled(files, "main.js")


@for_each(
    "text",
    [
        "'import' + \"import\" + `import`", "/import/.test(x)", "// import\n/* import\nimport */", "x.import",
        "x?.import", "`${`import`}`", "`a\\`import`", "[/[/'\"]import/]", "return /import'/",
        "imports + $import + import_",
        "x = a / 2; y = '/import/'", "(a) / 2 + '/ import'", "`\\${import}`",
    ],
)  # fmt: skip
def test_words_outside_of_code_are_not_found(text: str) -> None:
    assert words_in(text, {"import"}) == []


def test_words_in_code_have_their_depth() -> None:
    assert words_in("import a; { (import) } `${import}${[import]}` + x", {"import"}) == [
        Word("import", 0, 0), Word("import", 13, 2), Word("import", 26, 1), Word("import", 36, 2),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "position"), [("a = 'b\n'", 4), ("`${", 3), ("a)", 1), ("(]", 1), ("a = /b\n/", 4)])
def test_text_that_is_no_script_is_an_error(text: str, position: int) -> None:
    with pytest.raises(UnreadableScript) as caught:
        words_in(text, {"import"})
    assert caught.value.position == position
