"""Where the worker's time goes, by part, as py-spy samples it."""

import linecache
import os
import re
import signal
import time
from collections import Counter

from bench.figures import Column, Value
from bench.lab import ENVS, OURS, Lab, Peer, install_python
from harness.processes import alive

TITLE = "Where our worker's time goes"
ABOUT = (
    "No-op jobs, one process, 500 samples a second by py-spy; share of the samples in which the process computed, by "
    "the innermost Python function. What C code does (sockets, SQLite, HMAC, JSON) counts for the part that called it."
)
COLUMNS = {
    name: Column(f"{label}, share of its CPU time", "%", "")
    for name, label in (("queuesmith", "full pipeline"), ("queuesmith-bare", "bare"))
}
ROUNDS = 1
PY_SPY = "py-spy==0.4.3"
# part -> its files; the first that fits
PARTS = {
    "the benchmark's own record": r"contest\.py",
    "SQLite: SQLAlchemy, aiosqlite": r"sqlalchemy/|aiosqlite/|concurrent/futures|/(store|open_store|group_commit)\.py",
    "idempotency": r"/idempotency/|/inbox\.py",
    "pipeline": r"/(pipeline|deadline|stall_budget|retry|cancel|checkpoint|progress|backpressure|store_gate)\.py"
    r"|/core/(execution|job|clock|errors|failures)\.py|<string>",
    "signature and validation": r"pydantic|hmac\.py|/(typed_jobs|signed_payload|claim_check|plain_json)\.py",
    "log and metrics": r"/logging/|prometheus_client/|opentelemetry/|/observability/|/(tracing|redaction)\.py",
    "Redis client and its sockets": r"/redis/|/(autopipeline|connections)\.py|asyncio/streams\.py",
    "worker and locks": r"/bullmq_worker/|/(parent_death|priority)\.py|msgpack",
    "BullMQ library": r"/bullmq/",
    "JSON": r"/json/",
    "event loop": r"asyncio/|uvloop|contextlib|_weakrefset",
}
REST = "the rest"
START = re.compile(r"importlib|argparse")  # not part of a job
WAITING = re.compile(r"\.(get|wait|acquire)\(")  # idle threads, which py-spy takes for busy
FRAME = re.compile(r"\((?P<file>[^()]*):(?P<line>\d+)\)$")


def measure(lab: Lab) -> dict[str, dict[str, Value]]:
    rows: dict[str, dict[str, Value]] = {part: {} for part in (*PARTS, REST)}
    tool = ENVS / "py-spy" / "bin" / "py-spy"
    if not tool.exists():
        install_python(ENVS / "py-spy", PY_SPY)
    for peer in lab.peers:
        if peer.id in OURS:
            for part, share in profile(lab, peer, str(tool)).items():
                rows[part][peer.id] = round(100 * share, 1)
    return {part: row for part, row in rows.items() if any(row.values())}


def profile(lab: Lab, peer: Peer, tool: str) -> dict[str, float]:
    """Part -> its share of the samples."""
    jobs = int(peer.pace * lab.scale(3, 8))
    with lab.bench(peer) as bench:
        bench.enqueue(jobs, bulk=True)
        stacks = bench.folder / "stacks"
        record = [tool, "record", "--rate", "500", "--full-filenames", "--format", "raw", "--output", str(stacks), "--"]
        workers = bench.start(under=record)
        bench.finished(jobs, workers)
        sampler, *sampled = workers.pids()
        for pid in sampled:  # py-spy writes when what it watches has ended
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while alive(sampler) and time.monotonic() < deadline:
            time.sleep(0.05)
        return shares(stacks.read_text())


def shares(stacks: str) -> dict[str, float]:
    """Of py-spy's lines "outer (file:line);…;inner (file:line) samples"."""
    samples: Counter[str] = Counter()
    for text in stacks.splitlines():
        stack, _, count = text.rpartition(" ")
        frame = FRAME.search(stack.rpartition(";")[2])
        if frame is None or START.search(stack):
            continue
        if not WAITING.search(linecache.getline(frame["file"], int(frame["line"]))):
            samples[part_of(frame["file"])] += int(count)
    total = sum(samples.values()) or 1
    return {part: samples[part] / total for part in (*PARTS, REST)}


def part_of(file: str) -> str:
    return next((part for part, files in PARTS.items() if re.search(files, file)), REST)
