"""The threads of plain functions."""

from __future__ import annotations

import asyncio
import threading

from agent_runtime_core._core.threads import IDLE_THREADS, _Threads


def test_a_thread_closes_the_event_loop_that_its_code_has_left() -> None:
    count = IDLE_THREADS + 3
    threads, barrier = _Threads(), threading.Barrier(count + 1)
    used: list[threading.Thread] = []
    loops: dict[threading.Thread, asyncio.AbstractEventLoop] = {}

    def job() -> None:
        used.append(threading.current_thread())
        if len(used) % 2:
            loop = loops[threading.current_thread()] = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
        barrier.wait(30)

    for _ in range(count):
        threads.run(job)
    barrier.wait(30)
    try:
        while sum(thread.is_alive() for thread in used) > IDLE_THREADS:
            for thread in used:
                thread.join(0.01)
        for thread, loop in loops.items():
            assert loop.is_closed() is not thread.is_alive()
    finally:
        for loop in loops.values():
            loop.close()
