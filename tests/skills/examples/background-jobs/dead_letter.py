# [use]
from patterns.dead_letter import list_dead_letters, purge, replay, replay_many, show, sweep


async def operate(store, redis, alert) -> None:
    """`redis` from connections.producer_client; `alert` is async, gets the letter, may be called twice per id."""
    await sweep(["credits", "mail"], redis, store, alert=alert)  # every 5 s, in every worker process
    for letter in await list_dead_letters(store, queue="credits", limit=20):
        history = await show(store, letter.id)  # earlier deaths of the same job
        print(letter.id, letter.name, letter.cause, letter.reason, letter.attempts_made, len(history))
        # Same id, payload, trace; fresh attempts. Refuses with a named error.
        await replay(store, redis, letter.id)
    await replay_many(store, redis, queue="mail", per_second=5)  # after the fix, gently
    await purge(store, 30 * 24 * 3600)  # seconds; idempotency markers are kept for longer, 60 days


# [/use]


async def example(redis_url: str, store_url: str) -> None:
    from bullmq import Queue

    from patterns.core.open_store import close, create_all, open_store
    from patterns.core.connections import producer_client

    redis, store, alerts = producer_client(redis_url), open_store(store_url), []
    await create_all(store)
    queue = Queue("credits", {"connection": redis})
    await queue.add("add-credit", {"v": 1}, {"jobId": "dead-1", "attempts": 1})
    await redis.lrem("bull:credits:wait", 0, "dead-1")
    await redis.zadd("bull:credits:failed", {"dead-1": 1})
    await redis.hset("bull:credits:dead-1", mapping={"failedReason": "boom", "atm": 1})

    async def alert(letter) -> None:
        alerts.append(letter.job_id)

    await operate(store, redis, alert)
    assert alerts == ["dead-1"]
    assert await (await queue.getJob("dead-1")).getState() == "waiting", "replayed under its own id"
    await close(store)
    await redis.aclose()
