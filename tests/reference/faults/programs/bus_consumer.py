"""A consumer that dies as told, and its successors.

Arguments: bus kind, server URL, prefix, store URL, group, inbox | bare, deaths. `deaths` is a list like
`before,after,never`: one life each, forked from this warm process. `before` and `after` (the effect) end a life by
SIGKILL at its third delivery, `poison` at the first event that says so; `never` lives until SIGTERM.
Each effect is a row, so a second one is visible. Prints `delivered <id>`, `dies on <id>`, `life <death> <status>`.
"""

import asyncio
import ctypes
import os
import signal
import sys
import traceback

from sqlalchemy import Column, Integer, Table, Text, insert

from harness.buses import open_bus
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, metadata
from studyhall.patterns.inbox import handle_once

effects = Table(
    "bus_effects",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("consumer", Text, nullable=False),
    Column("event", Text, nullable=False),
)


def die(event):
    print(f"dies on {event.id}", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


async def live(kind, url, prefix, store, group, way, death):
    engine = open_store(store)
    await create_all(engine)
    bus = open_bus(kind, url, prefix)
    deliveries = 0

    async def effect(tx, event):
        await tx.execute(insert(effects).values(consumer=group, event=event.id))

    async def handle(event):
        nonlocal deliveries
        deliveries += 1
        # Not asked again after the effect: partitions run in parallel, the fourth may have come meanwhile.
        third = deliveries == 3
        print(f"delivered {event.id}", flush=True)
        if (death == "before" and third) or (death == "poison" and event.data.get("poison")):
            die(event)
        if way == "inbox":
            await handle_once(engine, group, event, effect)
        else:
            async with begin(engine) as tx:
                await effect(tx, event)
        if death == "after" and third:
            die(event)

    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    # A kill counts as an attempt of every event in hand, not only of the one it was meant for: with one attempt per
    # kill an innocent event that two lives were slow with would rightly be quarantined without its effect.
    attempts = 2 if death == "poison" else 100
    policy = RetryPolicy(base=0.05, cap=0.1, attempts=attempts)
    await bus.consume(group, ["order"], handle, stop=stop, concurrency=1, policy=policy)
    await bus.close()
    await close(engine)


def child(*args):
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with its parent
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the parent's, which would send it back and forth
    try:
        asyncio.run(live(*args))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)
    os._exit(0)


def main(*args):
    current = 0

    def forward(number, _):
        os.kill(current, number)

    signal.signal(signal.SIGTERM, forward)
    for death in args[-1].split(","):
        current = os.fork()
        if current == 0:
            child(*args[:-1], death)
        status = os.waitstatus_to_exitcode(os.waitpid(current, 0)[1])
        print(f"life {death} {status}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
