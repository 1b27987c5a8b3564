# [claim]
from pathlib import Path

from patterns.claim_check import Blobs, Claim, needed_by_jobs
from patterns.job_ids import job_id
from patterns.producer import JobRequest, Producer
from patterns.typed_jobs import Payload


class Extract(Payload):
    file: Claim


async def upload(producer: Producer, blobs: Blobs, upload_id: str, body: bytes) -> str:
    claim = await blobs.put(
        body, owner=("documents", job_id("extract", upload_id))
    )  # blob first, then its job
    return (await producer.enqueue(JobRequest("extract", Extract(file=claim), key=upload_id))).id


async def extract(ctx, payload: Extract) -> dict:
    path: Path = await ctx.services.blobs.fetch(payload.file)  # size and SHA-256 are checked
    return {"bytes": path.stat().st_size}


async def collect(blobs: Blobs, redis, engine) -> int:  # from a schedule, once an hour
    return (await blobs.sweep("documents", needed_by_jobs(redis, engine))).deleted


# [/claim]
# [retention]
from patterns.retention import DEFAULT, purge


async def nightly(engine) -> None:
    await purge(engine, DEFAULT)  # markers 60 days, dead letters 30, checkpoints 60


# [/retention]
# [health]
from patterns.health import measure, problems
from patterns.health_alerts import Rule, evaluate

RULES = [
    Rule(
        "*.oldest",
        raise_at=60,
        clear_at=30,
        because="jobs wait too long: add workers or look for a stuck one",
    ),
    Rule(
        "*.failure_rate",
        raise_at=0.2,
        clear_at=0.05,
        because="a fifth of the jobs fail: look at the dead letters",
    ),
    Rule("dead_letters", raise_at=1, clear_at=0.5, because="somebody has to look"),
]


async def check(redis, engine, queues, page_somebody) -> None:  # from a schedule; any number of instances
    health = await measure(redis, engine, queues)
    await evaluate(engine, health.signals(), RULES, send=page_somebody)


async def readyz(redis, engine) -> tuple[int, dict]:
    found = await problems(redis, engine)  # {} when Redis and the database answer
    return (503 if found else 200), dict(found)


# [/health]


async def example(redis_url: str, store_url: str) -> None:
    from types import SimpleNamespace

    from patterns import store
    from patterns.typed_jobs import JobTypes

    jobs, engine = JobTypes(), store.open_store(store_url)
    await store.create_all(engine)
    jobs.register(name="extract", payload=Extract, handler=extract, queue="documents")
    producer = Producer(jobs, redis_url)
    blobs = Blobs(Path(store_url.removeprefix("sqlite:///")).parent / "blobs")
    await upload(producer, blobs, "u1", b"x" * 100_000)
    data = (await producer.queue("documents").getJob("extract.u1")).data
    _, payload = jobs.decode("extract", data)
    ctx = SimpleNamespace(services=SimpleNamespace(blobs=blobs))
    assert await extract(ctx, payload) == {"bytes": 100_000}
    assert await collect(blobs, producer.redis, engine) == 0
    await nightly(engine)
    alerts = []

    async def page(alert) -> None:
        alerts.append(alert)

    await check(producer.redis, engine, ["documents"], page)
    assert alerts == [], "one fresh job is no reason to wake anybody"
    assert await readyz(producer.redis, engine) == (200, {})
    await producer.close()
    await store.close(engine)
