{@% set jobs = kind != 'event-driven' %@}
"""Operation: alerts that leave the process, clean-up, commands that show and repair."""

from __future__ import annotations

import asyncio
{@% if jobs %@}
import io
{@% endif %@}
import json
import subprocess
import sys
from collections.abc import Iterator{@ ', Sequence' if not jobs @}
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
{@% if not jobs %@}
from fastapi.testclient import TestClient
{@% endif %@}
from sqlalchemy import Table, update

{@% if jobs %@}
from {@ package @} import __version__
{@% else %@}
from {@ package @} import __version__, upkeep
{@% endif %@}
from {@ package @}.api import create_api
from {@ package @}.commands import main
{@% if jobs %@}
from {@ package @}.jobs import job_types
{@% else %@}
from {@ package @}.patterns.core.errors import Permanent
from {@ package @}.patterns.core.event import Event
{@% endif %@}
from {@ package @}.patterns.core.open_store import close, open_store
{@% if jobs %@}
from {@ package @}.patterns.core.request import JobRequest
{@% endif %@}
from {@ package @}.patterns.core.store import begin
{@% if jobs %@}
from {@ package @}.patterns.dead_letter import dead_letters
from {@ package @}.patterns.engine import ensure_redis
from {@ package @}.patterns.producer import Producer
from {@ package @}.patterns.typed_jobs import validated
{@% else %@}
from {@ package @}.patterns.health.alerts import Rule
from {@ package @}.patterns.outbox import outbox
from {@ package @}.patterns.outbox.relay import Relay
from {@ package @}.patterns.saga.store import sagas
{@% endif %@}
from {@ package @}.settings import PREFIX, Settings, SettingsError, load

from .example import BODY, URL
from .processes import Processes, until


@pytest.fixture
def received() -> Iterator[tuple[str, list[Any]]]:
    """A receiver of alerts: its address, and what it got."""
    got: list[Any] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", got
        server.shutdown()


class Operator:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *command: str, code: int = 0) -> Any:
        assert main([*command, "--json"]) == code
        return json.loads(self._capsys.readouterr().out)

    def table(self, *command: str) -> list[str]:
        main(command)
        return self._capsys.readouterr().out.splitlines()


