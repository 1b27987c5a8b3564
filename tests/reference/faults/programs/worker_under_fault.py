"""A worker process for the fault tests: `worker_under_fault.py '{"kind": "stock"|"reliable", …}'`.

Prints one JSON line per event. `work`: "sleep" (awaits), "block" (holds the event loop), for `seconds`.
"""

import asyncio
import json
import signal
import sys
import time
from typing import Any

SPEC = json.loads(sys.argv[1])


def say(event, **more):
    print(json.dumps({"event": event, "at": time.time(), **more}), flush=True)


async def process(job, token):
    say("start", job=job.id, attempts=job.attemptsMade, stalled=job.stalledCounter)
    if SPEC["work"] == "block":
        until = time.monotonic() + SPEC["seconds"]
        while time.monotonic() < until:
            pass
    else:
        await asyncio.sleep(SPEC["seconds"])
    say("end", job=job.id)
    return "done"


async def main():
    options = SPEC.get("options", {})
    worker: Any
    if SPEC["kind"] == "stock":
        from bullmq import Worker

        connection = {"port": SPEC["port"], "socket_timeout": 30}
        worker = Worker(SPEC["queue"], process, {"connection": connection, "autorun": False, **options})
    else:
        from studyhall.patterns.bullmq_worker import ReliableWorker

        url = f"redis://127.0.0.1:{SPEC['port']}/0"
        worker = ReliableWorker(SPEC["queue"], process, url=url, on_error=_report, **options)
    for event in ("completed", "failed", "lost", "released"):
        worker.on(event, lambda job, *_, event=event: say(event, job=job.id))
    worker.on("stalled", lambda job_id: say("stalled", job=job_id))
    worker.on("error", lambda *_: None)
    running = asyncio.create_task(worker.run())
    if SPEC["kind"] == "reliable":
        loop = asyncio.get_running_loop()
        grace = SPEC.get("grace", 5)
        loop.add_signal_handler(signal.SIGTERM, lambda: loop.create_task(worker.drain(grace)))
        await worker.ready()
    say("ready")
    await running


def _report(error):
    say("error", kind=type(error).__name__, text=str(error))


asyncio.run(main())
