"""The examples as a reader starts them: offline with a script for a model, killed, interrupted, and without a key."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_runtime_core import AgentRunner, EventType, RunStatus
from examples import tools
from tests.support.provider_server import Script, script, serving, stream

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Runs tools.py with a line in a log for every call of the model and of a tool, written when it is made; there it
#: stays once the log has so many lines.
WATCHED = """
import asyncio, os, sys
sys.path.insert(0, sys.argv.pop(1))
import tools
log = os.open(sys.argv[1], os.O_APPEND | os.O_CREAT | os.O_WRONLY)
path, most = sys.argv.pop(1), int(sys.argv.pop(1))
scripted, before = tools.scripted, tools.Assistant.on_tool_call
def model(messages):
    os.write(log, f"model {len(messages)}\\n".encode())
    return scripted(messages)
async def tool(self, ctx, name, args):
    os.write(log, f"tool {name} {args}\\n".encode())
    if len(open(path).readlines()) == most:
        await asyncio.sleep(600)
    await before(self, ctx, name, args)
tools.scripted, tools.Assistant.on_tool_call = model, tool
tools.main()
"""

#: Runs an example with a Ctrl-C in the last moment of one of its turns of the loop.
INTERRUPTED = """
import asyncio, importlib, sys
sys.path.insert(0, sys.argv.pop(1))
example, name = importlib.import_module(sys.argv.pop(1)), sys.argv.pop(1)
turn = getattr(example, name)
def interrupt():
    raise KeyboardInterrupt
async def interrupted(*args, **more):
    try:
        return await turn(*args, **more)
    finally:
        asyncio.get_running_loop().call_soon(interrupt)
setattr(example, name, interrupted)
example.main()
"""


def environment(**more: str) -> dict[str, str]:
    ours = ("AGENT_RUNTIME_", "OPENAI_", "ANTHROPIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)} | more


def run(
    name: str, *arguments: str | Path, cwd: Path, code: int = 0, says: str = "", **more: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *arguments],
        cwd=cwd, env=environment(**more), input=says, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr + done.stdout
    assert "Traceback" not in done.stderr
    return done


@contextmanager
def started(command: list[str | Path], cwd: Path, said: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to a file; it is gone when the block ends."""
    with open(said, "wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd, env=environment(PYTHONUNBUFFERED="1"), stdin=subprocess.PIPE, stdout=file, stderr=file,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def until(process: subprocess.Popen[bytes], said: Path, true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not true():
        assert process.poll() is None, said.read_text()
        assert time.monotonic() < ends, said.read_text()
        time.sleep(0.002)


def files(folder: Path) -> Path:
    folder.mkdir()
    for name, size in (("a.txt", 10), ("b.txt", 20), ("c.txt", 60)):
        (folder / name).write_text("x" * size)
    (folder / "deeper").mkdir()
    return folder


# -- chat.py


def test_the_conversation_is_kept_from_one_start_to_the_next(tmp_path: Path) -> None:
    first = run("chat.py", "--mock", cwd=tmp_path, says="hello\n\nis anybody there?\n").stdout.splitlines()
    assert [line.partition(". ")[0] for line in first] == ["You said 'hello'", "You said 'is anybody there?'"]
    assert "Before that it was 'hello'" in first[1]
    said = run("chat.py", "--mock", "--message", "good", cwd=tmp_path).stdout
    assert "You said 'good'. Before that it was 'is anybody there?'. Lines so far: 3." in said
    assert run("chat.py", "--mock", cwd=tmp_path).stdout.startswith("6 messages are kept from before; the last: You")
    other = run("chat.py", "--mock", "--message", "hi", "--db", "other.db", cwd=tmp_path).stdout
    assert other.startswith("You said 'hi'. Lines so far: 1.")


async def test_every_line_is_a_run_that_streams(tmp_path: Path) -> None:
    run("chat.py", "--mock", cwd=tmp_path, says="one\ntwo\n")
    async with AgentRunner.open(tmp_path / "chat.db") as runner:
        runs = await runner.runs(agent="chat")
        assert [(each.run_key, each.status) for each in runs] == [
            ("chat-1", RunStatus.SUCCEEDED),
            ("chat-2", RunStatus.SUCCEEDED),
        ]
        assert [message["content"] for message in runs[1].input["messages"]][::2] == ["one", "two"]
        told = [e.payload for e in await runner.event_bus.get_events("chat-2") if e.event_type == "assistant.delta"]
    assert "".join(each["delta"] for each in told).startswith("You said 'two'")


async def test_an_answer_that_was_left_unfinished_is_given_first(tmp_path: Path) -> None:
    async with AgentRunner.open(tmp_path / "chat.db") as runner:
        await runner.submit("chat", {"messages": [{"role": "user", "content": "are you there?"}]}, run_id="chat-1")
    said = run("chat.py", "--mock", "--message", "again", cwd=tmp_path).stdout.splitlines()
    assert said[0] == "going on with: are you there?"
    assert said[1].startswith("You said 'are you there?'. Lines so far: 1.")
    assert said[2].startswith("You said 'again'. Before that it was 'are you there?'. Lines so far: 2.")


async def test_only_the_last_messages_go_along(tmp_path: Path) -> None:
    run("chat.py", "--mock", cwd=tmp_path, says="".join(f"line {n}\n" for n in range(25)))
    async with AgentRunner.open(tmp_path / "chat.db") as runner:
        last = (await runner.get_run("chat-25")).input["messages"]
    assert len(last) == 41
    assert (last[0]["content"], last[-1]["content"]) == ("line 4", "line 24")


def chunks(*texts: str) -> Script:
    said: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}]}
        for text in texts
    ]
    return stream(*said, {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})


