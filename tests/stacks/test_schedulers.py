"""Two processes tick: the row (schedule, slot) lets one job per slot through. The same file without it does not."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psycopg
import pytest

from guide import stacks
from harness.missing import missing

pytestmark = pytest.mark.slow

SOURCE = stacks.SERVICES / "schedulers"
# What decides, in each file; the naive twin does not ask.
CLAIMS = {
    "slots.py": ('if claim(db, "manifest", slot):', "if True:"),
    "cron.mjs": ("if (row.rowCount === 1)", "if (true)"),
    "main.go": ("n == 1 {", "n < 2 {"),
}
TABLES = (
    "CREATE TABLE slots (schedule TEXT, slot BIGINT, PRIMARY KEY (schedule, slot))",
    "CREATE TABLE jobs (slot BIGINT)",
)


def naive(folder):
    for name, (asks, does_not) in CLAIMS.items():
        text = (folder / name).read_text()
        assert text.count(asks) == 1
        (folder / name).write_text(text.replace(asks, does_not))


def installed(scheduler, folder):
    """Its command, ready to run in this folder."""
    built = stacks.BUILT / "schedulers" / scheduler
    try:
        if scheduler in ("aps3", "aps4"):
            requirements = "requirements.txt" if scheduler == "aps3" else "requirements-4.txt"
            stacks.python_with(SOURCE / requirements, built)
            return [str(built / "bin" / "python"), f"{scheduler}.py"]
    except stacks.NotHere as error:
        missing("APScheduler", str(error))
    tool = {"node-cron": "npm", "robfig": "go"}[scheduler]
    if shutil.which(tool) is None:
        missing(tool, f"install {'Node.js 20 or later' if tool == 'npm' else 'Go 1.24 or later'}")
    built.mkdir(parents=True, exist_ok=True)
    if tool == "npm":
        if not (built / "node_modules" / "node-cron").is_dir():
            for name in ("package.json", "package-lock.json", ".npmrc"):
                shutil.copy(SOURCE / name, built)
            subprocess.run(["npm", "ci", "--ignore-scripts"], cwd=built, check=True, timeout=300)
        (folder / "node_modules").symlink_to(built / "node_modules")
        return ["node", "cron.mjs"]
    subprocess.run(["go", "build", "-o", "clock", "."], cwd=folder, check=True, timeout=300)
    return [str(folder / "clock")]


@contextlib.contextmanager
def two_of(command, folder, store):
    environment = {**os.environ, "STORE": store, "PERIOD": "1"}
    running = [subprocess.Popen(command, cwd=folder, env=environment) for _ in range(2)]
    try:
        yield
        assert [process.poll() for process in running] == [None, None]
    finally:
        for process in running:
            process.kill()
            process.wait()


def until(enough, limit=90):
    deadline = time.monotonic() + limit
    while not enough():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def connected(url):
    if url.startswith("postgresql"):
        return psycopg.connect(url)
    db = sqlite3.connect(url, timeout=60)
    # The test reads while they write.
    db.execute("PRAGMA journal_mode = WAL")
    return db


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(SOURCE, tmp_path / "clock"))


@pytest.mark.parametrize("twin", ["kept", "naive"])
@pytest.mark.parametrize(
    "scheduler",
    [
        "aps3",
        pytest.param("aps4", marks=pytest.mark.full),
        pytest.param("node-cron", marks=pytest.mark.needs_postgres),
        pytest.param("robfig", marks=pytest.mark.needs_postgres),
    ],
)
def test_two_processes_make_one_job_per_slot_and_their_naive_twin_two(scheduler, twin, folder, request):
    if twin == "naive":
        naive(folder)
    command = installed(scheduler, folder)
    if "aps" in scheduler:
        url = str(folder / "shop.db")
    else:
        url = request.getfixturevalue("postgres_url").partition("?")[0] + "?sslmode=disable"
    with contextlib.closing(connected(url)) as db:
        for statement in TABLES:
            db.execute(statement)
        db.commit()

        def made():
            rows = Counter(slot for (slot,) in db.execute("SELECT slot FROM jobs"))
            db.commit()
            return rows

        with two_of(command, folder, url):
            if twin == "naive":
                until(lambda: max(made().values(), default=0) > 1)
            else:
                until(lambda: len(made()) >= 4)
        assert twin == "naive" or set(made().values()) == {1}


def test_a_cron_job_that_kubernetes_starts_twice_makes_one_job(folder):
    environment = {**os.environ, "STORE": str(folder / "shop.db"), "PERIOD": "86400"}
    subprocess.run([sys.executable, "-c", "import slots; slots.create()"], cwd=folder, env=environment, check=True)
    started = [subprocess.Popen([sys.executable, "slots.py"], cwd=folder, env=environment) for _ in range(4)]
    assert [process.wait(60) for process in started] == [0, 0, 0, 0]
    with contextlib.closing(sqlite3.connect(environment["STORE"])) as db:
        slots = [slot for (slot,) in db.execute("SELECT slot FROM jobs")]
    # midnight may come in between
    assert len(slots) == len(set(slots))
    assert 1 <= len(slots) <= 2
