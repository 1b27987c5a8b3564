"""The claim check: small jobs, whole blobs, and a sweep that takes what nobody needs and nothing else."""

import asyncio
import os
import time

import pytest

from harness.pipelines import JobSetup
from harness.workers import queue_at
from studyhall.patterns import dead_letter
from studyhall.patterns.claim_check import (
    BlobDamaged,
    BlobMissing,
    Blobs,
    BlobTooLarge,
    Claim,
    PayloadTooLarge,
    check_size,
    needed_by_jobs,
)
from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.dead_letter import needed_by_dead_letters
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, Payload

OWNER = ("scans", "scan.k")


class Scan(Payload):
    image: Claim
    fail: bool = False


class Inline(Payload):
    image: str


def scan_jobs(blobs, read):
    async def scan(ctx, payload: Scan):
        read.append(await blobs.read(payload.image))
        if payload.fail:
            raise Permanent("unreadable")
        return {"size": payload.image.size}

    async def inline(ctx, payload: Inline):
        return None

    jobs = JobTypes()
    jobs.register(name="scan", payload=Scan, handler=scan, queue="scans")
    jobs.register(name="inline", payload=Inline, handler=inline, queue="scans")
    return jobs


def age(folder, seconds=7200):
    """Make everything in the folder look old."""
    for path in sorted(folder.rglob("*"), reverse=True):
        os.utime(path, (time.time() - seconds, time.time() - seconds))


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (lambda path: path.unlink(), BlobMissing),
        (lambda path: path.write_bytes(b"x" * path.stat().st_size), BlobDamaged),
        (lambda path: os.truncate(path, 10), BlobDamaged),
    ],
    ids=["deleted", "altered", "cut"],
)
async def test_a_blob_that_is_not_what_was_stored_fails_its_job_for_good(redis_url, tmp_path, harm, error):
    blobs, read = Blobs(tmp_path / "blobs"), list[bytes]()
    async with JobSetup.open(redis_url, tmp_path, scan_jobs(blobs, read)) as setup:
        claim = await blobs.put(b"page" * 1000, OWNER)
        harm(tmp_path / "blobs" / claim.ref)
        request = JobRequest("scan", {"image": claim}, key="k")
        await setup.producer.enqueue(request)
        async with setup.working():
            assert await setup.ended(request) == ["failed"]
        job = await setup.job(request)
        assert job.failedReason.startswith(error.__name__)
        assert (job.attemptsMade, read) == (1, [])


@pytest.mark.parametrize(
    "ref", ["../../etc/passwd", "a/../b", "/etc/passwd", "a/b/..", "a/b", "", "a/b/c/d", "scans/x/.y"]
)
async def test_a_reference_that_leads_elsewhere_is_refused(tmp_path, ref):
    with pytest.raises(BlobMissing):
        await Blobs(tmp_path).read(Claim(ref=ref, size=1, sha256="0" * 64))


async def test_owners_that_are_not_file_names_are_refused(tmp_path):
    for owner in (("..", "x"), ("a/b", "x"), ("a", ""), ("a", "x" * 300)):
        with pytest.raises(ValueError, match="owner"):
            await Blobs(tmp_path).put(b"x", owner)


async def test_a_blob_over_the_stores_limit_is_refused(tmp_path):
    with pytest.raises(BlobTooLarge, match="101 bytes"):
        await Blobs(tmp_path, max_bytes=100).put(b"x" * 101, OWNER)
    assert list(tmp_path.iterdir()) == []


def test_the_limit_is_in_bytes_as_stored():
    check_size({"a": "x" * 100}, 108)
    with pytest.raises(PayloadTooLarge, match=r"Blobs\.put"):
        check_size({"a": "x" * 101}, 108)
    with pytest.raises(PayloadTooLarge):
        check_size({"a": "ü" * 20}, 108)  # six bytes each in JSON


async def test_the_sweep_takes_what_nobody_needs_and_nothing_else(redis_url, tmp_path):
    folder = tmp_path / "blobs"
    blobs, read = Blobs(folder), list[bytes]()
    async with JobSetup.open(redis_url, tmp_path, scan_jobs(blobs, read)) as setup:
        needed = needed_by_jobs(setup.producer.redis, needed_by_dead_letters(setup.store))

        async def add(key, **fields):
            claim = await blobs.put(key.encode(), ("scans", f"scan.{key}"))
            request = JobRequest("scan", {"image": claim, **fields}, key=key)
            await setup.producer.enqueue(request)
            return request, folder / claim.ref

        done, done_blob = await add("done")
        dead, dead_blob = await add("dead", fail=True)
        async with setup.working():
            assert await setup.ended(done, dead) == ["completed", "failed"]
        await dead_letter.sweep(["scans"], setup.producer.redis, setup.store)
        _waiting, waiting_blob = await add("waiting")
        gone, gone_blob = await add("gone")
        await (await setup.job(gone)).remove()
        orphan = folder / (await blobs.put(b"its producer died before the add", ("scans", "scan.never"))).ref
        half = orphan.with_suffix(".part")
        half.write_bytes(b"its producer died while writing")
        young_orphan = folder / (await blobs.put(b"young", ("scans", "scan.next"))).ref
        everything = [done_blob, dead_blob, waiting_blob, gone_blob, orphan, half, young_orphan]

        assert (await blobs.sweep("scans", needed)).deleted == 0, "all of it is younger than the grace"
        age(folder)
        os.utime(young_orphan)
        swept = await blobs.sweep("scans", needed)
        left = [path for path in everything if path.exists()]
        assert left == [done_blob, dead_blob, waiting_blob, young_orphan], "kept job, dead letter, waiting job, young"
        assert (swept.kept, swept.deleted) == (3, 3)
        assert swept.freed > 0

        await (await setup.job(done)).remove()
        age(folder)
        assert (await blobs.sweep("scans", needed)).deleted == 2, "its owner left, and the young one got old"
        age(folder)
        await blobs.sweep("scans", needed)
        assert sorted(path.name for path in (folder / "scans").iterdir()) == ["scan.dead", "scan.waiting"]

        [letter] = await dead_letter.list_dead_letters(setup.store)
        await dead_letter.replay(setup.store, setup.producer.redis, letter.id)
        assert (await blobs.sweep("scans", needed)).deleted == 0, "a replayed letter finds its blob"


