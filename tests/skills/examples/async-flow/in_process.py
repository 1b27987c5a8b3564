# [tasks]
from patterns.in_process_tasks import Tasks

tasks = Tasks(most=100)  # one per process; `await tasks.drain(5)` when the application stops


async def handle_view(page: str, count_view) -> str:
    tasks.start(count_view(page), name=f"count {page}")  # held until it ends; its error reaches the log
    return f"<h1>{page}</h1>"


# [/tasks]
# [timers]
from patterns.timers import every


async def refresh_prices(cache, fetch, stop) -> None:
    async def once() -> None:
        cache["prices"] = await fetch()

    # Fine: each process has its own cache. Reminders, clean-up, reports: a schedule.
    await every(30, once, stop=stop, limit=10)


# [/timers]
# [inline]
from patterns.core.errors import Permanent, Transient
from patterns.inline_retry import Budget, call

budget = Budget(share=0.1)  # one per dependency and process


async def price(client, item: str) -> int:
    async def once() -> int:
        response = await client.get(f"/prices/{item}")
        if response.status_code >= 500:
            raise Transient(f"HTTP {response.status_code}")
        if response.status_code >= 400:
            raise Permanent(f"HTTP {response.status_code}")
        return response.json()["cents"]

    return await call(once, attempts=3, timeout=5, budget=budget)


# [/inline]
# [ids]
from patterns.job_ids import job_id

assert job_id("graph-generation", "doc-42") == "graph-generation.doc-42"
assert ":" not in job_id("order-charge", "order:123")  # a digest where the key is not portable
# [/ids]


async def example(redis_url: str, store_url: str) -> None:
    import asyncio
    import gc
    from types import SimpleNamespace

    counted = []

    async def count_view(page: str) -> None:
        await asyncio.sleep(0.05)
        counted.append(page)

    await handle_view("home", count_view)
    gc.collect()
    await tasks.drain(5)
    assert counted == ["home"]
    cache, stop = {}, asyncio.Event()

    async def fetch() -> int:
        stop.set()
        return 5

    await refresh_prices(cache, fetch, stop)
    assert cache == {"prices": 5}
    statuses = [503, 200]

    class Client:
        async def get(self, path: str):
            return SimpleNamespace(status_code=statuses.pop(0), json=lambda: {"cents": 7})

    assert await price(Client(), "tea") == 7
    assert statuses == []
