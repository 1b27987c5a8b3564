"""The four workloads as they run for real: Redis, worker, pipeline, database, extraction in a child."""

import asyncio
import contextlib
import json
import shutil
from pathlib import Path

import pytest

from harness.ai_server import AIServer, Answer
from harness.pipelines import full_pipeline, full_producer
from harness.waiting import until
from studyhall import db
from studyhall.jobs import job_types, study_flow
from studyhall.patterns.bullmq_worker import ReliableWorker
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.isolation import SubprocessPool
from studyhall.patterns.producer import JobRequest
from studyhall.providers import LocalProvider
from studyhall.providers.http import HttpProvider
from studyhall.providers.wires import AnthropicMessages
from studyhall.services import Services

SAMPLES = Path(__file__).parents[3] / "reference" / "samples"
OWNER = "ada"


class StudyHall:
    """One producer, and workers that a test starts and stops."""

    def __init__(self, url, store, blobs):
        self.url, self.store, self.blobs = url, store, blobs
        self.jobs = job_types()
        self.producer = full_producer(self.jobs, url, timeout=10)
        self.pool = SubprocessPool(size=1)

    async def upload(self, source, document_id):
        path = self.blobs / document_id
        if isinstance(source, bytes):
            path.write_bytes(source)
        else:
            shutil.copy(source, path)
        async with begin(self.store) as tx:
            await db.add_document(
                tx, document_id=document_id, owner=OWNER, name="upload", blob=path.name, size=path.stat().st_size
            )

    @contextlib.asynccontextmanager
    async def worker(self, provider):
        services = Services(provider, self.pool, self.blobs)
        pipeline = full_pipeline(self.jobs, self.store, services=services)
        workers = [
            ReliableWorker(queue, pipeline, url=self.url, lock_duration=5, stalled_interval=1)
            for queue in sorted({job.queue for job in self.jobs})
        ]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        try:
            for worker in workers:
                await worker.ready()
            yield
        finally:
            await asyncio.gather(*(worker.drain(0.2) for worker in workers))
            await asyncio.gather(*running, return_exceptions=True)

    async def state(self, ref):
        return str(await self.producer.queue(ref.queue).getJobState(ref.id))

    async def ends(self, ref, state):
        async def ended():
            return await self.state(ref) == state

        await until(ended, timeout=60, what=f"{ref.name} to be {state}")

    async def read(self, query, document_id, owner=OWNER):
        async with read(self.store) as connection:
            return await query(connection, document_id, owner)


@pytest.fixture
async def hall(redis_url, tmp_path):
    store = open_store(f"sqlite:///{tmp_path / 'hall.db'}")
    await create_all(store)
    (tmp_path / "blobs").mkdir()
    made = StudyHall(redis_url, store, tmp_path / "blobs")
    yield made
    await made.pool.close()
    await made.producer.close()
    await close(store)


async def test_uploads_of_every_kind_become_graph_quiz_and_explanations(hall):
    names = ("water-cycle.md", "plate-tectonics.docx", "photosynthesis.pdf")
    refs = []
    for name in names:
        ident = name.split(".")[0]
        await hall.upload(SAMPLES / name, ident)
        refs.append(await hall.producer.enqueue(study_flow(ident, OWNER)))
    async with hall.worker(LocalProvider()):
        for ref in refs:
            await hall.ends(ref, "completed")
    for ident in ("water-cycle", "plate-tectonics", "photosynthesis"):
        row = await hall.read(db.document, ident)
        assert (row.status, row.error) == ("ready", None)
        graph, quiz = await hall.read(db.graph, ident), await hall.read(db.quiz, ident)
        assert len(graph.concepts) >= 10
        assert len(quiz.questions) == 8
        assert len(await hall.read(db.explanations, ident)) == 12
        assert await hall.read(db.graph, ident, "mallory") is None


async def test_job_that_names_another_owner_finds_nothing(hall):
    await hall.upload(SAMPLES / "water-cycle.md", "mine")
    refs = [
        await hall.producer.enqueue(
            JobRequest(job.name, {"document_id": "mine", "owner": "mallory"}, key=f"theft-{job.name}")
        )
        for job in hall.jobs
        if job.name in ("document-processing", "graph-generation", "quiz-creation", "connection-explanations")
    ]
    assert len(refs) == 4
    async with hall.worker(LocalProvider()):
        for ref in refs:
            await hall.ends(ref, "failed")
    assert (await hall.read(db.document, "mine")).status == "uploaded"


