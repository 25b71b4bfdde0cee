"""The lazy loader: what it finds, and what it says when there is nothing to find."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from agent_runtime_core._core.lazy_import import EXTRAS, load, pick
from agent_runtime_core.errors import InvalidArgument, MissingDependency
from tests.support.cases import for_each

HOUSE = "agent_runtime_core"
TABLE = {"memory": ".errors:LeaseLost", "redis": ".errors:RunBusy"}


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of somebody else's with one module, on the path for this test."""
    package = tmp_path / "their_pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "queue.py").write_text("class TheirQueue: ...\nclass Other: ...\nnumber = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("their_pkg", "their_pkg.queue"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    importlib.invalidate_caches()
    return package


def test_an_attribute_by_its_dotted_name() -> None:
    assert load(f"{HOUSE}.errors:LeaseLost") is sys.modules[f"{HOUSE}.errors"].LeaseLost


def test_a_relative_name_starts_at_the_package() -> None:
    assert load(".errors:LeaseLost", package=HOUSE) is sys.modules[f"{HOUSE}.errors"].LeaseLost


def test_without_a_colon_it_is_the_module() -> None:
    found = load("json.decoder")
    assert isinstance(found, ModuleType)
    assert found.__name__ == "json.decoder"


@pytest.mark.parametrize("dotted", ["", ":Name", "json:", ".errors:LeaseLost", "."])
def test_a_name_of_nothing_is_refused(dotted: str) -> None:
    with pytest.raises(InvalidArgument, match=r"a name to import must be written as 'package\.module:Name', got "):
        load(dotted)


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    monkeypatch.delitem(sys.modules, "redis.asyncio", raising=False)
    with pytest.raises(MissingDependency) as caught:
        load("redis.asyncio:Redis", needed_by="RedisQueue")
    assert str(caught.value) == "RedisQueue needs the 'redis' package: pip install 'agent-runtime-core[redis]'"
    assert isinstance(caught.value, ImportError)


def test_every_extra_of_a_package_is_one_of_the_project() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    extras = set(project["optional-dependencies"]) - {"all", "dev", "docs"}
    assert set(EXTRAS.values()) == extras


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("langgraph", "langgraph", "langgraph"), ("mcp", "mcp", "mcp"), ("mcp_server", "mcp", "mcp"),
        ("openai_agents", "agents", "openai-agents"), ("pydantic_ai", "pydantic_ai", "pydantic-ai"),
    ],
)  # fmt: skip
def test_an_integration_without_its_package_names_its_extra(
    module: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"{HOUSE}.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingDependency) as caught:
        importlib.import_module(name)
    assert str(caught.value) == f"{name} needs the {package!r} package: pip install 'agent-runtime-core[{extra}]'"


def test_a_missing_module_of_a_package_that_is_there_names_its_own_package(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry")
    exporter = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, exporter, None)
    with pytest.raises(MissingDependency, match=r"^the sink needs the module 'opentelemetry\.exporter\.") as caught:
        load(f"{exporter}:OTLPSpanExporter", needed_by="the sink")
    assert str(caught.value).endswith("': pip install opentelemetry-exporter-otlp-proto-http")


OTLP = "opentelemetry.exporter.otlp.proto"


@for_each(
    ("lacking", "wanted", "fix"),
    [
        ("opentelemetry.sdk", "opentelemetry.sdk.trace.export", "'agent-runtime-core[otel]'"),
        ("opentelemetry.sdk", "their_sink", "'agent-runtime-core[otel]'"),
        ("opentelemetry.exporter", f"{OTLP}.http.trace_exporter", "opentelemetry-exporter-otlp-proto-http"),
        ("opentelemetry.exporter", f"{OTLP}.grpc.trace_exporter", "opentelemetry-exporter-otlp-proto-grpc"),
        ("opentelemetry.exporter", "their_sink", "opentelemetry-exporter-otlp-proto-http"),
        ("a_dependency", f"{OTLP}.http.trace_exporter", "opentelemetry-exporter-otlp-proto-http"),
    ],
)
def test_a_part_of_opentelemetry_that_is_missing_names_what_installs_it(
    lacking: str, wanted: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API alone is a dependency of many packages."""
    pytest.importorskip("opentelemetry.trace")

    def importing(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {lacking!r}", name=lacking)

    monkeypatch.setattr(importlib, "import_module", importing)
    with pytest.raises(MissingDependency) as caught:
        load(f"{wanted}:Name", needed_by="the sink")
    assert str(caught.value) == f"the sink needs the module {lacking!r}: pip install {fix}"


def test_without_opentelemetry_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingDependency) as caught:
        load("opentelemetry.sdk.trace.export:BatchSpanProcessor", needed_by="the sink")
    assert str(caught.value) == "the sink needs the 'opentelemetry' package: pip install 'agent-runtime-core[otel]'"


def test_a_module_of_nobody_s_extra_is_looked_for_on_the_path() -> None:
    with pytest.raises(MissingDependency) as caught:
        load("no_such_package_at_all.queue:TheirQueue")
    assert str(caught.value) == (
        "TheirQueue needs the module 'no_such_package_at_all', which cannot be imported here. Check the spelling, and "
        "that it is installed or its folder is on sys.path"
    )


def test_what_the_loaded_module_itself_lacks_is_the_dependency(theirs: Path) -> None:
    (theirs / "queue.py").write_text("import no_such_package_at_all\nclass TheirQueue: ...\n")
    with pytest.raises(MissingDependency, match="TheirQueue needs the module 'no_such_package_at_all', which"):
        load("their_pkg.queue:TheirQueue")
    (theirs / "other.py").write_text("import json.no_such_module\n")
    with pytest.raises(MissingDependency, match=r"needs the module 'json\.no_such_module', which"):
        load("their_pkg.other:TheirQueue")


def test_an_error_inside_the_module_is_not_called_missing(theirs: Path) -> None:
    (theirs / "queue.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load("their_pkg.queue:TheirQueue")


def test_an_unknown_module_names_what_is_there(theirs: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load("their_pkg.queeu:TheirQueue")
    assert str(caught.value) == "package 'their_pkg': unknown module 'queeu'. Did you mean 'queue'?"


def test_a_module_is_no_package() -> None:
    with pytest.raises(InvalidArgument, match=r"package 'json\.decoder': unknown module 'inner'\. None exist"):
        load("json.decoder.inner:Name")


def test_an_unknown_attribute_names_what_is_there(theirs: Path) -> None:
    with pytest.raises(InvalidArgument) as caught:
        load("their_pkg.queue:TheirQueu")
    assert str(caught.value) == "module 'their_pkg.queue': unknown name 'TheirQueu'. Did you mean 'TheirQueue'?"


def test_pick_reads_the_table() -> None:
    assert pick(TABLE, "memory", package=HOUSE, what="queue backend") is sys.modules[f"{HOUSE}.errors"].LeaseLost


def test_pick_takes_somebody_else_s_class(theirs: Path) -> None:
    found = pick(TABLE, "their_pkg.queue:TheirQueue", package=HOUSE, what="queue backend")
    assert found.__name__ == "TheirQueue"


def test_pick_names_the_nearest_backend() -> None:
    with pytest.raises(InvalidArgument) as caught:
        pick(TABLE, "redsi", package=HOUSE, what="queue backend")
    assert str(caught.value) == (
        "unknown queue backend 'redsi'. Did you mean 'redis'? Write 'package.module:Class' for a custom one."
    )
    assert isinstance(caught.value, ValueError)


def test_pick_names_all_when_nothing_is_near() -> None:
    with pytest.raises(InvalidArgument, match=r"unknown queue backend 'postgres'\. Known: memory, redis\. "):
        pick(TABLE, "postgres", package=HOUSE, what="queue backend")


def test_pick_refuses_what_is_no_class(theirs: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"'their_pkg\.queue:number' must be the class of a queue backend, got 7"):
        pick(TABLE, "their_pkg.queue:number", package=HOUSE, what="queue backend")