async def test_the_sweep_leaves_the_blob_of_a_job_that_runs(redis_url, tmp_path):
    blobs, reading, swept = Blobs(tmp_path / "blobs"), asyncio.Event(), asyncio.Event()
    read = []

    async def scan(ctx, payload: Scan):
        reading.set()
        async with asyncio.timeout(30):
            await swept.wait()
        read.append(await blobs.read(payload.image))

    jobs = JobTypes()
    jobs.register(name="scan", payload=Scan, handler=scan, queue="scans")
    async with JobSetup.open(redis_url, tmp_path, jobs) as setup:
        claim = await blobs.put(b"slowly", ("scans", "scan.slow"))
        request = JobRequest("scan", {"image": claim}, key="slow")
        await setup.producer.enqueue(request)
        async with setup.working():
            async with asyncio.timeout(30):
                await reading.wait()
            age(tmp_path / "blobs")
            while_running = await blobs.sweep("scans", needed_by_jobs(setup.producer.redis))
            swept.set()
            assert await setup.ended(request) == ["completed"]
    assert (while_running.kept, while_running.deleted, read) == (1, 0, [b"slowly"])


async def test_a_sweep_that_cannot_ask_deletes_nothing(tmp_path):
    blobs = Blobs(tmp_path)
    claim = await blobs.put(b"x", OWNER)
    age(tmp_path)

    async def away(_refs):
        raise ConnectionError("redis is away")

    with pytest.raises(ConnectionError):
        await blobs.sweep("scans", away)
    assert await blobs.read(claim) == b"x"


@pytest.mark.slow
async def test_putting_while_sweeping_never_loses_a_blob(tmp_path):
    """The folders are old and empty: the sweep removes them just when a blob is about to be put there."""
    blobs, number = Blobs(tmp_path), 300
    for n in range(number):
        (tmp_path / "scans" / f"scan.{n}").mkdir(parents=True)
    age(tmp_path)
    claims = {}

    async def nobody(_refs):
        return set()

    async def put():
        for n in range(number):
            claims[n] = await blobs.put(b"x%d" % n, ("scans", f"scan.{n}"))

    async def sweep():
        while len(claims) < number:
            await blobs.sweep("scans", nobody, grace=3600, page=20)

    await asyncio.gather(put(), sweep(), sweep())
    for n, claim in claims.items():
        assert await blobs.read(claim) == b"x%d" % n


async def test_large_payloads_fill_redis_where_claims_do_not(make_redis, tmp_path, scale, figures):
    server = make_redis()
    jobs, size = scale(40, 200), 1_000_000
    text = "x" * size

    def memory():
        with server.client() as client:
            return int(client.info("memory")["used_memory"])

    empty = memory()
    async with queue_at(server.url, "naive") as queue:
        for n in range(jobs):
            await queue.add("inline", {"image": text}, {"jobId": f"n.{n}"})
    naive = memory() - empty
    with server.client() as client:
        client.flushall()
    empty = memory()
    blobs = Blobs(tmp_path / "blobs")
    async with JobSetup.open(server.url, tmp_path, scan_jobs(blobs, [])) as setup:
        with pytest.raises(PayloadTooLarge, match="limit is 65,536"):
            await setup.producer.enqueue(JobRequest("inline", {"image": text}, key="k"))
        for n in range(jobs):
            claim = await blobs.put(text.encode(), ("scans", f"scan.{n}"))
            await setup.producer.enqueue(JobRequest("scan", {"image": claim}, key=str(n)))
    ours = memory() - empty
    assert naive > jobs * size * 0.9, "the naive twin put no weight on Redis: nothing proven"
    assert ours < naive / 50
    figures(
        "claim-check",
        name="redis-memory",
        jobs=jobs,
        payload_bytes=size,
        naive_redis_bytes_per_job=naive // jobs,
        redis_bytes_per_job=max(ours, 0) // jobs,
    )
