"""The limit: how often this Redis can run the scripts of a job's life when the client costs nothing.

Two figures, each with one command per round trip on 50 connections and with 16 in flight on each:

- `add`: BullMQ's addStandardJob, what one `queue.add` costs Redis;
- `work`: BullMQ's moveToFinished that also hands out the next job, what one processed job costs Redis.

The load comes from redis-benchmark (or valkey-benchmark), a C program; without it from a small client of our
own, and the figures say which. Throughput elsewhere in the report is stated as a share of these.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from typing import Any
from urllib.parse import urlsplit

import redis

from .bullmq_scripts import Command, Scripts, blast

__all__ = ["measure", "share", "table"]

CLIENTS = 50
PIPELINES = (1, 16)


def measure(url: str, *, jobs: int = 20_000) -> dict[str, Any]:
    """Run on a Redis of its own: it is flushed."""
    tool = shutil.which("redis-benchmark") or shutil.which("valkey-benchmark")
    figures: dict[str, Any] = {
        "tool": tool.rpartition("/")[2] if tool else "own client",
        "clients": CLIENTS,
        "jobs": jobs,
    }
    with redis.Redis.from_url(url, socket_timeout=60) as client:
        for pipeline in PIPELINES:
            client.flushall()
            scripts = Scripts(client, "ceiling")
            figures[f"P{pipeline}"] = {
                "add": _run(tool, url, client, scripts.add(), jobs, pipeline),
                "work": _work(tool, url, client, scripts, jobs, pipeline),
            }
        client.flushall()
    return figures


def share(figures: dict[str, Any], rate: float, kind: str = "work") -> float:
    """`rate` as a share of the most this Redis does of `kind` ("add" or "work")."""
    return rate / max(figures[f"P{pipeline}"][kind]["per_second"] for pipeline in PIPELINES)


def table(figures: dict[str, Any]) -> str:
    lines = [
        "| script, by "
        + figures["tool"]
        + f", {figures['clients']} clients | in flight per client | calls/s | µs in Redis per call |",
        "|---|---:|---:|---:|",
    ]
    names = {"add": "add a job (addStandardJob)", "work": "finish a job and take the next (moveToFinished)"}
    for kind, name in names.items():
        for pipeline in PIPELINES:
            one = figures[f"P{pipeline}"][kind]
            lines.append(f"| {name} | {pipeline} | {one['per_second']:,.0f} | {one['redis_us']:.0f} |")
    return "\n".join(lines)


def _work(
    tool: str | None, url: str, client: redis.Redis, scripts: Scripts, jobs: int, pipeline: int
) -> dict[str, float]:
    """`jobs` jobs wait already; as many more as can be in flight keep the last call from finding none."""
    in_flight = CLIENTS * pipeline
    blast(url, scripts.add(), in_flight, connections=1, pipeline=in_flight)
    blast(url, scripts.take(), in_flight, connections=1, pipeline=in_flight)
    done = _run(tool, url, client, scripts.finish(), jobs, pipeline)
    completed = client.zcard(scripts.key["completed"])
    if completed < jobs:  # redis-benchmark does not look at replies
        raise RuntimeError(
            f"only {completed} of {jobs} calls finished a job: the figure would be of refusals"
        )
    return done


def _run(
    tool: str | None, url: str, client: redis.Redis, command: Command, count: int, pipeline: int
) -> dict[str, float]:
    client.config_resetstat()
    if tool is None:
        rate = count / blast(url, command, count, connections=CLIENTS, pipeline=pipeline)
    else:
        rate = _redis_benchmark(tool, url, command, count, pipeline)
    stats: dict[str, Any] = client.info("commandstats")["cmdstat_evalsha"]
    return {"per_second": round(rate), "redis_us": float(stats["usec_per_call"])}


def _redis_benchmark(tool: str, url: str, command: Command, count: int, pipeline: int) -> float:
    address = urlsplit(url)
    where = ["-h", str(address.hostname), "-p", str(address.port)]
    how = ["-c", str(CLIENTS), "-P", str(pipeline), "-n", str(count), "--csv"]
    argv = [word.encode() for word in (tool, *where, *how)] + command.argv
    out = subprocess.run(argv, capture_output=True, timeout=600, check=False)
    # The last line is "name","requests per second",…; the name holds the arguments, binary ones included.
    found = re.search(rb'"([0-9.]+)"(?:,"[0-9.]+")*\s*\Z', out.stdout)
    figures = re.findall(rb'"([0-9.]+)"', found[0]) if found else []
    if out.returncode or not figures:
        raise RuntimeError(f"{tool} failed: {out.stdout[-300:]!r} {out.stderr[-300:]!r}")
    return float(figures[0])
