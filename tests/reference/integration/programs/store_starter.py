"""Open the store, create the tables, count up: run several at once. Arguments: URL, increments."""

import asyncio
import sys

from sqlalchemy import Column, Integer, Table, select, update

from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, is_postgres, metadata

starters = Table("starters", metadata, Column("id", Integer, primary_key=True), Column("n", Integer))


async def main(url, increments):
    store = open_store(url)
    await create_all(store)
    if is_postgres(store):
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert
    async with begin(store) as tx:
        await tx.execute(insert(starters).values(id=1, n=0).on_conflict_do_nothing())
    for _ in range(increments):
        async with begin(store) as tx:
            n = (await tx.execute(select(starters.c.n).with_for_update())).scalar_one()
            await tx.execute(update(starters).values(n=n + 1))
    await close(store)


asyncio.run(main(sys.argv[1], int(sys.argv[2])))
