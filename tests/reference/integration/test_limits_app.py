"""StudyHall behind its limits: a dead AI provider, full queues, Redis away, users without a name."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.ai_server import AIServer, Answer, Reply
from harness.pipelines import full_pipeline, full_producer
from harness.waiting import until
from harness.workers import at_work
from studyhall import cli
from studyhall.app import open_app
from studyhall.limits import ai_limit, provider_breaker
from studyhall.patterns.circuit_breaker import BreakerOpen
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import Overloaded
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import read
from studyhall.patterns.degraded.pending import drain, pending
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, Payload
from studyhall.providers import GuardedProvider, open_provider
from studyhall.settings import load
from studyhall.submissions import submit

SAMPLE = Path(__file__).parents[3] / "reference" / "samples" / "water-cycle.md"
TEXT = "Rivers carry water to the sea. The sun warms the sea. Water rises and forms clouds. " * 20


def settings_at(directory, redis=None, **options):
    return load({}, {"data_dir": directory, "redis_url": redis, **options})


async def nobody(_step):
    pass


async def test_dead_provider_is_left_alone_by_the_jobs_that_need_it(redis_url, tmp_path):
    client = producer_client(redis_url)
    async with AIServer() as server:
        settings = settings_at(
            tmp_path,
            provider="openai",
            provider_url=server.url,
            provider_model="m",
            breaker_failures=3,
            breaker_seconds=0.5,
        )
        breaker = provider_breaker(settings, client)
        assert breaker is not None
        provider = GuardedProvider(open_provider(settings), breaker)
        assert provider.name == "openai/m"

        async def ask():
            return await provider.concept_graph(TEXT, key="k", on_progress=nobody, deadline=time.monotonic() + 20)

        refused = 0
        for _ in range(20):  # the server answers 500 to everything
            try:
                await ask()
            except BreakerOpen:
                refused += 1
            except Exception as error:
                assert "500" in str(error), error  # noqa: PT017
        assert (len(server.requests), refused) == (3, 17)
        concepts = {
            "concepts": [{"name": "sea", "sentence": ""}, {"name": "water", "sentence": ""}],
            "links": [{"source": "sea", "target": "water", "label": "holds"}],
        }
        server.will(Reply(429, headers={"retry-after": "1"}), *[Answer(concepts)] * 3)
        await until(lambda: _is(breaker, "half-open"), 5, "the cooldown to pass")
        with pytest.raises(Exception, match="429"):
            await ask()
        assert await _is(breaker, "closed"), "it answered: it is alive"
        await provider.close()
    await client.aclose()


async def _is(breaker, state):
    return bool((await breaker.state()).state == state)


async def test_local_provider_pays_nothing_and_a_remote_one_is_shared_fairly(redis_url, tmp_path):
    client = producer_client(redis_url)
    local = settings_at(tmp_path)
    assert ai_limit(local, client) == []
    assert provider_breaker(local, client) is None
    [limit] = ai_limit(settings_at(tmp_path, user_rate=1, user_burst=2), client)

    class Whose(Payload):
        owner: str

    started = []

    async def note(ctx, payload: Whose):
        started.append(payload.owner)

    jobs = JobTypes()
    for name in ("graph-generation", "document-processing"):
        jobs.register(name=name, payload=Whose, handler=note, queue="q")
    store = open_store(f"sqlite:///{tmp_path / 's.db'}")
    await create_all(store)
    async with open_app(settings_at(tmp_path, redis_url)):
        producer = full_producer(jobs, redis_url)
        await producer.enqueue_many(
            [JobRequest("graph-generation", {"owner": "heavy"}, key=f"h-{n}") for n in range(10)]
            + [JobRequest("document-processing", {"owner": "heavy"}, key=f"d-{n}") for n in range(5)]
            + [JobRequest("graph-generation", {"owner": "light"}, key="l")]
        )
        async with at_work("q", full_pipeline(jobs, store, limit), url=redis_url):
            await until(lambda: "light" in started, 10, "the light user's job")
            await until(lambda: len(started) >= 8, 10, "two AI jobs and five others of the heavy user")
            assert len(started) <= 10, "documents are not limited, AI jobs are"
        await producer.close()
    await close(store)
    await client.aclose()


async def test_full_queue_refuses_an_upload_and_keeps_nothing_of_it(redis_url, tmp_path):
    async with open_app(settings_at(tmp_path, redis_url, queue_depth=1), edge=True) as app:
        await submit(app, SAMPLE)
        files = sorted((tmp_path / "blobs").rglob("*"))
        with pytest.raises(Overloaded, match="send it again in") as refused:
            await submit(app, SAMPLE)
        assert refused.value.retry_after > 0
        assert sorted((tmp_path / "blobs").rglob("*")) == files
        assert await _documents(app) == 1
        assert (await pending(app.store)).waiting == 0
    async with open_app(settings_at(tmp_path, redis_url, queue_depth=1)) as worker:
        await submit(worker, SAMPLE)  # a process that is not the edge is never refused


async def _documents(app):
    from sqlalchemy import func, select

    from studyhall import db

    async with read(app.store) as connection:
        return int(await connection.scalar(select(func.count()).select_from(db.documents)) or 0)


@pytest.mark.slow
@pytest.mark.fault
async def test_uploads_go_on_while_redis_is_away_and_run_when_it_is_back(own_redis, tmp_path):
    own_redis.kill()
    async with open_app(settings_at(tmp_path, own_redis.url), edge=True) as app:
        began = time.monotonic()
        document = await submit(app, SAMPLE)
        assert time.monotonic() - began < 10
        assert (await pending(app.store)).waiting == 1
        own_redis.restart()

        async def queued():
            await drain(app.store, app.producer)
            return (await pending(app.store)).waiting == 0

        await until(queued, 15, "the head start to pass and the flow to be queued")
        ready = await app.producer.queue("documents").getJobs(["prioritized"], 0, -1)
        assert [job.data["payload"]["document_id"] for job in ready] == [document]


@pytest.mark.fault
def test_submit_on_the_command_line_with_redis_away_and_with_full_queues(own_redis, tmp_path, monkeypatch):
    monkeypatch.setenv("REDIS_URL", own_redis.url)
    monkeypatch.setenv("STUDYHALL_QUEUE_DEPTH", "2")
    runner = CliRunner()

    def studyhall(*args):
        return runner.invoke(cli.app, [*args, "--data-dir", str(tmp_path)])

    assert studyhall("submit", str(SAMPLE)).exit_code == 0
    own_redis.kill()
    degraded = studyhall("submit", str(SAMPLE))
    assert degraded.exit_code == 0, degraded.output
    own_redis.restart()
    shown = json.loads(studyhall("limits", "--json").stdout)
    assert shown["pending"]["waiting"] == 1
    assert shown["queues"]["documents"]["prioritized"] == 1
    assert "documents" in studyhall("limits").stdout
    assert studyhall("limits", "--retry", "nothing").exit_code == 1
    assert studyhall("submit", str(SAMPLE)).exit_code == 0
    full = studyhall("submit", str(SAMPLE))
    assert isinstance(full.exception, Overloaded), "main() prints it and exits with 1"
