"""Many seeds, on many processes: `python -m tests.simulation --seeds 200000 --processes 4`."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from .ablations import SAFEGUARDS
from .scenarios import play, wrong_ones

CHUNK = 25


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="500", help="how many, or FIRST:LAST, the last not included")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--without", action="append", default=[], choices=sorted(SAFEGUARDS), help="take a safeguard")
    parser.add_argument("--trace", action="store_true", help="tell each seed's last lines, wrong or not")
    parser.add_argument("--most", type=int, default=10, help="stop after so many seeds with something wrong")
    options = parser.parse_args(argv)
    first, last = (int(text) for text in f"0:{options.seeds}".split(":")[-2:])
    without = tuple(options.without)
    if options.trace:
        for seed in range(first, last):
            sys.stdout.write(f"{play(seed, without)}\n")
        return 0
    since, wrong = time.perf_counter(), 0
    chunks = [range(at, min(at + CHUNK, last)) for at in range(first, last, CHUNK)]
    work = partial(wrong_ones, ablated=without)
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for outcomes in map(work, chunks) if options.processes == 1 else pool.map(work, chunks):
            for outcome in outcomes:
                wrong += 1
                sys.stdout.write(f"{outcome}\n\n")
            if wrong >= options.most:
                pool.shutdown(cancel_futures=True)
                break
    seconds = time.perf_counter() - since
    sys.stdout.write(f"{last - first} seeds, {wrong} wrong, {seconds:.1f} s, {(last - first) / seconds:.0f} seeds/s\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
