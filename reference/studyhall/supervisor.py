"""Keeps processes running: starts them, restarts what dies with growing pauses, passes SIGTERM on."""

import asyncio
import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import Sequence

log = logging.getLogger("studyhall.supervisor")
UNUSABLE = 2  # exit code for "a restart will not help": wrong settings, no Redis available


async def supervise(command: Sequence[str], count: int, grace: float) -> int:
    """Keep `count` processes of `command` running until SIGTERM; then stop them and report their exit."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    children: dict[int, asyncio.subprocess.Process] = {}

    def signalled() -> None:
        stop.set()
        for process in children.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)

    async def keep(slot: int) -> int:
        failures = 0
        while True:
            # Its own session: Ctrl-C in a terminal reaches us once, and we pass it on once.
            process = await asyncio.create_subprocess_exec(
                *command, "--parent", str(os.getpid()), start_new_session=True
            )
            children[slot] = process
            if stop.is_set():
                process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            code = await process.wait()
            del children[slot]
            if stop.is_set() or code in (0, UNUSABLE):
                stop.set()
                # It was asked to stop before it could handle the signal.
                return 0 if code == -signal.SIGTERM else code
            failures = 1 if time.monotonic() - began > 60 else failures + 1
            delay = random.random() * min(10.0, 0.2 * 2**failures)
            log.error("worker process died", extra={"fields": {"exit": code, "restart_in": round(delay, 2)}})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await stop.wait()
                return 0  # told to stop while nothing runs in this slot

    async def reap() -> None:
        await stop.wait()
        signalled()
        await asyncio.sleep(grace + 10)
        for process in list(children.values()):
            log.error("worker process did not stop in time, killing it", extra={"fields": {"pid": process.pid}})
            process.kill()

    reaper = asyncio.create_task(reap())
    codes = await asyncio.gather(*(keep(slot) for slot in range(count)))
    reaper.cancel()
    return max(abs(code) for code in codes)
