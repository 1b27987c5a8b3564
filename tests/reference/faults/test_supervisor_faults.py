"""`studyhall worker --processes 2`: what dies is restarted, what is told to stop stops, nothing is left behind."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from harness.processes import alive
from harness.waiting import until
from studyhall.patterns.engine import ensure_redis

pytestmark = pytest.mark.fault


def start(spawn, redis_url, folder, **env):
    settings = {"REDIS_URL": redis_url, "STUDYHALL_GRACE_SECONDS": "3", **env}
    return spawn("studyhall", "worker", "--processes", 2, "--data-dir", folder / "data", env=settings)


def workers(supervisor):
    """Pids of every worker that ever reported itself ready, in that order."""
    started = [json.loads(line) for line in supervisor.lines() if '"event": "ready"' in line]
    return [line["pid"] for line in started]


async def ready(supervisor, number):
    return await until(
        lambda: workers(supervisor) if len(workers(supervisor)) >= number else [], 60, f"{number} workers ready"
    )


async def gone(pids, seconds, what):
    await until(lambda: not any(alive(pid) for pid in pids), seconds, what)


def descendants(pid):
    """Every process below this one, from /proc; none where there is no /proc."""
    pids = []
    if not Path("/proc").exists():
        return pids
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(stat[1]) == pid and stat[0] != "Z":
                pids += [int(entry.name), *descendants(int(entry.name))]
    return pids


@pytest.mark.slow
async def test_a_killed_worker_process_is_restarted_and_sigterm_ends_everything_with_exit_0(
    redis_url, tmp_path, spawn, figures
):
    supervisor = start(spawn, redis_url, tmp_path)
    victim, sibling = (await ready(supervisor, 2))[:2]
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    successor = (await ready(supervisor, 3))[2]
    seconds = time.monotonic() - began
    assert not alive(victim)
    assert alive(sibling), "its sibling goes on"
    assert alive(successor)
    assert any('"exit":-9' in line.replace(" ", "") for line in supervisor.lines()), "the death is in the log"
    everything = descendants(supervisor.pid) or [sibling, successor]
    assert {sibling, successor} <= set(everything)
    supervisor.terminate()
    assert await supervisor.exited(30) == 0
    await gone(everything, 10, "no process is left")
    figures("parent-death", name="restart", ready_again_seconds=round(seconds, 1))


async def test_sigterm_while_the_workers_still_start_is_exit_0_too(redis_url, tmp_path, spawn):
    """A worker that is half started cannot handle the signal: it dies of it, as asked."""
    supervisor = start(spawn, redis_url, tmp_path)
    pids = await until(lambda: descendants(supervisor.pid), 30, "the first worker was started")
    supervisor.terminate()
    assert await supervisor.exited(30) == 0
    await gone(pids, 10, "no process is left")


@pytest.mark.slow
async def test_a_killed_supervisor_takes_its_workers_and_their_embedded_server_along(tmp_path, spawn, figures):
    """The usual children of a killed parent go on forever, unseen: that is the naive twin."""
    naive = spawn.command(
        "python3",
        "-c",
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n",
    )
    orphan = int(await naive.line(""))
    naive.kill()
    naive_left = alive(orphan)
    assert naive_left, "the naive child outlives its parent"
    os.kill(orphan, signal.SIGKILL)

    supervisor = start(spawn, "", tmp_path)  # no REDIS_URL: the first process starts a server of its own
    pids = await ready(supervisor, 2)
    server = ensure_redis(tmp_path / "data", None)
    server_pid = server.pid
    server.stop()
    assert server_pid is not None
    everything = [server_pid, *(descendants(supervisor.pid) or pids)]
    assert all(alive(pid) for pid in everything)
    supervisor.kill()
    began = time.monotonic()
    await gone(everything, 40, "workers and server ended by themselves")
    figures(
        "parent-death",
        name="supervisor-killed",
        processes=len(everything),
        left_behind=sum(alive(pid) for pid in everything),
        seconds=round(time.monotonic() - began, 1),
        naive_left_behind=int(naive_left),
    )


@pytest.mark.slow
async def test_what_a_restart_cannot_fix_ends_at_once_with_exit_2(tmp_path, spawn):
    supervisor = start(spawn, "redis://127.0.0.1:1/0", tmp_path)
    assert await supervisor.exited(60) == 2
    assert any("REDIS_URL" in line for line in supervisor.lines())