async def test_it_asks_a_real_client(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    refused = script({"error": {"message": "no such model", "code": "model_not_found"}}, status=404)
    async with serving(chunks("Good ", "day"), refused, chunks("Good night")) as server:

        def say(text: str, code: int = 0) -> subprocess.CompletedProcess[str]:
            more = {"OPENAI_BASE_URL": f"{server.url}/v1", "NO_PROXY": "127.0.0.1"}
            return run("chat.py", "--message", text, "--model", "m-1", cwd=tmp_path, code=code, **more)

        assert (await asyncio.to_thread(say, "hello")).stdout == "Good day\n"
        failed = await asyncio.to_thread(say, "what?", 1)
        assert failed.stdout == ""
        assert failed.stderr.startswith("\nno answer: ModelNotFound: ")
        assert (await asyncio.to_thread(say, "bye")).stdout == "Good night\n"
    assert [asked["model"] for asked in server.asked] == ["m-1"] * 3
    told = [(message["role"], message["content"]) for message in server.asked[2]["messages"][1:]]
    assert told == [("user", "hello"), ("assistant", "Good day"), ("user", "bye")]


@pytest.mark.parametrize(
    ("name", "turn", "options", "code"),
    [
        ("chat", "answer", ["--mock"], 130),
        ("tools", "work", ["--mock"], 130),
        ("todo_planner", "start", [], 130),
        ("digest", "digest", ["files", "--db", "digest.db"], 1),
    ],
)
def test_ctrl_c_just_before_the_loop_stops_is_one_like_any_other(
    tmp_path: Path, name: str, turn: str, options: list[str | Path], code: int
) -> None:
    said = tmp_path / "said.txt"
    files(tmp_path / "files")
    with started(["-c", INTERRUPTED, EXAMPLES, name, turn, *options], tmp_path, said) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # not all of them read it
            process.stdin.write(b"hello\n")
            process.stdin.flush()
        assert process.wait(30) == code, said.read_text()
    assert said.read_text().endswith("\ninterrupted: start it again to go on\n")
    assert "Traceback" not in said.read_text()


def test_ctrl_c_at_the_prompt_ends_the_chat(tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    with started([EXAMPLES / "chat.py", "--mock"], tmp_path, said) as process:
        assert process.stdin is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        until(process, said, lambda: "--mock.\n" in said.read_text())
        # Python loses one that comes while a weak reference is cleared, which may be on its way to the prompt.
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
                break
        assert process.poll() == 130, said.read_text()
    assert said.read_text().endswith("\ninterrupted: start it again to go on\n")
    assert said.read_text().count("Traceback") == said.read_text().count("Exception ignored in")


# -- tools.py


def test_the_tools_are_called_and_a_note_is_written_after_a_yes(tmp_path: Path) -> None:
    folder = files(tmp_path / "files")
    said = run("tools.py", "--mock", "--folder", folder, cwd=tmp_path, says="y\n").stdout
    assert [line for line in said.splitlines() if line.startswith("  ")] == [
        "  list_files(place='.')",
        "    a.txt (10 bytes) … (3 more lines)",
        "  calculate(expression='10 + 20 + 60')",
        "    90",
        "  calculate(expression='90 / 3')",
        "    30.0",
        "  write_note(text='3 files have 30.0 bytes on average.')",
        "    written to notes.md",
    ]
    assert "The 3 files here have 30.0 bytes on average. The note is written.\n(5 model calls, 4 tool calls" in said
    note = (tmp_path / "notes.md").read_text()
    assert note.count("3 files have 30.0 bytes on average.") == 1
    again = run("tools.py", "--mock", "--folder", folder, cwd=tmp_path).stdout
    assert "finished before, nothing is called again" in again
    assert "list_files" not in again
    assert said.splitlines()[-2:] == again.splitlines()[-2:]
    assert (tmp_path / "notes.md").read_text() == note


@pytest.mark.parametrize("says", ["n\n", "\n"])
def test_without_a_yes_no_note_is_written(tmp_path: Path, says: str) -> None:
    folder = files(tmp_path / "files")
    said = run("tools.py", "--mock", "--folder", folder, cwd=tmp_path, says=says).stdout
    assert "There is no note of it, as you wished." in said
    assert not (tmp_path / "notes.md").exists()


def test_where_nobody_answers_the_question_waits(tmp_path: Path) -> None:
    folder = files(tmp_path / "files")
    left = run("tools.py", "--mock", "--folder", folder, cwd=tmp_path, code=1)
    assert "tools: nobody is here to answer: start it again in a terminal, or with --yes" in left.stderr
    said = run("tools.py", "--mock", "--folder", folder, "--yes", cwd=tmp_path).stdout
    assert "3 tool calls kept from before" in said
    assert "calculate" not in said
    assert said.endswith("(5 model calls, 4 tool calls, 150 tokens)\n")
    assert (tmp_path / "notes.md").read_text().count("on average") == 1


async def test_killed_it_goes_on_and_calls_nothing_again_that_is_recorded(tmp_path: Path) -> None:
    folder, log, said = files(tmp_path / "files"), tmp_path / "calls.log", tmp_path / "said.txt"
    log.touch()

    def command(most: int) -> list[str | Path]:
        options: list[str | Path] = ["--mock", "--yes", "--folder", folder, "--run-id", "r"]
        return ["-c", WATCHED, EXAMPLES, log, str(most), *options]

    def calls() -> list[str]:
        return log.read_text().splitlines()

    with started(command(2), tmp_path, said) as process:
        # Killed in the middle of the first tool.
        until(process, said, lambda: len(calls()) == 2)
    with started(command(7), tmp_path, said) as process:
        until(process, said, lambda: len(calls()) == 7)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert calls()[-1] == "tool calculate {'expression': '90 / 3'}"
    before = len(calls())
    async with AgentRunner.open(tmp_path / "tools.db") as runner:
        events = await runner.event_bus.get_events("r")
    recorded = {event.payload["tool_call_id"] for event in events if event.event_type == EventType.TOOL_RESULT}
    assert recorded == {"call_0", "call_1"}
    with started(command(0), tmp_path, said) as process:
        assert process.wait(30) == 0, said.read_text()
    assert calls() == [
        *("model 2", "tool list_files {'place': '.'}"),
        *("tool list_files {'place': '.'}", "model 4", "tool calculate {'expression': '10 + 20 + 60'}"),
        *("model 6", "tool calculate {'expression': '90 / 3'}"),
        *("tool calculate {'expression': '90 / 3'}", "model 8"),
        *("tool write_note {'text': '3 files have 30.0 bytes on average.'}", "model 10"),
    ]
    assert before == 7
    assert "2 tool calls kept from before" in said.read_text()
    assert said.read_text().endswith("The note is written.\n(5 model calls, 4 tool calls, 150 tokens)\n")


def test_a_note_that_was_written_before_it_was_recorded_is_not_written_twice(tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"

    class Context:
        idempotency_key = "run:step"

    write = tools.toolbox(tmp_path, notes).get("write_note")
    assert write is not None
    for _ in range(2):
        assert write("remember", ctx=Context()) == "written to notes.md"
    assert notes.read_text() == "<!-- run:step -->\nremember\n\n"


def test_ctrl_c_ends_the_tools_and_they_go_on(tmp_path: Path) -> None:
    folder, said = files(tmp_path / "files"), tmp_path / "said.txt"
    command: list[str | Path] = [EXAMPLES / "tools.py", "--mock", "--folder", folder, "--slow", "0.2"]
    with started(command, tmp_path, said) as process:
        until(process, said, lambda: "calculate" in said.read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    assert said.read_text().endswith("\ninterrupted: start it again to go on\n")
    assert "Traceback" not in said.read_text()
    with started(command, tmp_path, said) as process:
        until(process, said, lambda: "[y/N]" in said.read_text())
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    again = run("tools.py", "--mock", "--folder", folder, "--slow", "0.2", cwd=tmp_path, says="yes\n").stdout
    assert "3 tool calls kept from before" in again
    assert "The note is written." in again


def test_the_folder_is_all_it_reads(tmp_path: Path) -> None:
    folder = files(tmp_path / "files")
    (folder / "link").symlink_to(tmp_path)
    look = tools.toolbox(folder, tmp_path / "notes.md").get("list_files")
    assert look is not None
    assert look("deeper") == "nothing is in it"
    for place in ("..", "/", "link", "deeper/../../"):
        with pytest.raises(PermissionError, match="is outside of the folder you may read"):
            look(place)


@pytest.mark.parametrize(
    ("expression", "result"),
    [("1 + 2 * 3", 7), ("-(2 ** 10) // 3", -342), ("7 % 4 / 2", 1.5), (" 0.1 + 0.2 ", 0.1 + 0.2), ("2 ** -1", 0.5)],
)
def test_the_calculator_calculates(expression: str, result: float) -> None:
    assert tools.calculate(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("__import__('os').system('true')", "is no arithmetic"),
        ("().__class__", "is no arithmetic"),
        ("[1, 2]", "is no arithmetic"),
        ("'a' * 9", "is no arithmetic"),
        ("True + 1", "is no arithmetic"),
        ("1 << 9", "is no arithmetic"),
        ("9 ** 9 ** 9", "the power is too large"),
        ("2 ** 400 * 2 ** 400 * 2 ** 400", "or too large"),
        ("(-8) ** 0.5", "not a real number"),
        ("1e308 * 10", "not finite"),
        ("1 +", "invalid syntax"),
        ("1" * 1001, "longer than 1000 characters"),
    ],
)
def test_the_calculator_refuses_the_rest(expression: str, message: str) -> None:
    with pytest.raises((ValueError, SyntaxError), match=message):
        tools.calculate(expression)


# -- digest.py with a model


def test_a_model_says_what_each_file_is_about(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    for n in range(5):
        (folder / f"note{n}.md").write_text(f"# Note {n}\n\nThese are {n} words of a note.\n")
    (folder / "empty.md").touch()
    said = run("digest.py", folder, "--mock", cwd=tmp_path).stdout
    assert "7 steps run, 0 kept" in said
    text = (tmp_path / "digest.md").read_text()
    assert text.count("> A script has read 10 words of it.") == 5
    assert "> " not in text.partition("## `empty.md`")[2].partition("##")[0]
    assert "0 steps run, 7 kept" in run("digest.py", folder, "--mock", cwd=tmp_path).stdout
    plain = run("digest.py", folder, cwd=tmp_path).stdout
    assert "7 steps run, 0 kept" in plain
    assert plain.split()[1] != said.split()[1]
    assert "A script" not in (tmp_path / "digest.md").read_text()


async def test_the_digest_asks_a_real_client_once_for_each_file(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    folder = tmp_path / "notes"
    folder.mkdir()
    for n in range(5):
        (folder / f"note{n}.md").write_text(f"Note {n} " + "words " * 10_000)
    message = {"role": "assistant", "content": "It says\tthis.\n\nAnd that.\nMore.\nToo much."}
    answer = script({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "model": "m-1"})
    refused = script({"error": {"message": "no such key", "code": "invalid_api_key"}}, status=401)
    async with serving(answer, answer, refused, answer) as server:

        def write(model: str, code: int = 0) -> subprocess.CompletedProcess[str]:
            more = {"OPENAI_BASE_URL": f"{server.url}/v1", "NO_PROXY": "127.0.0.1"}
            return run("digest.py", folder, "--model", model, "--concurrency", "1", cwd=tmp_path, code=code, **more)

        failed = await asyncio.to_thread(write, "m-1", 1)
        assert failed.stderr.startswith("digest: ")
        assert "2 of 6 steps kept" in (await asyncio.to_thread(write, "m-1")).stdout
        asked = [re.findall(r"Note \d", each["messages"][1]["content"])[0] for each in server.asked]
        assert asked == ["Note 0", "Note 1", "Note 2", "Note 2", "Note 3", "Note 4"]
        assert max(len(each["messages"][1]["content"]) for each in server.asked) == 20_000
        text = (tmp_path / "digest.md").read_text()
        assert text.count("> It says this.\n\n> And that.\n\n> More.\n") == 5
        assert "0 of 6 steps kept" in (await asyncio.to_thread(write, "m-2")).stdout


# -- all of them


@pytest.mark.parametrize(
    ("name", "provider"), [("chat.py", "openai"), ("tools.py", "anthropic"), ("digest.py", "openai")]
)
def test_without_a_key_one_line_says_what_to_do(tmp_path: Path, name: str, provider: str) -> None:
    arguments = ["--message", "hi"] if name == "chat.py" else ["--model", "m-1"]
    (tmp_path / "note.md").write_text("A note.")
    told = run(name, *arguments, "--provider", provider, cwd=tmp_path, code=1)
    wanted = [f"no key: set {provider.upper()}_API_KEY, or try it without one: --mock"]
    if importlib.util.find_spec(provider) is None:  # whichever of the two a client finds out first
        wanted.append(f"pip install 'agent-runtime-core[{provider}]'; or try it without: --mock")
    assert told.stderr.startswith(f"{name.removesuffix('.py')}: ")
    assert any(each in told.stderr for each in wanted)
    assert told.stderr.count("\n") == 1
    assert told.stdout == ""
    assert not list(tmp_path.glob("*.db"))


@pytest.mark.parametrize(
    ("name", "arguments", "code", "message"),
    [
        ("chat.py", ["--mock", "--message", "hi", "--db", "no/where.db"], 1, "chat: "),
        ("chat.py", ["--provider", "nobody"], 1, "chat: unknown model provider 'nobody'"),
        ("tools.py", ["--mock", "--folder", "nowhere"], 2, "tools.py: error: nowhere is not a folder"),
        ("tools.py", ["--mock", "--db", "no/where.db"], 1, "tools: "),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    tmp_path: Path, name: str, arguments: list[str], code: int, message: str
) -> None:
    assert message in run(name, *arguments, cwd=tmp_path, code=code).stderr.splitlines()[-1]


def test_another_task_under_the_same_run_id_is_refused(tmp_path: Path) -> None:
    folder = files(tmp_path / "files")
    run("tools.py", "--mock", "--folder", folder, "--run-id", "mine", "--yes", cwd=tmp_path)
    told = run("tools.py", "other", "--mock", "--folder", folder, "--run-id", "mine", cwd=tmp_path, code=1)
    assert "'mine' was used before with another input." in told.stderr
