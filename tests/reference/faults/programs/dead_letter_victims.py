"""Sweepers and replayers that are killed all the time.

Arguments: store URL, Redis URL, sweep | replay, kills, seed. Prints `deaths {point: number}` when there is
nothing left to do. Alerts are counted in the Redis hash `alerts`, by letter id.
"""

import asyncio
import json
import random
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import nursery

from studyhall.patterns import dead_letter
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import JobError
from studyhall.patterns.core.open_store import close, open_store
from studyhall.patterns.dead_letter import ReplayRunning
from studyhall.patterns.dead_letter import replayer as dead_letter_replay
from studyhall.patterns.dead_letter import sweeper as sweeping

sweeping.PAGE = sweeping.MOST_PER_SWEEP = sweeping.ALERTS_AT_ONCE = (
    2  # nobody does all the work before the others could die
)
sweeping.ALERT_LEASE = dead_letter_replay.REPLAY_LEASE = 0.3  # the dead do not keep us waiting

SWEEPING = ["read", "archived", "removed", "alert claimed", "alert sent"]
REPLAYING = ["claimed", "restored", "marked"]


async def sweeper(life, store_url, redis_url):
    redis, store = producer_client(redis_url), open_store(store_url)
    plain = redis.execute_command

    async def execute_with_points(*command, **options):
        if sweeping._REMOVE in command:
            life.reached("archived")
        answer = await plain(*command, **options)
        if sweeping._READ in command:
            life.reached("read")
        elif sweeping._REMOVE in command:
            life.reached("removed")
        return answer

    redis.execute_command = execute_with_points

    async def alert(letter):
        life.reached("alert claimed")
        await redis.hincrby("alerts", letter.id, 1)
        life.reached("alert sent")

    idle = 0
    while idle < 5:  # longer than the lease of an alert that a dead sweeper began
        swept = await dead_letter.sweep(["q"], redis, store, alert)
        idle = 0 if swept != dead_letter.Swept() else idle + 1
        await asyncio.sleep(0.1 if idle else 0)
    await close(store)
    await redis.aclose()


async def replayer(life, store_url, redis_url):
    redis, store = producer_client(redis_url), open_store(store_url)
    restore, mark = dead_letter_replay._restore, dead_letter_replay._mark

    async def restore_with_points(*args, **options):
        life.reached("claimed")
        await restore(*args, **options)
        life.reached("restored")

    async def mark_with_point(*args, **values):
        await mark(*args, **values)
        life.reached("marked")

    dead_letter_replay._restore = restore_with_points
    dead_letter_replay._mark = mark_with_point
    while letters := await dead_letter.list_dead_letters(store, limit=10):
        for letter in random.sample(letters, 1):
            try:
                await dead_letter.replay(store, redis, letter.id)
            except ReplayRunning:
                await asyncio.sleep(0.05)
            except JobError as error:
                print("refused", type(error).__name__, letter.job_id, flush=True)
    await close(store)
    await redis.aclose()


if __name__ == "__main__":
    store_url, redis_url, what, kills, seed, slots = sys.argv[1:7]
    live = partial(sweeper if what == "sweep" else replayer, store_url=store_url, redis_url=redis_url)
    points = SWEEPING if what == "sweep" else REPLAYING
    died = nursery.run(live, points=points, kills=int(kills), seed=int(seed), slots=int(slots), most_after=0)
    print("deaths", json.dumps(died))
