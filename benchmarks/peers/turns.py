"""Every contender of a row measured in turns, each measure in a process of its own."""

from __future__ import annotations

import functools
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..floor import Size, in_turns, percentile
from .bars import Bar, Row, Shape
from .contenders import Contender
from .processes import ROOT

PATIENCE = 180.0  # seconds one measure may take with all around it
ROUNDS = 3


class Failed(RuntimeError):
    """A measure that did not end well; the text is the last line it said."""


def ask(measure: str, **arguments: Any) -> dict[str, Any]:
    """What `drive` found."""
    command = [sys.executable, "-m", "benchmarks.peers.drive", measure, json.dumps(arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE, check=False)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"{measure} took more than {PATIENCE:.0f} s") from error
    if done.returncode:
        raise Failed((done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@dataclass(frozen=True)
class Entry:
    """One figure of one contender; None where `note` says why there is none."""

    row: str
    shape: Shape
    who: Contender
    figure: float | None = None
    best: float | None = None  # of the peers
    against: float | None = None  # its own, in the shape that this one is compared with
    bars: Sequence[Bar] = ()
    note: str = ""

    def value(self, of: str) -> float | None:
        """The figure, or its ratio to the best peer ("best") or to itself in another shape ("against")."""
        if self.figure is None or of == "figure":
            return self.figure
        beside = self.best if of == "best" else self.against
        return self.figure / beside if beside else None

    def judged(self) -> list[tuple[Bar, bool | None]]:
        """Each bar, and whether it is kept; None where there is nothing to hold against it."""
        values = [self.value(bar.of) for bar in self.bars]
        return [
            (bar, None if value is None else bar.holds(value)) for bar, value in zip(self.bars, values, strict=True)
        ]

    def as_dict(self) -> dict[str, Any]:
        about = {"row": self.row, "shape": self.shape.name, "who": self.who.name, "ours": self.who.ours}
        figures = {"figure": self.figure, "unit": self.shape.unit, "best_peer": self.best, "note": self.note}
        ratios = {"of_best_peer": self.value("best"), "of_one_process": self.value("against")}
        return about | figures | ratios | {"bars": [{"bar": str(bar), "held": held} for bar, held in self.judged()]}


@dataclass
class _Seat:
    """One contender in one shape, what its rounds brought, or why it has none."""

    shape: Shape
    who: Contender
    refused: str = ""
    samples: list[float] = field(default_factory=list)

    def measure(self, size: Size, servers: Mapping[str, str]) -> float:
        if self.refused:
            return math.nan
        arguments = {**self.shape.arguments, "count": size.of(self.shape.full, self.shape.tiny)}
        try:
            found = _asked(self.shape.measure, self.who, size, servers, **arguments)
        except Failed as error:
            self.refused = str(error)
            return math.nan
        self.samples += found.get("samples", ())
        return float(found["value"]) if "value" in found else statistics.median(found["samples"])

    @property
    def note(self) -> str:
        return self.refused or (f"p99 {percentile(self.samples, 0.99):.1f} ms" if self.samples else "")


def _asked(measure: str, who: Contender, size: Size, servers: Mapping[str, str], **arguments: Any) -> dict[str, Any]:
    """What is found in a place of its own."""
    with size.file() as path:
        where = {**servers, "sqlite": str(path)}.get(who.stands, "")
        return ask(measure, name=who.name, where=where, **arguments)


def _refusal(who: Contender, kind: str, size: Size, servers: Mapping[str, str]) -> str:
    """Why it cannot be measured at all, or nothing."""
    if missing := who.missing():
        return missing
    if "://" not in (where := servers.get(who.stands, "://")):
        return where
    try:
        _asked("probe", who, size, servers, kind=kind)
    except Failed as error:
        return str(error)
    return ""


def _seats(row: Row, only: str, size: Size, servers: Mapping[str, str]) -> list[_Seat]:
    wanted = [who for who in row.contenders if only in who.name]
    refused = {who.name: _refusal(who, row.kind, size, servers) for who in wanted}
    return [
        _Seat(
            shape, who, "keeps nothing for one that comes later" if shape.later and not who.keeps else refused[who.name]
        )
        for shape in row.shapes
        for who in wanted
        if who.stands or not shape.elsewhere
    ]


def _best(seat: _Seat, medians: Sequence[tuple[_Seat, float]]) -> float | None:
    """The best of the peers that stand on the same, or of all where none does."""
    there = [(each.who, value) for each, value in medians if each.shape is seat.shape and not each.who.ours]
    alike = [value for who, value in there if who.stands == seat.who.stands] or [value for _, value in there]
    return seat.shape.better(alike) if alike else None


def entries(
    name: str, row: Row, size: Size, servers: Mapping[str, str], only: str = "", rounds: int = ROUNDS
) -> Iterator[Entry]:
    """Measure a row; of its contenders those whose name holds `only`. `servers` has URLs, or why there is none."""
    seats = _seats(row, only, size, servers)
    taken = in_turns(size.rounds(rounds), *(functools.partial(seat.measure, size, servers) for seat in seats))
    medians = [(seat, value) for seat, value in zip(seats, taken, strict=True) if not seat.refused]
    found = {(seat.shape.name, seat.who.name): value for seat, value in medians}
    for seat in seats:
        shape, who = seat.shape, seat.who
        bars = () if size.tiny else [bar for bar in row.bars.get(shape.name, ()) if bar.who == who.name]
        yield Entry(
            name,
            shape,
            who,
            figure=found.get((shape.name, who.name)),
            best=_best(seat, medians) if who.ours else None,
            against=found.get((shape.against, who.name)),
            bars=bars,
            note=seat.note,
        )
