"""The `studyhall` command as people and scripts use it: what it prints, and how it exits."""

import asyncio
import io
import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from harness.ports import free_port
from harness.processes import ROOT
from harness.waiting import until_sync
from studyhall import cli, cli_documents
from studyhall.app import open_app
from studyhall.patterns.core.connections import producer_client
from studyhall.settings import load
from studyhall.submissions import replace_file

SAMPLES = ROOT / "reference" / "samples"
Command = Callable[..., Any]


class Ran:
    """Exit code and output of one command."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def studyhall(redis_url, tmp_path, monkeypatch, capsys):
    """`studyhall("submit", path)`: what the command does, in this process, with its exit code."""
    for name in ("DATABASE_URL", "STUDYHALL_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*args, data_dir=True):
        where = ["--data-dir", str(tmp_path / "data")] if data_dir else []
        monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))  # to every question: no
        monkeypatch.setattr(sys, "argv", ["studyhall", *map(str, args), *where])
        capsys.readouterr()
        code = 0
        try:
            cli.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        shown = capsys.readouterr()
        return Ran(code, shown.out, shown.err)

    return run


def test_the_ready_line_of_a_worker_names_its_server_without_the_password(spawn, make_redis, tmp_path):
    server = make_redis(requirepass="a-very-secret-word")
    env = {"REDIS_URL": server.url, "STUDYHALL_GRACE_SECONDS": "0"}
    started = spawn("studyhall", "worker", "--processes", 1, "--data-dir", tmp_path, env=env)
    ready = json.loads(started.line_sync('"ready"', 60))
    assert ready["redis"] == f"redis://127.0.0.1:{server.port}/0"
    started.terminate()
    started.wait(30)
    assert "a-very-secret-word" not in started.log.read_text()


def test_what_a_command_writes_is_for_its_user_alone(tmp_path, monkeypatch):
    """A fresh folder, the usual umask, nothing configured: database, uploads, keys and the embedded server."""
    monkeypatch.delenv("REDIS_URL", raising=False)
    data, sample = tmp_path / "data", next(SAMPLES.glob("*.md"))
    command = [sys.executable, "-m", "studyhall", "submit", str(sample), "--data-dir", str(data)]
    subprocess.run(["sh", "-c", 'umask 022; exec "$@"', "sh", *command], check=True, timeout=120)
    written = [data, *data.rglob("*")]
    assert {"studyhall.db", "signing.key", "blobs"} <= {path.name for path in written}
    assert any(path.is_file() for path in (data / "blobs").rglob("*"))
    open_to_others = [path for path in written if path.exists() and stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert not open_to_others


def worker(spawn, redis_url, tmp_path):
    env = {"REDIS_URL": redis_url, "STUDYHALL_SWEEP_SECONDS": "0.3"}
    started = spawn("studyhall", "worker", "--processes", 1, "--data-dir", tmp_path / "data", env=env)
    started.line_sync('"ready"', 60)
    return started


def test_help_names_every_command_and_each_has_its_own(studyhall):
    top = studyhall("--help", data_dir=False)
    assert top.code == 0
    for name in ("worker", "submit", "status", "dlq", "cleanup", "demo"):
        assert name in top.out
        assert studyhall(name, "--help", data_dir=False).code == 0
    assert studyhall(data_dir=False).code in (0, 2), "no arguments: the help"
    assert studyhall("sbmit", data_dir=False).code == 2


def test_status_of_nothing_says_what_to_do_next(studyhall):
    ran = studyhall("status")
    assert (ran.code, "studyhall submit" in ran.out) == (0, True)
    assert studyhall("status", "--json").json == []


def test_submit_refuses_what_it_cannot_take(studyhall, tmp_path, monkeypatch):
    missing = studyhall("submit", tmp_path / "nowhere.md")
    assert (missing.code, "does not exist" in missing.err) == (2, True)
    assert studyhall("submit", tmp_path).code == 2, "a folder is not a document"
    huge = tmp_path / "huge.md"
    huge.write_text("word " * 1000)
    monkeypatch.setenv("STUDYHALL_MAX_DOCUMENT_BYTES", "1000")
    refused = studyhall("submit", huge)
    assert (refused.code, "5,000 bytes, the limit is 1,000" in refused.err) == (1, True)
    assert "Traceback" not in refused.err
    assert studyhall("status", "--json").json == [], "nothing was stored"


def test_a_document_goes_through_and_a_corrupt_one_goes_on_after_its_repair(studyhall, redis_url, tmp_path, spawn):
    """Replay inside a flow, in the app: the failed stage runs again, the three that wait for it follow."""
    worker(spawn, redis_url, tmp_path)
    good = studyhall("submit", SAMPLES / "water-cycle.md", "--wait", "--json")
    assert good.code == 0
    broken = tmp_path / "damaged.pdf"
    whole = (SAMPLES / "photosynthesis.pdf").read_bytes()
    broken.write_bytes(whole[: len(whole) // 3])
    bad = studyhall("submit", broken, "--wait", "--json")
    assert bad.code == 1
    assert "damaged" in bad.err
    [ident] = bad.json.values()

    letters = until_sync(lambda: studyhall("dlq", "list", "--json").json, 20, "the dead letter")
    [letter] = letters
    assert (letter["name"], letter["job"]) == ("document-processing", f"document-processing.{ident}")
    shown = studyhall("dlq", "show", letter["id"], "--json").json
    assert shown["payload"]["payload"]["document_id"] == ident
    assert "damaged" in studyhall("dlq", "list").out
    rows = {row["id"]: row for row in studyhall("status", "--json").json}
    assert rows[ident]["status"] == "rejected"

    [blob] = (tmp_path / "data" / "blobs" / "documents" / ident).iterdir()
    blob.write_bytes(whole)  # not what was uploaded: the claim check refuses it
    assert studyhall("dlq", "replay", letter["id"]).code == 0
    until_sync(lambda: studyhall("dlq", "list", "--json").json, 20, "refused again")
    [again] = studyhall("dlq", "list", "--json").json
    assert "damaged" in again["reason"]
    assert studyhall("dlq", "show", again["id"], "--json").json["earlier"][0]["id"] == letter["id"]

    broken.write_bytes(whole)

    async def repair():
        async with open_app(load(overrides={"data_dir": tmp_path / "data"})) as app:
            await replace_file(app, ident, broken)

    asyncio.run(repair())
    assert studyhall("dlq", "replay", "--all", "--json").json["replayed"] == [f"document-processing.{ident}"]

    def through():
        document = {row["id"]: row for row in studyhall("status", "--json").json}[ident]
        return all(stage["state"] == "completed" for stage in document["stages"].values())

    until_sync(through, 60, "the flow went on behind the replayed stage")
    assert "4 of 4" in studyhall("status").out
    assert studyhall("dlq", "list", "--json").json == []
    assert len(studyhall("dlq", "list", "--replayed", "--json").json) == 2
    assert studyhall("dlq", "purge", "--older-than", 0, "--yes", "--json").json == {"purged": 2}


def test_dlq_mistakes_exit_with_a_line_that_says_what_to_do(studyhall):
    for args, code, text in (
        (("dlq", "show", "nothing"), 1, "no dead letter"),
        (("dlq", "replay", "nothing"), 1, "no dead letter"),
        (("dlq", "replay"), 2, "name one dead letter"),
        (("dlq", "replay", "x", "--all"), 2, "name one dead letter"),
        (("dlq", "purge"), 2, "--yes"),
        (("status", "nothing"), 1, "no document nothing"),
    ):
        ran = studyhall(*args)
        assert ran.code == code, (args, ran.code, ran.err)
        assert text in ran.err
        assert "Traceback" not in ran.err
    assert "every job that ended, ended well" in studyhall("dlq", "list").out


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("dlq", "show", "nothing"), 1),
        (("dlq", "purge"), 2),
        (("dlq", "show"), 2),
        (("lost",), 2),
        (("status", "--limit", "many"), 2),
        (("schedule", "run", "nothing"), 1),
    ],
)
def test_errors_are_json_where_json_was_asked_for(studyhall, args, code):
    ran = studyhall(*args, "--json")
    assert ran.code == code, ran.err
    assert list(ran.json) == ["error"]
    assert ran.json["error"]


def test_tables_fit_80_columns_and_leave_ids_whole(studyhall, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    [ident] = studyhall("submit", SAMPLES / "water-cycle.md", "--json").json.values()
    order = studyhall("order", "buy", "biology-101", "--json").json["id"]
    for args, whole in (
        (("status",), ident),
        (("status", ident), ident),
        (("cancel", ident), f"connection-explanations.{ident}"),
        (("saga", "list"), order),
        (("saga", "show", order), order),
        (("order", "list"), order),
        (("schedule", "list"), "nightly-cleanup"),
        (("health",), "documents"),
        (("limits",), "documents"),
        (("events", "status"), "notifications"),
    ):
        ran = studyhall(*args)
        assert "Traceback" not in ran.err, ran.err
        assert whole in ran.out, args
        assert max(map(len, ran.out.splitlines())) <= 80, args


def test_people_get_tables_where_scripts_get_json(studyhall):
    """`cancel`, `schedule list|run` and `health`; those of `dlq` are shown above with a real dead letter."""
    healthy = studyhall("health")
    assert (healthy.code, "healthy" in healthy.out, "documents" in healthy.out) == (0, True, True)
    assert "nobody is working" in healthy.out, "no worker is alive, though no job waits for one"
    [ident] = studyhall("submit", SAMPLES / "water-cycle.md", "--json").json.values()
    for row in studyhall("schedule", "list", "--json").json:
        assert row["next"] is None
    listed = studyhall("schedule", "list")
    assert (listed.code, "nightly-cleanup" in listed.out, "start a worker" in listed.out) == (0, True, True)
    queued = studyhall("schedule", "run", "nightly-cleanup")
    assert (queued.code, queued.out.startswith("queued as ")) == (0, True)
    assert "declared: " in studyhall("schedule", "run", "nightly").err
    alone = studyhall("health")
    assert (alone.code, "nobody works" in alone.out, "start `studyhall worker`" in alone.err) == (1, True, True)
    stopped = studyhall("cancel", ident)
    assert stopped.code == 0
    for stage in ("document-processing", "graph-generation", "quiz-creation", "connection-explanations"):
        [line] = [line for line in stopped.out.splitlines() if f"{stage}.{ident}" in line]
        assert "cancelled" in line
    refused = studyhall("cancel", "nonsense")
    assert (refused.code, refused.out) == (1, "")
    assert "neither a document nor a job" in refused.err


def test_health_names_what_is_over_its_limit_and_exits_1(studyhall, redis_url):
    studyhall("submit", SAMPLES / "water-cycle.md")
    hours = int(1000 * (time.time() - 7200))

    async def age():
        client = producer_client(redis_url)
        for key in await client.keys("bull:documents:document-processing.*"):
            await client.hset(key, "timestamp", hours)
        await client.aclose()

    asyncio.run(age())
    sick = studyhall("health")
    assert sick.code == 1
    assert "documents.oldest is over its limit" in sick.err
    assert "healthy" not in sick.out
    ran = studyhall("health", "--json")
    assert (ran.code, ran.json["healthy"], list(ran.json["over_limit"])) == (
        1,
        False,
        ["documents.oldest", "documents.unattended"],
    )


@pytest.mark.slow
def test_waiting_without_a_worker_says_what_is_missing(redis_url, tmp_path, spawn):
    env = {"REDIS_URL": redis_url}
    where = ("--data-dir", tmp_path / "data")
    waiting = spawn("studyhall", "submit", SAMPLES / "water-cycle.md", "--wait", *where, env=env)
    waiting.line_sync("no worker is running; start one with: studyhall worker", 60)
    assert waiting.returncode is None, "it goes on waiting: somebody may start one now"
    working = worker(spawn, redis_url, tmp_path)
    assert waiting.wait(60) == 0

    async def somebody_works():
        settings = load({"REDIS_URL": redis_url}, {"data_dir": tmp_path / "data"})
        async with open_app(settings) as app:
            return await cli_documents._somebody_works(app)

    assert asyncio.run(somebody_works()), "with a worker there is nothing to say"
    working.close()
    until_sync(lambda: not asyncio.run(somebody_works()), 10, "the connections of the worker are gone")


def test_a_taken_port_is_reported_in_one_line(studyhall):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = studyhall("api", "--port", port)
    assert ran.code == 2
    assert f"port {port}: Address already in use. Choose another --port" in ran.err
    assert "Traceback" not in ran.err


def test_cleanup_takes_files_that_no_document_names(studyhall, tmp_path):
    [ident] = studyhall("submit", SAMPLES / "water-cycle.md", "--json").json.values()
    blobs = tmp_path / "data" / "blobs" / "documents"
    orphan = blobs / "never" / "blob"
    orphan.parent.mkdir()
    orphan.write_bytes(b"its upload was killed before the row was written")
    for path in [*blobs.rglob("*")]:
        os.utime(path, (time.time() - 7200, time.time() - 7200))
    done = studyhall("cleanup", "--json").json
    assert (done["files_deleted"], done["files_kept"]) == (1, 1)
    assert [path.name for path in blobs.iterdir() if any(path.iterdir())] == [ident]


@pytest.mark.parametrize("command", [("status",), ("dlq", "list")])
def test_an_unreachable_redis_is_exit_2_in_seconds(studyhall, monkeypatch, command):
    monkeypatch.setenv("REDIS_URL", f"redis://127.0.0.1:{free_port()}/0")
    began = time.monotonic()
    ran = studyhall(*command)
    assert ran.code == 2
    assert "REDIS_URL" in ran.err
    assert "Traceback" not in ran.err
    assert time.monotonic() - began < 10


def test_wrong_settings_are_exit_2_and_name_the_variable(studyhall, monkeypatch):
    monkeypatch.setenv("STUDYHALL_CONCURENCY", "5")
    ran = studyhall("status")
    assert (ran.code, "did you mean STUDYHALL_CONCURRENCY?" in ran.err) == (2, True)
    monkeypatch.delenv("STUDYHALL_CONCURENCY")
    monkeypatch.setenv("STUDYHALL_SIGNING_KEYS", "short")
    ran = studyhall("status")
    assert ran.code == 2
    assert "16 bytes" in ran.err
