# [both]
# worker.py: jobs of the old code and ours, on one queue
from jobs import AddCredit, add_credit, jobs
from patterns.deadline import within_deadline
from patterns.idempotency.once import inboxes, once
from patterns.observability import logged
from patterns.pipeline import Done, JobContext, Pipeline
from patterns.stall_budget import crash_budget
from patterns.typed_jobs import Payload, plain, typed


class OldCredit(Payload, extra="ignore"):  # the data as the old code wrote it
    payment: str
    account: str
    cents: int


async def old_credit(ctx: JobContext, old: OldCredit) -> Done:
    return await add_credit.handler(ctx, AddCredit(account=old.account, cents=old.cents))


def pipeline(store) -> Pipeline:
    theirs = plain(OldCredit, old_credit, key=lambda old: old.payment)
    return Pipeline(logged(), typed(jobs, otherwise=theirs), crash_budget(), once(inboxes(store)), within_deadline())


# [/both]
# [keys]
from patterns.idempotency import Inbox, fingerprint


# `done`: the data of jobs that took effect. `name`: theirs; with `plain` its `kind`, or QUEUE/NAME
async def remember(store, name: str, done: list[dict]) -> None:
    markers = Inbox(store, name)
    for data in done:
        await markers.record(data["payment"], fingerprint(data), None)


# [/keys]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio

    from bullmq import Queue
    from sqlalchemy import text

    from patterns import dead_letter
    from patterns.bullmq_worker import ReliableWorker
    from patterns.core.connections import producer_client
    from patterns.core.open_store import close, create_all, open_store
    from patterns.core.store import begin, read

    store, redis = open_store(store_url), producer_client(redis_url)
    await create_all(store)
    async with begin(store) as tx:
        await tx.execute(text("CREATE TABLE accounts (id TEXT PRIMARY KEY, cents INTEGER)"))
        await tx.execute(text("INSERT INTO accounts VALUES ('ann', 0)"))

    async def cents() -> int:
        async with read(store) as tx:
            return (await tx.execute(text("SELECT cents FROM accounts"))).scalar_one()

    def credit(payment: str, cents: int) -> dict:
        return {"payment": payment, "account": "ann", "cents": cents, "etc": "of the old code"}

    await remember(store, "add-credit", [credit("done before", 10_000)])
    queue = Queue("credits", {"connection": redis})
    for ident, data in {
        "waits": credit("p1", 1),
        "twice": credit("p1", 1),
        "again": credit("done before", 10_000),
        "condemned": credit("p2", 20),
        "ours": {"v": 1, "payload": {"account": "ann", "cents": 300}, "key": "p3"},
        "both-forms": {"v": 1, "payload": {"account": "ann", "cents": 1}, "key": "p1"},
    }.items():
        await queue.add("add-credit", data, {"jobId": ident, "attempts": 1})
    await redis.hset("bull:credits:condemned", "defa", "job stalled more than allowable limit")

    async def ended(completed: int, failed: int) -> None:
        worker = ReliableWorker("credits", pipeline(store), url=redis_url, concurrency=1)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(30):
            while (
                await redis.zcard("bull:credits:completed") < completed
                or await redis.zcard("bull:credits:failed") < failed
            ):
                await asyncio.sleep(0.02)
        await worker.drain(5)
        await running

    await ended(completed=4, failed=2)
    assert await cents() == 301, "each once; what the old code had done not again"
    await dead_letter.sweep(["credits"], redis, store)
    letters = {letter.job_id: letter for letter in await dead_letter.list_dead_letters(store)}
    assert letters.keys() == {"condemned", "both-forms"}
    assert "stalled more than allowable limit" in letters["condemned"].reason
    assert "key" in letters["both-forms"].reason.lower(), "one key, two forms: refused, not done twice"
    await dead_letter.replay(store, redis, letters["condemned"].id)
    await ended(completed=5, failed=0)
    assert await cents() == 321
    await close(store)
    await redis.aclose()
