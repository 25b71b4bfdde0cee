"""What a seed decides beforehand: the runs of its world, the faults, and what is done to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .wire import Faults

Layout = tuple[str, str, str]  # the places of queue, events and state; the same name for the same engine

#: Kinds of items that pay, and the options in their number.
PAYS = ("pay", "owe")
CHECKED, LIMITED = 1, 2  # a check says that a payment in doubt may be made again; the step has a time limit

#: Layouts of several engines, by how often they are played.
APART = {
    "memory-a memory-b memory-c": 5,
    "memory-a memory-b memory-b": 3,
    "memory-a memory-a memory-b": 3,
    "memory-a memory-b memory-a": 2,
    "remote-a remote-b remote-c": 3,
    "remote-a remote-b remote-b": 2,
    "remote-a memory-b memory-b": 3,
    "memory-a remote-b remote-a": 2,
    "remote-a sqlite-b sqlite-b": 1,
    "sqlite-a memory-b remote-c": 1,
}


@dataclass
class RunPlan:
    """A run: `items` is what its agent does, as (kind, name, number) triples."""

    run_id: str
    items: list[list[Any]]
    inline: bool = False
    at: float = 0.0
    delay: float = 0.0
    priority: int = 0
    followed: bool = False
    twice: bool = False  # two clients submit it under one idempotency key, each under an id of its own


@dataclass
class ForkPlan:
    """A fork of a run that pays, or of another fork of it."""

    run_id: str
    source: str
    after: str | None
    effects: str
    answer: bool  # to what it asks because of its policy
    items: list[list[Any]]


@dataclass
class Scenario:
    """All of a seed's choices but those made on the way."""

    seed: int
    layout: Layout
    workers: int
    runs: list[RunPlan]
    faults: Faults
    actions: list[tuple[float, str, Any]]
    world: dict[str, Any]
    failing: float = 0.0
    longest: float = 0.2
    edited: bool = False
    ablated: Sequence[str] = field(default=())
    forks: list[ForkPlan] = field(default_factory=list)


def build(seed: int, ablated: Sequence[str] = ()) -> Scenario:
    """The scenario of a seed. Each draws its own mix of faults, so that rare ones meet often enough."""
    chance = random.Random(f"scenario {seed}")
    layout = _layout(chance)
    workers = chance.choice((2, 2, 2, 3))
    edited = chance.random() < 0.1

    def some(most: float, rate: float = 0.35) -> float:
        return chance.random() * most if chance.random() < rate else 0.0

    faults = Faults(
        latency=chance.choice((0.002, 0.01, 0.04)),
        lost=some(0.08),
        unanswered=some(0.08),
        doubled=some(0.3),
        dropped=some(0.2),
        crash=some(0.04),
        late_bell=some(0.5),
        cut=some(0.06, 0.5),
    )
    runs = [_run(chance, i, edited) for i in range(chance.choice((2, 2, 2, 2, 3, 3, 4, 6)))]
    if not edited:
        _add_graphs(random.Random(f"graphs {seed}"), runs)
    if chance.random() < 0.08:
        runs.append(RunPlan("poison", [["step", "first", 0], ["poison", "boom", 0], ["step", "never", 0]]))
    actions = _actions(chance, workers, runs, layout)
    _add_clocks(random.Random(f"clocks {seed}"), workers, actions)
    forks = [] if edited else _add_forks(random.Random(f"forks {seed}"), runs, actions)
    if not edited:
        _add_messages(random.Random(f"messages {seed}"), runs, actions)
    return Scenario(
        seed=seed,
        layout=layout,
        workers=workers,
        runs=runs,
        forks=forks,
        faults=faults,
        actions=actions,
        world={
            "liveness": chance.random() < 0.6,
            "park_after": chance.choice((0.0, 0.1, 0.5)),
            "skew": some(2.0, 0.3),
            "hours": int(chance.random() < 0.15),
            "shuffle": chance.random() < 0.5,
            "decodes": any(what == "encrypt" for _, what, _ in actions),
        },
        failing=some(0.3),
        longest=3.0 if chance.random() < 0.05 else 0.2,
        edited=edited,
        ablated=ablated,
    )


def _layout(chance: random.Random) -> Layout:
    kind = chance.choices(("memory-a", "remote-a", "sqlite-a", "apart"), (36, 26, 12, 26))[0]
    if kind == "apart":
        queue, events, state = chance.choices([*APART], [*APART.values()])[0].split()
        return queue, events, state
    return kind, kind, kind


def _run(chance: random.Random, number: int, edited: bool) -> RunPlan:
    items: list[list[Any]] = []
    for i in range(chance.choice((3, 3, 3, 4, 5))):
        kinds = ("step", "step", "chain", "map", "signal", "sleep", "emit", "call", "late", "transaction")
        kind = chance.choice(("step", "step", "chain") if edited else kinds)
        count = chance.choice((2, 2, 3))
        items.append([kind, f"{kind}{i}", round(chance.uniform(0.02, 1.2), 3) if kind in ("sleep", "late") else count])
    return RunPlan(
        f"run-{number}",
        items,
        inline=chance.random() < 0.2,
        at=chance.uniform(0, 0.5),
        delay=chance.uniform(0.1, 1) if chance.random() < 0.15 else 0.0,
        priority=chance.choice((0, 0, 5)),
        followed=chance.random() < 0.25,
        twice=chance.random() < 0.15,
    )


def _add_graphs(chance: random.Random, runs: list[RunPlan]) -> None:
    """Steps that depend on each other, at the end of some runs: drawn apart, so that seeds draw the rest as before."""
    for run in runs:
        if chance.random() < 0.25:
            run.items.append(["graph", f"graph{len(run.items)}", chance.choice((3, 5, 7))])


