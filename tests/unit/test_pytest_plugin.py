"""The pytest plugin, in a pytest of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

pytest_plugins = ["pytester"]

Run = Callable[..., pytest.RunResult]

FAR = """
    import pytest
    from agent_runtime_core.llm import ChatClient, use_llm_client
    from agent_runtime_core.llm._provider import Completion, ProviderAdapter
    from agent_runtime_core.testing import MockLLMClient

    class Far(ProviderAdapter):
        provider = "far"

        def __init__(self, remote=True):
            self.remote = remote

        async def request(self, request):
            return Completion({"role": "assistant", "content": "asked"}, {}, request.model, "stop")

        def stream(self, request): ...

        def translate(self, error, model): ...

    def ask(remote=True):
        import asyncio
        client = ChatClient(Far(remote), default_model="m")
        return asyncio.run(client.generate([{"role": "user", "content": "a"}])).message["content"]
"""
LIVE = "\n    @pytest.fixture\n    def client():\n        print('client made')\n"
LIVE += "\n    @pytest.mark.agent_runtime_live\n    def test_live(client):\n        assert ask() == 'asked'\n"


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run pytest on a test module that begins with FAR."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def started(tests: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(FAR + tests)
        return pytester.runpytest_subprocess(
            "-p", "agent_runtime_core.testing.plugin", "--strict-markers", "-W", "error", "-rs", *arguments
        )

    return started


def test_a_model_beyond_this_machine_is_refused_in_every_test(run: Run) -> None:
    result = run("""
    def test_far():
        ask()

    def test_in_a_thread():
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor() as pool:
            pool.submit(ask).result()

    @pytest.fixture
    def asked():
        return ask()

    def test_in_a_fixture(asked): ...

    def test_near():
        assert ask(remote=False) == "asked"
    """)
    result.assert_outcomes(passed=1, failed=2, errors=1)
    refusal = (
        "*NotConfigured: a test must not call a remote model*@pytest.mark.agent_runtime_live*--agent-runtime-live*"
    )
    result.stdout.fnmatch_lines([refusal])


def test_the_ban_ends_with_the_test(run: Run) -> None:
    run(
        """
    class Outside:
        def pytest_sessionfinish(self):
            assert ask() == "asked"
            print("asked after the last test")

    def test_near(request):
        request.config.pluginmanager.register(Outside())
    """,
        "-s",
    ).stdout.fnmatch_lines(["*asked after the last test*"])


@pytest.mark.parametrize(
    "arguments",
    [["--agent-runtime-live"], ["-m", "agent_runtime_live"], ["-m", "slow or (agent_runtime_live and not slow)"]],
)
def test_a_live_test_runs_when_asked_for_with_a_key(
    run: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "k")
    run(LIVE, *arguments, "-o", "markers=slow").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "arguments", [[], ["-m", "not slow"], ["-m", "not (slow and agent_runtime_live)"], ["-k", "live"]]
)
def test_a_live_test_is_skipped_unless_asked_for(
    run: Run, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    result = run(LIVE, *arguments, "-s", "-o", "markers=slow")
    result.assert_outcomes(skipped=1)
    result.stdout.no_fnmatch_line("*client made*")
    result.stdout.fnmatch_lines(["*a live test needs --agent-runtime-live or -m agent_runtime_live*"])


def test_a_live_test_is_skipped_without_a_key(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(LIVE, "--agent-runtime-live")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*a live test needs OPENAI_API_KEY or ANTHROPIC_API_KEY to be set*"])
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    result = run(LIVE.replace("live\n", "live('openai', 'gemini')\n", 1), "--agent-runtime-live")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*a live test needs GEMINI_API_KEY to be set*"])
    monkeypatch.setenv("GEMINI_API_KEY", "k")
    run(LIVE.replace("live\n", "live('openai', 'gemini')\n", 1), "--agent-runtime-live").assert_outcomes(passed=1)


def test_asking_for_live_tests_frees_no_other(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    result = run(LIVE + "\n    def test_far():\n        ask()\n", "--agent-runtime-live")
    result.assert_outcomes(passed=1, failed=1)


def test_the_marker_is_registered(run: Run) -> None:
    run("", "--markers").stdout.fnmatch_lines(["@pytest.mark.agent_runtime_live(*providers): calls a real model*"])


def test_a_project_may_have_its_own_option_and_marker_live(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest("""
        def pytest_addoption(parser):
            parser.addoption("--live", action="store_true")
    """)
    tests = """
    @pytest.mark.live
    def test_its_own(request):
        assert request.config.getoption("--live")
        with pytest.raises(Exception, match="must not call a remote model"):
            ask()
    """
    run(tests, "--live", "-o", "markers=live").assert_outcomes(passed=1)


def test_loading_the_plugin_loads_next_to_nothing_of_the_library() -> None:
    code = (
        "import sys, pytest; before = set(sys.modules); import agent_runtime_core.testing.plugin;"
        "print(*sorted(name for name in set(sys.modules) - before if name.startswith('agent_')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "agent_runtime_core",
        "agent_runtime_core._core",
        "agent_runtime_core._core.lazy_exports",
        "agent_runtime_core._core.lazy_import",
        "agent_runtime_core._core.pydantic_types",
        "agent_runtime_core._core.validation",
        "agent_runtime_core.errors",
        "agent_runtime_core.testing",
        "agent_runtime_core.testing.plugin",
    ]


def test_the_testing_kit_needs_no_pytest() -> None:
    code = (
        "import sys; sys.modules['pytest'] = None; from agent_runtime_core import testing;"
        "[getattr(testing, name) for name in testing.__all__]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
