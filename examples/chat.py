"""A chat in the terminal whose conversation is kept: every line is a durable run.

    python examples/chat.py [--mock] [--provider openai] [--model MODEL] [--message TEXT] [--db chat.db]

Answers appear as they come. The conversation goes on where it was left, also in the middle of an answer that was
killed. With --mock a script answers, and it needs no key; another --db is another conversation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import logging
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from agent_runtime_core import (
    AgentRunner,
    AgentRuntimeError,
    EventType,
    LLMClient,
    MissingDependency,
    MockLLMClient,
    RunnerConfig,
    RunStatus,
    ToolCallingAgent,
    ToolRegistry,
    UnknownRun,
)
from agent_runtime_core.errors import NotConfigured
from agent_runtime_core.events import Event
from agent_runtime_core.llm import get_llm_client

# Every run keeps the messages it was given: all of a long conversation in each would be much.
MOST_MESSAGES = 40


class Chat(ToolCallingAgent):
    key = "chat"
    system_prompt = "You talk with a person in a terminal: short answers in plain text."
    tools = ToolRegistry()
    model: str | None = None
    stream = True

    def __init__(self, client: LLMClient, model: str | None) -> None:
        self.client, self.model = client, model

    def get_llm_client(self) -> LLMClient:
        return self.client


def scripted(messages: list[Any]) -> str:
    """Stands in for a model: it knows nothing, and has read everything."""
    said = [message["content"] for message in messages if message["role"] == "user"]
    before = f" Before that it was {said[-2]!r}." if len(said) > 1 else ""
    return (
        f"You said {said[-1]!r}.{before} Lines so far: {len(said)}. This is a script; a model answers without --mock."
    )


def client_for(provider: str | None, mock: bool) -> LLMClient:
    """The client to ask; without a key the program ends with a line that says what to do."""
    if mock:
        return MockLLMClient(response_fn=scripted)
    try:
        return get_llm_client(provider)
    except NotConfigured as error:
        sys.exit(f"chat: no key: set {error.provider.upper()}_API_KEY, or try it without one: --mock")
    except MissingDependency as error:
        sys.exit(f"chat: {error}; or try it without: --mock")


async def conversation(runner: AgentRunner) -> tuple[int, list[Any], dict[str, Any] | None]:
    """The number of the next run, the messages so far, and the input of the run that somebody left unfinished."""
    answered, unfinished, number = None, None, 0
    while True:
        number += 1
        try:
            run = await runner.get_run(f"chat-{number}")
        except UnknownRun:
            break
        if run.status is RunStatus.SUCCEEDED:
            answered = run.run_id
        unfinished = run.input if run.status in (RunStatus.PENDING, RunStatus.RUNNING) else None
    messages = [] if answered is None else (await runner.wait(answered)).final_messages
    return number - (unfinished is not None), messages[-MOST_MESSAGES:], unfinished


async def answer(runner: AgentRunner, agent: Chat, run_id: str, asked: dict[str, Any]) -> list[Any] | None:
    """Print the answer as it comes; the messages with it, or None where there was none."""
    await runner.submit(agent, asked, run_id=run_id)  # so that there is something to follow
    since = await runner.event_bus.head(run_id)
    printing = asyncio.ensure_future(show(runner.stream(run_id, since)))
    try:
        result = await runner.execute(agent, run_id, asked, if_running="raise")
        told = await printing
    finally:
        printing.cancel()
        await asyncio.wait({printing})
    if result.error is not None:
        print(f"\nno answer: {result.error.type}: {result.error.message}", file=sys.stderr)
        return None
    said = str(result.final_output["response"])
    print(said.removeprefix(told) if said.startswith(told) else f"\n{said}", flush=True)
    return result.final_messages


async def show(events: AsyncIterator[Event]) -> str:
    """Print the pieces of an answer; what was printed of its last attempt."""
    told = ""
    async for event in events:
        if event.event_type == EventType.ASSISTANT_DELTA:
            told += event.payload["delta"]
            print(event.payload["delta"], end="", flush=True)
        elif event.event_type == EventType.RUN_STARTED and told:
            print("\nit broke off; once more:", flush=True)
            told = ""
    return told


def chat(loop: asyncio.Runner, runner: AgentRunner, agent: Chat, message: str | None) -> int:
    """Talk until the input ends, or about one message; the exit code."""
    number, messages, unfinished = loop.run(conversation(runner))
    if unfinished is not None:
        print(f"going on with: {unfinished['messages'][-1]['content']}", flush=True)
        ended = loop.run(answer(runner, agent, f"chat-{number}", unfinished))
        messages = ended or messages
        number += 1
    elif message is None and messages:
        print(f"{len(messages)} messages are kept from before; the last: {messages[-1]['content']}", flush=True)
    # Read outside of the loop, where Ctrl-C interrupts it.
    prompt = "> " if sys.stdin.isatty() else ""
    for line in itertools.chain([message]) if message is not None else iter(lambda: input(prompt), None):
        if not line.strip():
            continue
        asked = {"messages": [*messages[-MOST_MESSAGES:], {"role": "user", "content": line}]}
        ended = loop.run(answer(runner, agent, f"chat-{number}", asked))
        number += 1
        if ended is None and message is not None:
            return 1
        messages = ended or messages
    return 0


def close(loop: asyncio.Runner, runner: AgentRunner) -> None:
    """Close the runner. A Ctrl-C that came just before the loop would have stopped has left that for its next turn."""
    turn = loop.get_loop()
    turn.call_soon(turn.stop)
    turn.run_forever()
    loop.run(runner.close())


def main() -> None:
    parser = argparse.ArgumentParser(description="A chat in the terminal whose conversation is kept.")
    parser.add_argument("--provider", help="openai, anthropic or litellm; default: the configured one")
    parser.add_argument("--model", help="default: the provider's")
    parser.add_argument("--mock", action="store_true", help="a script answers: no key, no network")
    parser.add_argument("--message", metavar="TEXT", help="say this, print the answer, and end")
    parser.add_argument("--db", type=Path, default=Path("chat.db"), help="where the conversation is kept: chat.db")
    options = parser.parse_args()
    logging.getLogger("agent_runtime_core").setLevel(logging.ERROR)  # nobody here asks for the price of an answer
    try:
        agent = Chat(client_for(options.provider, options.mock), options.model)
        with asyncio.Runner() as loop:
            runner = AgentRunner.open(options.db, config=RunnerConfig(worker_id=f"chat-{os.getpid()}"))
            try:
                with contextlib.suppress(EOFError):
                    sys.exit(chat(loop, runner, agent, options.message))
            finally:
                close(loop, runner)
    except (AgentRuntimeError, OSError) as error:
        sys.exit(f"chat: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted: start it again to go on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
