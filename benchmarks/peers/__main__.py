"""Our queues and event buses beside those of others, in one run: `python -m benchmarks.peers [rows] [--json FILE]`."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..floor import Size
from ..report import machine
from .bars import ROWS
from .contenders import versions
from .server import NoServer, started, started_postgres
from .turns import ROUNDS, Entry, Failed, ask, entries

NAME = 34


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def told(entry: Entry) -> str:
    """One line of the report."""
    figure = "-" if entry.figure is None else _number(entry.figure)
    parts = [f"  {entry.who.name:<{NAME}} {figure:>12}"]
    ratios = (("best", "x the best peer"), ("against", "x one process"))
    parts += [f"{value:.2f} {said}" for of, said in ratios if (value := entry.value(of)) is not None]
    marks = {True: "ok", False: "MISSED", None: "not measured"}
    parts += [f"[{bar}: {marks[held]}]" for bar, held in entry.judged()]
    return "  ".join([*parts, entry.note] if entry.note else parts)


def _show(row: str, found: Sequence[Entry]) -> None:
    """Ours first, then the peers from the best to the worst."""
    for shape in dict.fromkeys(entry.shape.name for entry in found):
        here = [entry for entry in found if entry.shape.name == shape]
        print(f"\n{row}: {shape}, {here[0].shape.unit}")
        sign = 1 if here[0].shape.least_is_best else -1
        here.sort(key=lambda entry: (not entry.who.ours, entry.figure is None, sign * (entry.figure or 0)))
        for entry in here:
            print(told(entry), flush=True)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    known = ", ".join(ROWS)
    parser.add_argument("rows", nargs="*", metavar="row", help=f"of {known}, or how some begin; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument(
        "--redis-url", metavar="URL", help="an empty database, emptied again; default: a server of its own"
    )
    parser.add_argument("--dir", type=Path, help="where database files go: a disk to be measured, not a RAM disk")
    parser.add_argument("--only", default="", metavar="TEXT", help="those whose name holds this, such as 'ours'")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"the median of so many is told; default: {ROUNDS}")
    parser.add_argument("--tiny", action="store_true", help="only show that the rows work; figures mean nothing")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.rows if not any(row.startswith(name) for row in ROWS)]:
        parser.error(f"no row {', '.join(unknown)}: there are {known}")
    if options.rounds < 1:
        parser.error(f"--rounds is at least 1, not {options.rounds}")
    chosen = tuple(options.rows) or ("",)
    options.rows = [row for row in ROWS if row.startswith(chosen)]
    return options


@contextlib.contextmanager
def _redis(options: argparse.Namespace) -> Iterator[str]:
    """The URL of the server for this run; "" where no row asks for one, or why there is none."""
    contenders = [who for row in options.rows for who in ROWS[row].contenders if options.only in who.name]
    if all(who.stands != "redis" for who in contenders):
        yield ""
    elif options.redis_url is None:
        with contextlib.ExitStack() as stack:
            try:
                url = stack.enter_context(started())
            except NoServer as error:
                url = str(error)
            yield url
    else:
        if keys := ask("server", where=options.redis_url)["keys"]:
            raise NoServer(f"the database of --redis-url holds {keys} keys: name an empty one, it is emptied here")
        yield options.redis_url
        ask("empty", where=options.redis_url)


@contextlib.contextmanager
def _postgres(options: argparse.Namespace) -> Iterator[str]:
    """The URL of the PostgreSQL server for this run; "" where no row asks for one, or why there is none."""
    contenders = [who for row in options.rows for who in ROWS[row].contenders if options.only in who.name]
    with contextlib.ExitStack() as stack:
        url = ""
        if any(who.stands == "postgres" for who in contenders):
            try:
                url = stack.enter_context(started_postgres())
            except NoServer as error:
                url = str(error)
        yield url


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parsed(arguments)
    about = machine() | versions()
    found: list[Entry] = []
    since = time.perf_counter()
    try:
        with (
            _redis(options) as url,
            _postgres(options) as postgres,
            tempfile.TemporaryDirectory(prefix="bench-", dir=options.dir) as folder,
        ):
            size = Size(Path(folder).resolve(), tiny=options.tiny)
            if "://" in url:
                about["server"] = _server(url)
            print(*(f"{name} {value}" for name, value in about.items()), sep=", ", flush=True)
            for name in options.rows:
                here = list(
                    entries(name, ROWS[name], size, {"redis": url, "postgres": postgres}, options.only, options.rounds)
                )
                _show(name, here)
                found += here
    except (NoServer, Failed) as error:
        print(error, file=sys.stderr)
        return 2
    missed = sum(held is False for entry in found for _, held in entry.judged())
    print(f"\n{len(found)} figures in {time.perf_counter() - since:.0f} s, {missed} bars missed")
    if options.json is not None:
        report = {"machine": about, "rounds": options.rounds, "rows": [entry.as_dict() for entry in found]}
        options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


def _server(url: str) -> str:
    try:
        return str(ask("server", where=url)["version"])
    except Failed as error:
        return str(error)


if __name__ == "__main__":
    # The server ends with this process, however it is asked to end.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
