"""The guided tour as a newcomer runs it: it passes, and whatever happens it leaves no process behind."""

import os
import signal
import sys
import time
import uuid
from pathlib import Path

import pytest

from harness.processes import Spawned, alive
from harness.waiting import until

pytestmark = pytest.mark.fault


class Tour:
    def __init__(self, spawn, folder):
        self._mark, self.folder = f"QUEUESMITH_TOUR={uuid.uuid4().hex}", folder
        name, _, value = self._mark.partition("=")
        env = {"REDIS_URL": "", "DATABASE_URL": "", "TMPDIR": str(folder), "COLUMNS": "120", name: value}
        # Not forked: /proc must show its environment.
        self.process: Spawned = spawn.command(sys.executable, "-m", "studyhall", "demo", env=env)

    def running(self):
        """Every process that inherited the tour's environment, whatever session it moved to (Linux)."""
        pids = []
        for entry in Path("/proc").iterdir() if Path("/proc").exists() else ():
            if entry.name.isdigit():
                try:
                    inherited = self._mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                except OSError:
                    continue
                if inherited and alive(int(entry.name)):
                    pids.append(int(entry.name))
        return pids

    async def nothing_left(self, seconds=30):
        await until(lambda: not self.running(), seconds, "no process of the tour is left")


@pytest.mark.slow
async def test_the_tour_passes_and_leaves_nothing_behind(tmp_path, spawn, figures):
    began = time.monotonic()
    tour = Tour(spawn, tmp_path)
    await tour.process.line("Worker 1 runs", 60)
    assert len(tour.running()) >= 3 or not Path("/proc").exists(), "tour, worker, server"
    assert await tour.process.exited(240) == 0, str(tour.process)
    out = "\n".join(tour.process.lines())
    assert "SIGKILL to worker 1" in out
    assert "Nothing was lost, nothing was done twice." in out
    await tour.nothing_left()
    assert list(tmp_path.glob("studyhall-*")) == [], "its data directory is gone"
    seconds, left = round(time.monotonic() - began), len(tour.running())
    figures("pipeline", name="tour", seconds=seconds, left_behind=left)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "sigkill"])
async def test_a_tour_that_is_stopped_in_the_middle_leaves_no_process(tmp_path, spawn, number):
    tour = Tour(spawn, tmp_path)
    await tour.process.line("Uploading", 60)
    busy = tour.running()
    os.kill(tour.process.pid, number)
    code = await tour.process.exited(30)
    await tour.nothing_left()
    assert len(busy) >= 3 or not Path("/proc").exists(), "there was something to leave behind"
    if number is signal.SIGINT:
        assert code == 130
        assert "Traceback" not in "\n".join(tour.process.lines())
        assert list(tmp_path.glob("studyhall-*")) == []