class Frozen(LocalProvider):
    """Stops for good after `parts` parts, like a worker whose machine is switched off."""

    def __init__(self, parts):
        super().__init__()
        self.parts, self.frozen = parts, asyncio.Event()

    async def concept_graph(self, text, *, on_progress, **options):
        async def count(step):
            await on_progress(step)
            if step.state and step.done == self.parts:
                self.frozen.set()
                await asyncio.Event().wait()

        return await super().concept_graph(text, on_progress=count, **options)


class Watched(LocalProvider):
    def __init__(self):
        super().__init__()
        self.resumed_at: list[int] = []

    async def concept_graph(self, text, *, on_progress, **options):
        self.resumed_at.append((options.get("resume") or {}).get("next", 0))
        return await super().concept_graph(text, on_progress=on_progress, **options)


async def test_graph_goes_on_where_the_worker_before_was_stopped(hall):
    await hall.upload(SAMPLES / "water-cycle.md", "water")
    ref = await hall.producer.enqueue(study_flow("water", OWNER))
    frozen = Frozen(parts=4)
    async with hall.worker(frozen):
        await asyncio.wait_for(frozen.frozen.wait(), 60)
    second = Watched()
    async with hall.worker(second):
        await hall.ends(ref, "completed")
    assert second.resumed_at == [4]
    text = await hall.read(db.text, "water")
    whole = await LocalProvider().concept_graph(text, key="k", on_progress=_quiet, deadline=float("inf"))
    assert await hall.read(db.graph, "water") == whole


async def test_malformed_answer_is_asked_for_again_under_another_key(hall):
    """A provider that honours idempotency keys would repeat the malformed answer for the same key."""
    await hall.upload(SAMPLES / "water-cycle.md", "water")
    payload = {"document_id": "water", "owner": OWNER}
    first = await hall.producer.enqueue(JobRequest("document-processing", payload, key="water"))
    links = [{"source": "ocean", "target": "rain"}]
    good = {"concepts": [{"name": "ocean"}, {"name": "rain"}], "links": links}
    async with AIServer() as server:
        server.will(Answer("no JSON"), Answer(good))
        remote = HttpProvider(AnthropicMessages(), base_url=server.url, api_key="k", model="m")
        async with hall.worker(remote):
            await hall.ends(first, "completed")
            ref = await hall.producer.enqueue(JobRequest("graph-generation", payload, key="water"))
            await hall.ends(ref, "completed")
        await remote.close()
        keys = [request.headers["idempotency-key"] for request in server.requests]
    assert len(keys) == len(set(keys)) == 2
    stored = await hall.producer.redis.hget(f"bull:{ref.queue}:{ref.id}", "returnvalue")
    assert json.loads(stored) == {"document_id": "water", "concepts": 2, "links": 1, "coverage": 1.0}


async def _quiet(step):
    return None


# ---- the tables, on both databases


@pytest.fixture(params=["sqlite", "postgres"])
async def store(request, tmp_path):
    sqlite = request.param == "sqlite"
    url = f"sqlite:///{tmp_path / 'tables.db'}" if sqlite else request.getfixturevalue("postgres_url")
    opened = open_store(url)
    await create_all(opened)
    yield opened
    await close(opened)


async def test_results_are_replaced_and_go_with_their_document(store):
    graph = await LocalProvider().concept_graph(
        (SAMPLES / "water-cycle.md").read_text(), key="k", on_progress=_quiet, deadline=float("inf")
    )
    async with begin(store) as tx:
        await db.add_document(tx, document_id="d", owner=OWNER, name="a\0\nb", blob="d", size=1)
        await db.save_graph(tx, "d", "first", graph)
        await db.save_graph(tx, "d", "second", graph)
        assert await db.graph(tx, "d", OWNER) == graph
        assert [row.name for row in await db.documents_of(tx, OWNER)] == ["ab"]
        assert not await db.delete_document(tx, "d", "mallory")
        assert await db.delete_document(tx, "d", OWNER)
        assert await db.graph(tx, "d", OWNER) is None
