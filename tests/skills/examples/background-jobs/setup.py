"""What a process sets up once: its database, its logs, a Redis for tests, a group of commits."""

# [store]
from sqlalchemy import Column, Integer, String, Table

from patterns.core.open_store import create_all, open_store
from patterns.core.store import begin, insert, metadata

clicks = Table("clicks", metadata, Column("id", String(40), primary_key=True), Column("at", Integer))


async def opened(url: str):  # postgresql://user@host/name, sqlite:///path.db, sqlite:////absolute/path.db
    store = open_store(url)
    await create_all(store)  # the tables of all imported patterns; or your migration tool, from `metadata`
    return store


async def click(store, ident: str, at: int) -> None:
    async with begin(store) as tx:  # commits when the block ends; `read(store)` to read
        await tx.execute(insert(tx, clicks).values(id=ident, at=at).on_conflict_do_nothing())


# [/store]
# [group]
from sqlalchemy.exc import IntegrityError

from patterns.core.group_commit import GroupCommit
from patterns.core.store import begin, insert


def grouped(store, table) -> GroupCommit:
    async def flush(rows: list[dict]) -> list[str]:  # ONE transaction, an answer (or an exception) per row
        async with begin(store) as tx:
            await tx.execute(insert(tx, table), rows)
        return [row["id"] for row in rows]

    return GroupCommit(flush, poison=(IntegrityError,))  # then, in every caller: await group.submit({…})


# [/group]
# [engine]
from patterns.engine import ensure_redis


def with_redis(folder, work):
    redis = ensure_redis(folder)  # REDIS_URL, else one of its own; blocks while it starts
    try:
        return work(redis.url)
    finally:
        redis.stop()


# [/engine]
# [log]
import logging

from patterns.observability import bind, configure_logging

log = logging.getLogger("shop")


def ship(order: str) -> None:
    with bind(order=order):  # on every line inside, those of libraries too
        log.info("label bought")


# [/log]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio
    import io
    import json
    from pathlib import Path

    from sqlalchemy import func, select

    from patterns.core.open_store import close
    from patterns.core.store import read

    store = await opened(store_url)
    await click(store, "a", 1)
    await click(store, "a", 2)
    group = grouped(store, clicks)
    answers = await asyncio.gather(*(group.submit({"id": f"g{n}", "at": n}) for n in range(20)))
    assert answers == [f"g{n}" for n in range(20)]
    async with read(store) as tx:
        assert (await tx.execute(select(func.count()).select_from(clicks))).scalar() == 21
    await close(store)
    assert with_redis(Path(store_url.partition("///")[2]).parent, str) == redis_url, "REDIS_URL comes first"
    out = io.StringIO()
    configure_logging(stream=out)
    ship("o1")
    line = json.loads(out.getvalue().splitlines()[-1])
    assert (line["order"], line["msg"]) == ("o1", "label bought"), line