def _add_forks(chance: random.Random, runs: list[RunPlan], actions: list[tuple[float, str, Any]]) -> list[ForkPlan]:
    """A run that pays after an approval, and forks of it: drawn apart, so that seeds draw the rest as before."""
    if chance.random() >= 0.4:
        return []
    pays: list[list[Any]] = [["pay", f"pay{i}", chance.choice((0, CHECKED))] for i in range(chance.choice((1, 1, 2)))]
    items: list[list[Any]] = [["step", "first", 0], *pays, ["step", "last", 0]]
    runs.append(RunPlan("payer", items, at=chance.uniform(0, 0.3)))
    forks: list[ForkPlan] = []
    for number in range(chance.choice((1, 2, 2, 3))):
        source = chance.choice(["payer", *(fork.run_id for fork in forks)])
        after = chance.choice(("first", "first", "signal:may pay0", "pay0", None))
        effects = chance.choice(("refuse", "refuse", "reuse", "ask", "repeat"))
        forks.append(ForkPlan(f"fork-{number}", source, after, effects, chance.random() < 0.5, items))
        actions.append((chance.uniform(0.2, 2.5), "fork", forks[-1]))
    if chance.random() < 0.6 and all(fork.effects != "ask" for fork in forks):  # nobody answers the child's questions
        items.insert(chance.randint(1, len(items)), ["owe", "owe", chance.choice((0, CHECKED))])
    for item in items:
        if item[0] in PAYS and chance.random() < 0.2:
            item[2] |= LIMITED
    if chance.random() < 0.5:
        for _ in range(chance.choice((1, 2))):
            about = chance.choice(["payer", *(fork.run_id for fork in forks)]), chance.choice((True, False))
            actions.append((chance.uniform(0.2, 4.0), "discard", about))
    if chance.random() < 0.25:
        actions.append((chance.uniform(0.2, 2.5), "encrypt", None))
    actions.sort(key=lambda action: action[0])
    return forks


def _add_messages(chance: random.Random, runs: list[RunPlan], actions: list[tuple[float, str, Any]]) -> None:
    """Messages to the agents of some runs, which most of these read: drawn apart, as the graphs."""
    for run in runs:
        if run.run_id not in ("poison", "payer") and chance.random() < 0.3:
            for i in range(chance.choice((0, 1, 2))):
                run.items.insert(chance.randint(0, len(run.items)), ["hear", f"hear{i}", 0])
            for i in range(chance.choice((1, 2, 4))):
                at = run.at + chance.choice((chance.uniform(0.05, 2.0), chance.uniform(0.05, 6.0)))
                actions.append((at, "send", (run.run_id, i, chance.choice(("client0", "client1")))))
    actions.sort(key=lambda action: action[0])


def _add_clocks(chance: random.Random, workers: int, actions: list[tuple[float, str, Any]]) -> None:
    """Machines that are suspended, and wall clocks that somebody sets: drawn apart, as the graphs."""
    names = [f"worker{i}" for i in range(workers)]
    if chance.random() < 0.35:
        at = 0.0
        for _ in range(chance.choice((1, 1, 2, 3))):
            at, name = at + chance.uniform(0.05, 1.5), chance.choice(names)
            actions.append((at, "suspend", name))
            at += chance.choice((0.4, 2.0, 4.0, 9.0))
            actions.append((at, "wake", name))
    if chance.random() < 0.35:
        for _ in range(chance.choice((1, 2))):
            step = chance.choice((-30.0, -4.0, 4.0, 30.0))
            actions.append((chance.uniform(0.05, 2.5), "step", (chance.choice(names), step)))
    if chance.random() < 0.15:  # all workers are stopped for longer than a lease, and no other can take their runs
        at = chance.uniform(0.05, 1.5)
        actions += [(at, "pause", name) for name in names] + [(at + 4.0, "go on", name) for name in names]
    actions.sort(key=lambda action: action[0])


def _actions(chance: random.Random, workers: int, runs: list[RunPlan], layout: Layout) -> list[tuple[float, str, Any]]:
    """What is done to the world, and when."""
    names = [f"worker{i}" for i in range(workers)] + ["executor"] * any(run.inline for run in runs)
    actions: list[tuple[float, str, Any]] = []
    for kind, rate, most in (("kill", 0.6, 4), ("pause", 0.5, 2), ("suspend", 0.15, 1), ("stop", 0.2, 1),
                             ("jump", 0.1, 1), ("cut", 0.35, 2)):  # fmt: skip
        if chance.random() >= rate or (kind == "cut" and not any("remote" in place for place in layout)):
            continue
        for _ in range(chance.randint(1, most)):
            at, name = chance.uniform(0.01, 2.0), chance.choice(names)
            actions.append((at, kind, (name, chance.choice((0.1, 0.6, 3.5))) if kind == "cut" else name))
            if kind in ("pause", "suspend"):
                actions.append((at + chance.choice((0.3, 1.5, 3.5)), "wake" if kind == "suspend" else "go on", name))
    if chance.random() < 0.35:
        by = chance.choice(("client0", "client1", names[0]))
        actions.append((chance.uniform(0.05, 2.5), "cancel", (chance.choice(runs).run_id, by)))
    for run in runs:
        for kind, name, number in run.items:
            count = number if kind == "signal" else chance.choice((0, 1)) if kind == "late" else 0
            for i in range(count):
                by = chance.choice(("client0", "client1"))
                actions.append((run.at + chance.uniform(0.05, 2.0), "signal", (run.run_id, name, i, by)))
    return sorted(actions, key=lambda action: action[0])
