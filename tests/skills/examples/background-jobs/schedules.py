# [use]
from jobs import jobs
from patterns.idempotency.once import inboxes, once
from patterns.pipeline import Pipeline
from patterns.schedule import Schedule, Schedules, ticking
from patterns.typed_jobs import typed

schedules = Schedules(
    jobs,
    [
        Schedule(
            "monthly-credit", "add-credit", cron="0 2 1 * *", tz="Europe/Berlin", payload={"account": "a", "cents": 1}
        ),
        Schedule("heartbeat", "add-credit", every=60, payload={"account": "b", "cents": 1}, when_late="skip"),
    ],
    version=1,  # raise it with every change: an old instance that restarts then undoes nothing
)


async def start(producer, store) -> Pipeline:
    await schedules.apply(producer, store)  # at the start of every instance; writes only what changed
    # One slot, at most one effect.
    return Pipeline(typed(jobs), ticking(schedules, store), once(inboxes(store)))


# [/use]
# [lease]
from patterns.core.store import begin
from patterns.lease import Lease, LeaseTaken, check_fence


async def rebuild_report(redis, store, compute, write) -> bool:
    try:
        async with Lease(redis, "report", ttl=10, cancel_on_loss=True) as held:
            report = await compute()  # renewed meanwhile
            async with begin(store) as tx:
                # First statement: a frozen holder is refused here.
                await check_fence(tx, "report", held.fence)
                await write(tx, report)
    except LeaseTaken:
        return False
    return True


# [/lease]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio

    from patterns.core.open_store import close, create_all, open_store
    from patterns.producer import Producer
    from patterns.typed_jobs import validated

    store, producer, wrote = open_store(store_url), Producer(redis_url, validated(jobs)), []
    await create_all(store)
    await start(producer, store)
    assert {state.schedule.id for state in await schedules.states(producer, store)} == {"monthly-credit", "heartbeat"}
    assert (await schedules.apply(producer, store)).written == [], "a second instance changes nothing"

    async def compute() -> str:
        await asyncio.sleep(0.2)
        return "report"

    async def write(tx, report) -> None:
        wrote.append(report)

    done = await asyncio.gather(*(rebuild_report(producer.redis, store, compute, write) for _ in range(3)))
    assert sorted(done) == [False, False, True]
    assert wrote == ["report"]
    await producer.close()
    await close(store)
