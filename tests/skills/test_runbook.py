"""The runbook: every command of the page, in its order, on an incident that was made for it."""

import asyncio
import logging
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from guide import quotes
from harness.missing import need_binary
from harness.waiting import clock_at, until
from harness.workers import at_work, queue_at
from queuesmith import cli
from studyhall.cli import app as studyhall
from studyhall.orders.consumers import GROUPS
from studyhall.orders.payments import Payments
from studyhall.orders.saga import buy_pack
from studyhall.patterns import dead_letter
from studyhall.patterns.bullmq_worker import FailPermanently
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.outbox.quarantine import lag, quarantined
from studyhall.patterns.outbox.relay import Relay
from studyhall.patterns.outside_call import InFlight, OutsideCalls, Unclear
from studyhall.patterns.outside_call.store import StoreLedger
from studyhall.patterns.saga import SagaRunner
from studyhall.patterns.saga import store as saga_store
from studyhall.patterns.schedule.history import note_start
from studyhall.patterns.schedule.slots import Tick

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / f"skills/background-jobs/references/{name}.md").read_text() for name in ("runbook", "migrate")}
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.DOTALL | re.MULTILINE)
ADDED = re.compile(r"queuesmith add ([a-z. -]+?) --into")
DAY = 86_400_000

# Command -> what it must print on the incident below, and its exit code where that is not 0.
SHOWS: dict[str, str | tuple[str, int]] = {
    "rc --scan --pattern '*:meta'": r"^bull:labels:meta$",
    "rc client list | grep -o 'name=bull:[^ ]*' | sort | uniq -c": r"[12] name=bull:labels$",
    "rc hexists ${B}meta paused": r"^0$",
    "rc hmget ${B}${JOB} name failedReason ats stc": r"\Aprint\n\n1$",
    "rc exists ${B}${JOB}:lock": r"^1$",
    "studyhall health": ("nobody works", 1),
    "for s in wait active; do echo $s $(rc llen ${B}$s); done": r"\Await 2\nactive 1$",
    "for s in prioritized delayed completed failed; do echo $s $(rc zcard ${B}$s); done": r"^failed 1$",
    "rc hget ${B}$(rc lindex ${B}wait -1) timestamp": r"\A\d{13}$",
    "rc hgetall ${B}meta": r"^concurrency\n5$",
    "rc pttl ${B}limiter": r"\A\d{5,6}$",
    "rc info memory | grep maxmemory_policy": "maxmemory_policy:allkeys-lru",
    "rc info stats | grep evicted_keys": r"evicted_keys:[1-9]",
    "rc hexists ${B}${JOB} data": r"^1$",
    "rc config set maxmemory-policy noeviction": r"^OK$",
    "rc info memory | grep -E 'used_memory_human|maxmemory_human'": r"used_memory_human:[^$]*maxmemory_human:",
    "rc memory usage ${B}${JOB}": r"\A\d{3,}$",
    "rc zrevrange ${B}failed 0 9": r"^nobody-saw$",
    "python -m patterns.dead_letter.command": r"labels/dead-1  no such street",
    "python -m patterns.dead_letter.command replay $LETTER": r"\A\Z",
    "studyhall dlq list": "dead-2",
    "studyhall dlq show $LETTER": "no such street",
    "rc hmget ${B}${JOB} atm ats stc": r"\A\n1$",
    "python -m patterns.outside_call.command carrier": r"label/7  last sent",
    "python -m patterns.outside_call.command carrier $KEY --again": r"\A\Z",
    "studyhall saga list --state needs_repair": "account closed",
    "studyhall saga show $SAGA": "Timeline",
    'studyhall saga repair $SAGA --undone charge --note "refunded by hand"': "compensating",
    "python -m patterns.outbox.command": r"bus: \d+ waiting.* 1 set aside",
    "python -m patterns.outbox.command retry bus $EVENT": r"\A\Z",
    "studyhall outbox quarantine list": "No event is stuck",
    "studyhall events status": "quarantined",
    "studyhall events quarantine --group $GROUP": "could read everything",
    "studyhall events retry --group $GROUP --all": "delivered 0 of 0 again",
    "studyhall events replay --group $GROUP --since $SINCE": "applied",
    "python -m patterns.schedule.command": r"nightly: last .* 2 missed",
    "rc zrange ${B}repeat 0 -1 withscores": r"^nightly\n\d{13}",
    "studyhall schedule list": "start a worker",
}


def commands(page):
    """What the first block defines, and every command, without its comment."""
    lines = [re.sub(r"\s+#.*", "", line) for block in BLOCK.findall(page) for line in block.splitlines()]
    defined = [line for line in lines if re.match(r"\w+=|\w+\(\)", line)]
    return defined, [line for line in lines if line and line not in defined]


@pytest.mark.parametrize(("name", "most"), [("runbook", 1_500), ("migrate", 1_500)])
def test_the_page_is_read_in_the_middle_of_the_night(name, most):
    assert quotes.tokens(PAGES[name]) <= most


def test_every_command_of_the_runbook_is_tried_here():
    assert commands(PAGES["runbook"])[1] == list(SHOWS)


class BrokenPayments(Payments):
    """May have taken the money; cannot refund it."""

    def __init__(self):
        super().__init__("http://127.0.0.1:9")

    async def charge(self, key, **order):
        raise Permanent("garbled answer")

    async def find(self, charge_key):
        return None

    async def refund(self, key, *, charge_key):
        raise Permanent("account closed")