@pytest.fixture
def operator(env: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Operator:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return Operator(capsys)


async def age(settings: Settings, table: Table, column: str) -> None:
    """As if it had happened in 1970."""
    store = open_store(settings.store_url)
    async with begin(store) as tx:
        await tx.execute(update(table).values({column: 1.0}))
    await close(store)


{@% if jobs %@}
async def forge(settings: Settings) -> None:
    """A job that fails for good: nobody signed it."""
    server = ensure_redis(settings.data_dir)
    producer = Producer(server.url, validated(job_types()))
    await producer.enqueue(JobRequest(URL.strip("/"), BODY, key="0" * 32))
    await producer.close()
    server.stop()


def test_a_failed_job_is_told_shown_replayed_and_at_last_forgotten(
    processes: Processes,
    settings: Settings,
    operator: Operator,
    received: tuple[str, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, alerts = received
    asyncio.run(forge(settings))
    # Two of them, as in production: one incident is still one alert.
    for _ in range(2):
        processes.start(
            "-m",
            "{@ package @}",
            "worker",
            alert_urls=address,
            watch_seconds=0.2,
            clean_up_seconds=1,
            sweep_seconds=0.2,
        )
    until(lambda: alerts, "alert", 90)
    (letter,) = operator("dlq", "list")
    assert letter["cause"] == "forged"
    assert operator("dlq", "show", letter["id"])["payload"]
    unhealthy = operator("health", code=1)
    assert unhealthy["healthy"] is False
    assert {row["signal"]: row["value"] for row in unhealthy["signals"]}["work.workers"] == 2
    assert operator("status", "0" * 32)["state"] == "failed"
    lines = operator.table("dlq", "list")
    assert any(line.startswith(letter["id"]) for line in lines)
    assert max(map(len, lines)) <= 80
    assert len(operator("dlq", "replay", letter["id"])["replayed"]) == 1
    until(lambda: len(operator("dlq", "list")) == 1, "it fails again")
    assert {alert["signal"] for alert in alerts} == {"work.failure_rate"}
    # A check between the replay and its failure ends the incident; the next one alerts again.
    assert [alert["state"] for alert in alerts] == (["raised", "cleared"] * len(alerts))[: len(alerts)]
    asyncio.run(age(settings, dead_letters, "archived_at"))
    until(lambda: operator("dlq", "list") == [], "clean-up", 90)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))  # no terminal
    assert "--yes" in operator("dlq", "purge", "--older-than", "0", code=1)["error"]
    assert operator("dlq", "purge", "--older-than", "0", "--yes") == {"dead_letters": 0}
    for days in ("-5", "nan", "inf"):
        with pytest.raises(SystemExit):
            main(["dlq", "purge", "--older-than", days, "--yes"])


def test_while_redis_is_away_letters_can_be_read_and_health_says_so(
    operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://:se/cret@db:6379/0")
    for command in (("dlq", "list"), ("health",), ("dlq", "replay", "any")):
        error = operator(*command, code=1)["error"]
        assert "percent-encoded" in error
        assert "cret@" not in error
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    assert operator("dlq", "list") == []
    assert [row["signal"] for row in operator("health", code=1)["signals"] if row["over"]] == ["redis.down"]
    assert "REDIS_URL" in operator("dlq", "replay", "any", code=1)["error"]
    assert operator("dlq", "show", "a\udcff", code=1)["error"]
{@% if 'schedule' in patterns %@}


def test_a_schedule_is_listed_and_run_by_hand(operator: Operator) -> None:
    (row,) = operator("schedule", "list")
    assert row["missed"] == 0
    assert "by-hand" in operator("schedule", "run", row["id"])["job"]
    assert row["id"] in operator("schedule", "run", "nothing", code=1)["error"]
{@% endif %@}
{@% else %@}
def test_events_and_sagas_are_shown_and_at_last_forgotten(
    api: TestClient, processes: Processes, settings: Settings, operator: Operator
) -> None:
    ident = api.post(URL, json=BODY).json()["id"]
    processes.start("-m", "{@ package @}", "relay", clean_up_seconds=1)
    until(lambda: api.get(f"{URL}/{ident}").json()["status"] == "confirmed", "end of the saga")
    until(lambda: "outbox_waiting 0.0\n" in api.get("/metrics").text, "empty outbox")

    (saga,) = operator("saga", "list")
    assert (saga["id"], saga["state"]) == (ident, "completed")
    assert operator("saga", "show", ident)["history"]
    refused = operator("saga", "repair", ident, "--retry", "--note", "why not", code=1)
    assert "it has ended" in refused["error"]
    assert {row["group"] for row in operator("events", "list")} == {"outbox", "notices"}
    assert operator("events", "quarantine") == []
    until(lambda: [row["waiting"] for row in operator("events", "list")] == [0, 0], "every notice taken")
    assert operator("events", "replay", "notices", "--since", "2020-01-01")["applied"] == 0
    asyncio.run(age(settings, outbox, "published_at"))
    asyncio.run(age(settings, sagas, "updated_at"))
    until(lambda: operator("saga", "list") == [], "clean-up", 90)


class Refusing:
    async def publish(self, events: Sequence[Event]) -> list[Exception | None]:
        return [Permanent("refused with 400")] * len(events)


async def give_up(settings: Settings) -> None:
    """The broker refuses what waits in the outbox."""
    store = open_store(settings.store_url)
    await Relay(store, Refusing()).run_once()
    await close(store)


def test_what_was_given_up_goes_out_again_and_a_saga_is_taken_back_by_hand(
    api: TestClient, processes: Processes, settings: Settings, operator: Operator
) -> None:
    ident = api.post(URL, json=BODY).json()["id"]
    asyncio.run(give_up(settings))
    (row,) = operator("events", "quarantine")
    assert (row["group"], "refused with 400" in row["reason"]) == ("outbox", True)
    assert operator("health", code=1)["healthy"] is False
    assert operator("events", "retry", "outbox", row["id"]) == {"retried": 1}
    assert operator("events", "quarantine") == []
    mended = operator("saga", "repair", ident, "--compensate", "--note", "the customer called")
    assert mended["state"] == "compensating"
    processes.start("-m", "{@ package @}", "relay")
    until(lambda: operator("status", ident)["status"] == "cancelled", "the way back")
    assert "the customer called" in str(operator("saga", "show", ident)["history"])
    until(lambda: operator("events", "list")[0]["waiting"] == 0, "empty outbox")


def test_when_no_relay_runs_the_api_says_so_once(
    env: dict[str, str], monkeypatch: pytest.MonkeyPatch, received: tuple[str, list[Any]]
) -> None:
    address, alerts = received
    monkeypatch.setattr(upkeep, "RULES", (Rule("outbox.oldest", raise_at=0.1, clear_at=0.05),))
    settings = load({**env, f"{PREFIX}ALERT_URLS": address, f"{PREFIX}WATCH_SECONDS": "0.1"})
    with TestClient(create_api(settings), base_url="http://localhost") as api:
        api.post(URL, json=BODY)
        until(lambda: alerts, "alert")
    assert [alert["signal"] for alert in alerts] == ["outbox.oldest"]
{@% endif %@}


def test_errors_are_json_where_json_was_asked_for(
    operator: Operator, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nobody" in operator("status", "nobody", code=1)["error"]
    monkeypatch.setattr(sys, "argv", ["{@ package @}", "status", "--json"])
    with pytest.raises(SystemExit):
        main(["status", "--json"])
    assert "required" in json.loads(capsys.readouterr().out)["error"]


def test_a_wrong_alert_address_is_an_error_at_the_start_that_does_not_repeat_it(env: dict[str, str]) -> None:
    with pytest.raises(SettingsError, match=f"{PREFIX}ALERT_URLS") as wrong:
        create_api(load({**env, f"{PREFIX}ALERT_URLS": "gopher://hunter2@example.org"}))
    assert "hunter2" not in str(wrong.value)


def test_the_version_is_said_at_once(env: dict[str, str]) -> None:
    python = [sys.executable, "-X", "importtime"]
    command = [*python, "-m", "{@ package @}", "--version"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"{@ project_name @} {__version__}"
    assert "sqlalchemy" not in done.stderr  # what a command needs takes longer to import than it takes to run
