"""The limit: how often this Redis can run the scripts of a job's life if the client costs nothing.

The load comes from redis-benchmark (or valkey-benchmark), a C program; without it from a small client of our own.
"""

import re
import shutil
import subprocess
from typing import Any
from urllib.parse import urlsplit

import redis

from bench.figures import Column, Value, less
from bench.lab import Lab

from .bullmq_scripts import Command, Scripts, blast

CLIENTS = 50
PIPELINES = (1, 16)
ROUNDS = 1
TOOL = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")

TITLE = "What this Redis can do at most"
SENT_BY = TOOL.rpartition("/")[2] if TOOL else "a pipelining client of our own"
ABOUT = (
    f"BullMQ's own scripts sent by {SENT_BY} on {CLIENTS} connections, with one call and with 16 calls in flight on "
    "each. `add` is what adding one job costs Redis (addStandardJob), `work` is what working one off costs it "
    "(moveToFinished, which hands out the next job too; finished jobs are kept). The larger of the two rates is the "
    "limit that other figures are a share of."
)
COLUMNS = {
    "P1": Column("1 in flight", "calls/s"),
    "P16": Column("16 in flight", "calls/s"),
    "us": less("in Redis, per call", "µs"),
}


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    return run(lab.url, jobs=lab.scale(20_000, 100_000))


def run(url: str, *, jobs: int, tool: str | None = TOOL) -> dict[str, dict[str, Value]]:
    """On an empty Redis; leaves it empty."""
    rows: dict[str, dict[str, Value]] = {"add": {}, "work": {}}
    with redis.Redis.from_url(url, socket_timeout=60) as client:
        for pipeline in PIPELINES:
            client.flushall()
            scripts = Scripts(client, "ceiling")
            for name, (rate, micros) in {
                "add": _run(tool, url, client, scripts.add(), jobs, pipeline),
                "work": _work(tool, url, client, scripts, jobs, pipeline),
            }.items():
                rows[name][f"P{pipeline}"] = round(rate)
                rows[name].setdefault("us", round(micros, 1))
        client.flushall()
    return rows


def _work(
    tool: str | None, url: str, client: redis.Redis, scripts: Scripts, jobs: int, pipeline: int
) -> tuple[float, float]:
    """`jobs` jobs wait already; one more for each call in flight, so that the last call finds a job too."""
    in_flight = CLIENTS * pipeline
    blast(url, scripts.add(), in_flight, connections=1, pipeline=in_flight)
    blast(url, scripts.take(), in_flight, connections=1, pipeline=in_flight)
    done = _run(tool, url, client, scripts.finish(), jobs, pipeline)
    completed = client.zcard(scripts.key["completed"])
    if completed < jobs:  # redis-benchmark does not look at replies
        raise RuntimeError(f"only {completed} of {jobs} calls finished a job: the figure would be of refusals")
    return done


def _run(
    tool: str | None, url: str, client: redis.Redis, command: Command, count: int, pipeline: int
) -> tuple[float, float]:
    """Calls per second, and microseconds of Redis per call."""
    client.config_resetstat()
    if tool is None:
        rate = count / blast(url, command, count, connections=CLIENTS, pipeline=pipeline)
    else:
        rate = _redis_benchmark(tool, url, command, count, pipeline)
    stats: dict[str, Any] = client.info("commandstats")["cmdstat_evalsha"]
    return rate, float(stats["usec_per_call"])


def _redis_benchmark(tool: str, url: str, command: Command, count: int, pipeline: int) -> float:
    address = urlsplit(url)
    where = ["-h", str(address.hostname), "-p", str(address.port)]
    how = ["-c", str(CLIENTS), "-P", str(pipeline), "-n", str(count), "--csv"]
    argv = [word.encode() for word in (tool, *where, *how)] + command.argv
    out = subprocess.run(argv, capture_output=True, timeout=600, check=False)
    # The last line is "name","requests per second",…; the name holds the arguments, binary ones included.
    match = re.search(rb'"([0-9.]+)"(?:,"[0-9.]+")*\s*\Z', out.stdout)
    figures = re.findall(rb'"([0-9.]+)"', match[0]) if match else []
    if out.returncode or not figures:
        raise RuntimeError(f"{tool} failed: {out.stdout[-300:]!r} {out.stderr[-300:]!r}")
    return float(figures[0])