class Refusing:
    async def publish(self, events):
        return [Permanent("refused with 400")] * len(events)


async def stuck(store):
    """A saga, an event, a call and a schedule that each wait for a human; `o1` was bought before."""
    never = RetryPolicy(base=0.01, cap=0.01, attempts=1)
    async with BrokenPayments() as payments:
        await SagaRunner(store, buy_pack(payments, charge=never, refund=never)).resume_due()
    await Relay(store, Refusing()).run_once()

    async def cut(_key):
        raise ConnectionResetError

    calls = OutsideCalls(StoreLedger(store), "carrier", longest=1)
    with pytest.raises(InFlight) as waits:
        await calls.once("label/7", cut)
    await asyncio.sleep(waits.value.delay + 0.1)
    with pytest.raises(Unclear):
        await calls.once("label/7", cut)
    for day in (20_000, 20_003):
        tick = Tick("nightly", day * DAY, {"id": "nightly", "cron": "0 0 * * *"})
        await note_start(store, tick, clock_at(day * DAY))
    (event,) = await quarantined(store)
    return {"SAGA": "o1", "EVENT": event.event_id, "KEY": "label/7"}


@pytest.mark.slow
async def test_every_command_of_the_runbook_shows_the_incident_or_ends_it(make_redis, tmp_path, monkeypatch):
    # The handler that a command leaves writes to its closed output.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    need_binary("redis-cli", how="install redis-tools with your package manager")
    server = make_redis(maxmemory_policy="allkeys-lru")
    (tmp_path / "pyproject.toml").touch()
    patterns = ADDED.findall(PAGES["runbook"])[0].split()
    assert cli.main(["add", *patterns, "--into", str(tmp_path), "--no-tests"]) == 0
    database = f"sqlite:///{tmp_path / 'app.db'}"
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("STUDYHALL_")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "REDIS_URL": server.url,
        "DATABASE_URL": database,
        "STUDYHALL_DATA_DIR": str(tmp_path / "studyhall"),
        "COLUMNS": "200",
        "JOB": "slow",
        "GROUP": next(iter(GROUPS)),
        "SINCE": "2026-01-01",
    }
    defined = "\n".join(commands(PAGES["runbook"])[0])

    async def run(command):
        if command.startswith("studyhall "):  # in this process: every start would import the whole app again
            words = shlex.split(re.sub(r"\$(\w+)", lambda name: env[name[1]], command))[1:]
            result = await asyncio.to_thread(CliRunner(env=env).invoke, studyhall, words)
            # Folded as the terminal was when the first test of this process imported it.
            return " ".join(result.output.split()), result.exit_code
        shell = await asyncio.create_subprocess_exec(
            "sh",
            "-c",
            f"{defined}\n{command}",
            cwd=tmp_path,
            env=env,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(shell.communicate(), 60)
        return output.decode(), shell.returncode

    bought, code = await run("studyhall order buy biology-101 --id o1")
    assert code == 0, bought
    store, redis = open_store(database), producer_client(server.url)
    await create_all(store)
    env |= await stuck(store)

    async def work(job, _token):
        if job.id == "slow":
            await asyncio.Event().wait()
        raise FailPermanently("no such street")

    with server.client() as client:
        evict_something(client)
        async with queue_at(server.url, "labels") as queue, at_work("labels", work, url=server.url, concurrency=1):
            for name in ("dead-1", "dead-2"):
                await queue.add("print", {"parcel": name}, {"jobId": name})
            await until(lambda: client.zcard("bull:labels:failed") == 2, 20, "both died")
            await dead_letter.sweep(["labels"], redis, store)
            for name in ("nobody-saw", "slow"):
                await queue.add("print", {"parcel": name}, {"jobId": name})
            await until(lambda: client.lrange("bull:labels:active", 0, -1) == ["slow"], 20, "one hangs")
            await queue.add("print", {"parcel": "next"}, {})
            await queue.add("print", {"parcel": "last"}, {})
            await queue.setGlobalConcurrency(5)
            await queue.upsertJobScheduler("nightly", {"pattern": "0 3 * * *"}, "print", {}, {})
            client.set("bull:labels:limiter", 9, px=600_000)
            async with queue_at(server.url, "documents") as unattended:
                await unattended.add("parse", {}, {})
            letters = {letter.job_id: letter.id for letter in await dead_letter.list_dead_letters(store)}
            env["LETTER"] = letters["dead-1"]

            wrong = []
            for command, shows in SHOWS.items():
                pattern, code = shows if isinstance(shows, tuple) else (shows, 0)
                output, ended = await run(command)
                if ended != code or not re.search(pattern, output.rstrip(), re.MULTILINE):
                    wrong.append(f"{command}: exit code {ended}\n{output}")
            assert not wrong, "\n".join(wrong)

        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.lpos("bull:labels:wait", "dead-1") is not None, "replayed under its own id"
    assert (await lag(store)).quarantined == 0
    assert (await saga_store.load(store, "o1")).state == "compensating"
    assert await OutsideCalls(StoreLedger(store), "carrier", longest=1).unclear() == []
    await redis.aclose()
    await close(store)


def evict_something(client):
    """What a cache on the same server does to it."""
    client.set("cache", "x" * 3_000_000)
    client.config_set("maxmemory", client.info("memory")["used_memory"] - 1_000_000)
    client.set("more", "x")
    client.config_set("maxmemory", 0)
