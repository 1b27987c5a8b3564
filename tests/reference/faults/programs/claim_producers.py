"""Stores a blob and adds its job, until killed; --naive: the job first."""

import argparse
import asyncio
import os
from pathlib import Path

import uvloop

from harness.pipelines import full_producer
from studyhall.patterns.claim_check import Blobs, Claim
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.typed_jobs import JobTypes, Payload

QUEUE = "scans"


class Scan(Payload):
    image: Claim


def job_types(blobs=None):
    async def scan(ctx, payload: Scan):
        assert blobs is not None
        return {"size": len(await blobs.read(payload.image))}

    jobs = JobTypes()
    jobs.register(name="scan", payload=Scan, handler=scan, queue=QUEUE)
    return jobs


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--redis", required=True)
    parser.add_argument("--blobs", required=True)
    parser.add_argument("--start", type=int, required=True)
    parser.add_argument("--naive", action="store_true")
    options = parser.parse_args()
    blobs = Blobs(Path(options.blobs))
    producer = full_producer(job_types(), options.redis, timeout=20)
    print("ready", flush=True)
    for number in range(options.start, options.start + 10**6):
        content = b"%d " % number * 20_000
        if options.naive:
            claim = await _naive(Path(options.blobs), producer, number, content)
        else:
            claim = await blobs.put(content, (QUEUE, f"scan.{number}"))
            await asyncio.sleep(0.05)  # so that most kills fall between the two
            await producer.enqueue(JobRequest("scan", {"image": claim}, key=str(number)))


async def _naive(folder, producer, number, content):
    import hashlib

    ref = f"{QUEUE}/scan.{number}/blob"
    claim = Claim(ref=ref, size=len(content), sha256=hashlib.sha256(content).hexdigest())
    await producer.enqueue(JobRequest("scan", {"image": claim}, key=str(number)))
    await asyncio.sleep(0.05)  # so that most kills fall between the two
    path = folder / ref
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        for start in range(0, len(content), 4096):
            out.write(content[start : start + 4096])
        out.flush()
        os.fsync(out.fileno())


if __name__ == "__main__":
    uvloop.run(main())
