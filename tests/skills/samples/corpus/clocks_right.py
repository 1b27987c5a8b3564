from apscheduler.schedulers.asyncio import AsyncIOScheduler

scheduler = AsyncIOScheduler()


@scheduler.scheduled_job("cron", hour=2)
async def nightly():
    # The row of the slot decides which process acts.
    async with db.begin() as tx:
        made = await tx.execute("INSERT INTO slots (slot) VALUES (:slot) ON CONFLICT DO NOTHING", {"slot": today()})
        if made.rowcount:
            await announce(tx, "nightly", today())
