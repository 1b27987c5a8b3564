# [use]
from jobs import jobs
from patterns.pipeline import Pipeline
from patterns.schedule import Schedule, Schedules

schedules = Schedules(
    jobs,
    [
        Schedule(
            "monthly-credit",
            "add-credit",
            cron="0 2 1 * *",
            tz="Europe/Berlin",
            payload={"account": "a", "cents": 1},
        ),
        Schedule("heartbeat", "add-credit", every=60, payload={"account": "b", "cents": 1}, when_late="skip"),
    ],
    version=1,  # raise it with every change: an old instance that restarts then undoes nothing
)


async def start(producer, engine) -> Pipeline:
    await schedules.apply(producer, engine)  # at the start of every instance; writes only what changed
    return Pipeline(jobs, engine, guards=[schedules.guard])  # one slot, at most one effect


# [/use]
# [lease]
from patterns.lease import Lease, LeaseTaken, check_fence
from patterns.store import begin


async def rebuild_report(redis, engine, compute, write) -> bool:
    try:
        async with Lease(redis, "report", ttl=10, cancel_on_loss=True) as held:
            report = await compute()  # renewed meanwhile
            async with begin(engine) as tx:
                await check_fence(
                    tx, "report", held.fence
                )  # first statement: a frozen holder is refused here
                await write(tx, report)
    except LeaseTaken:
        return False
    return True


# [/lease]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio

    from patterns import store
    from patterns.producer import Producer

    engine, producer, wrote = store.open_store(store_url), Producer(jobs, redis_url), []
    await store.create_all(engine)
    await start(producer, engine)
    assert {state.schedule.id for state in await schedules.states(producer, engine)} == {
        "monthly-credit",
        "heartbeat",
    }
    assert (await schedules.apply(producer, engine)).written == [], "a second instance changes nothing"

    async def compute() -> str:
        await asyncio.sleep(0.2)
        return "report"

    async def write(tx, report) -> None:
        wrote.append(report)

    done = await asyncio.gather(*(rebuild_report(producer.redis, engine, compute, write) for _ in range(3)))
    assert sorted(done) == [False, False, True]
    assert wrote == ["report"]
    await producer.close()
    await store.close(engine)
