"""No-op jobs per second: BullMQ's stock Python worker, ReliableWorker, and Node's worker, on one Redis.

    .venv/bin/python bench/worker_throughput.py [--jobs 10000] [--rounds 3] [--concurrency 50] [--json FILE]

Every measurement is a fresh process; the contestants take turns, so that a noisy neighbour hits all of them,
and the medians are compared. The jobs are added beforehand; the clock runs from the first job's start to the
last one's completion, both as seen by the worker itself.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "reference"), str(ROOT / "tests")]

NODE_WORKER = """
import { Worker } from "bullmq";
const [port, queue, jobs, concurrency] = process.argv.slice(2);
let done = 0, started;
const worker = new Worker(queue, async () => { started ??= performance.now(); return null; },
  { connection: { host: "127.0.0.1", port: +port, maxRetriesPerRequest: null }, concurrency: +concurrency });
worker.on("completed", async () => {
  if (++done < +jobs) return;
  console.log(JSON.stringify({ seconds: (performance.now() - started) / 1000 }));
  process.exit(0);
});
"""


async def fill(url: str, queue: str, jobs: int) -> None:
    from bullmq import Queue

    from studyhall.patterns.connections import events_client

    client = events_client(url)
    await client.flushall()
    target = Queue(queue, {"connection": client})
    for first in range(0, jobs, 500):
        batch = [{"name": "noop", "data": {"i": i}} for i in range(first, min(first + 500, jobs))]
        await target.addBulk(batch)
    await target.close()


async def measure(kind: str, url: str, queue: str, jobs: int, concurrency: int) -> float:
    done, times = asyncio.Event(), [0.0]
    count = 0

    async def noop(job: Any, token: str) -> None:
        if not times[0]:
            times[0] = time.perf_counter()

    def completed(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == jobs:
            times.append(time.perf_counter())
            done.set()

    if kind.startswith("stock"):
        from bullmq import Worker

        worker: Any = Worker(queue, noop, {"connection": url, "concurrency": concurrency, "autorun": False})
        worker.on("completed", completed)
        running = asyncio.create_task(worker.run())
        await done.wait()
        await worker.close()
    else:
        from studyhall.patterns.bullmq_worker import ReliableWorker

        worker = ReliableWorker(queue, noop, url=url, concurrency=concurrency)
        worker.on("completed", completed)
        running = asyncio.create_task(worker.run())
        await done.wait()
        await worker.drain(5)
    await asyncio.wait({running}, timeout=5)
    return times[1] - times[0]


def child(args: argparse.Namespace) -> None:
    work = measure(args.child, args.url, args.queue, args.jobs, args.concurrency)
    if args.child.endswith("uvloop"):
        import uvloop

        seconds = uvloop.run(work)
    else:
        seconds = asyncio.run(work)
    print(json.dumps({"seconds": seconds}), flush=True)
    os._exit(0)  # the stock worker may leave tasks behind that never end


def once(kind: str, server: Any, args: argparse.Namespace, node_home: Path | None) -> float:
    queue = f"bench-{kind.replace(' ', '-')}"
    asyncio.run(fill(server.url, queue, args.jobs))
    if kind == "node":
        assert node_home is not None
        script = node_home / "bench-worker.mjs"
        script.write_text(NODE_WORKER)
        argv = ["node", str(script), str(server.port), queue, str(args.jobs), str(args.concurrency)]
    else:
        argv = [sys.executable, __file__, "--child", kind, "--url", server.url, "--queue", queue]
        argv += ["--jobs", str(args.jobs), "--concurrency", str(args.concurrency)]
    out = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    if out.returncode or not out.stdout.strip():
        raise SystemExit(f"{kind} failed:\n{out.stdout}\n{out.stderr}")
    return float(args.jobs) / float(json.loads(out.stdout.strip().splitlines()[-1])["seconds"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=10000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, default=50)
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench" / "worker_throughput.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--queue", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)

    import redis

    from harness.node import install_bullmq
    from harness.redis import RedisServer

    node_home = install_bullmq()
    kinds = ["stock", "stock uvloop", "reliable", "reliable uvloop", *(["node"] if node_home else [])]
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    server = RedisServer.start()
    try:
        with server.client() as client:
            version = str(client.info("server")["redis_version"])
        for turn in range(args.rounds):
            for kind in kinds:
                rates[kind].append(once(kind, server, args, node_home))
                print(
                    f"round {turn + 1}: {kind:16} {rates[kind][-1]:8,.0f} jobs/s", file=sys.stderr, flush=True
                )
    finally:
        server.stop()

    medians = {kind: statistics.median(values) for kind, values in rates.items()}
    report = {
        "jobs": args.jobs,
        "concurrency": args.concurrency,
        "rounds": args.rounds,
        "versions": {"python": sys.version.split()[0], "redis-py": redis.__version__, "server": version},
        "cpus": os.cpu_count(),
        "jobs_per_second": {kind: [round(value) for value in values] for kind, values in rates.items()},
        "median": {kind: round(value) for kind, value in medians.items()},
        "times_stock": round(medians["reliable"] / medians["stock"], 2),
        "times_stock_uvloop": round(medians["reliable uvloop"] / medians["stock uvloop"], 2),
        "times_node": round(medians["reliable"] / medians["node"], 2) if node_home else None,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{'worker':18}{'median jobs/s':>14}   all rounds")
    for kind, value in sorted(medians.items(), key=lambda item: item[1]):
        print(f"{kind:18}{value:14,.0f}   {', '.join(f'{rate:,.0f}' for rate in rates[kind])}")
    node = f", {report['times_node']}x Node" if node_home else " (Node.js is not installed)"
    uvloop = f"{report['times_stock_uvloop']}x with uvloop on both sides"
    print(f"ReliableWorker: {report['times_stock']}x stock ({uvloop}){node}; written to {args.json}")


if __name__ == "__main__":
    main()
