"""Dead letters and unclear calls on the command line, and the sweep as a part of a worker process."""

import asyncio
import logging

import pytest
from bullmq import Queue

from harness.waiting import until
from studyhall.patterns.bullmq_worker import FailPermanently, ReliableWorker
from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.open_store import close, create_all, open_store
from studyhall.patterns.dead_letter import command as dead_letters
from studyhall.patterns.dead_letter.sweeping import sweeping
from studyhall.patterns.outside_call import InFlight, OutsideCalls, Unclear
from studyhall.patterns.outside_call import command as outside_calls
from studyhall.patterns.outside_call.store import StoreLedger


@pytest.fixture
def database(tmp_path, redis_url, monkeypatch):
    url = f"sqlite:///{tmp_path / 's.db'}"
    monkeypatch.setenv("DATABASE_URL", url)
    monkeypatch.setenv("REDIS_URL", redis_url)
    return url


def test_what_the_sweep_archived_is_logged_listed_and_replayed(database, redis_url, capsys, caplog):
    caplog.set_level(logging.ERROR, "dead_letter")

    async def refuse(_job, _token):
        raise FailPermanently("no such street")

    async def die():
        store, redis = open_store(database), producer_client(redis_url)
        await create_all(store)
        worker = ReliableWorker("q", refuse, url=redis_url)
        sweep = sweeping(["q"], store, redis_url, every=0.1)
        running = [asyncio.create_task(loop.run()) for loop in (worker, sweep)]
        await Queue("q", {"connection": redis}).add("greet", {"secret": 1}, {"jobId": "job-7"})
        await until(lambda: bool(caplog.records), 20, "the sweep tells of it")
        await asyncio.gather(worker.drain(5), sweep.drain(5))
        await asyncio.gather(*running)
        await redis.aclose()
        await close(store)

    asyncio.run(die())
    assert "q/job-7: no such street" in caplog.text
    assert dead_letters.main([]) == 0
    listed = capsys.readouterr().out
    assert "q/job-7  no such street" in listed
    assert "secret" not in listed + caplog.text
    assert dead_letters.main(["replay", listed.split()[0]]) == 0
    assert dead_letters.main(["replay", listed.split()[0]]) == 1
    assert "replayed" in capsys.readouterr().err
    assert dead_letters.main(["list"]) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("run", [lambda: dead_letters.main(["list"]), lambda: outside_calls.main(["carrier"])])
def test_a_command_without_its_settings_names_what_is_missing(run, monkeypatch, capsys):
    monkeypatch.delenv("DATABASE_URL", raising=False)
    with pytest.raises(SystemExit):
        run()
    assert "set DATABASE_URL" in capsys.readouterr().err


def test_replay_of_nothing_says_what_to_name(database, capsys):
    with pytest.raises(SystemExit):
        dead_letters.main(["replay"])
    assert "Name their ids, or --all" in capsys.readouterr().err


def test_an_unclear_call_is_listed_and_ended_by_a_human(database, capsys):
    def with_calls(work, longest=0.01):
        async def run():
            store = open_store(database)
            await create_all(store)
            try:
                return await work(OutsideCalls(StoreLedger(store), "carrier", longest=longest))
            finally:
                await close(store)

        return asyncio.run(run())

    async def lose(calls):
        async def cut(_key):
            raise ConnectionResetError

        with pytest.raises(InFlight):
            await calls.once("label/7", cut)

    async def look_again(calls):
        async def given_up():
            try:
                await again(calls)
            except InFlight:
                return False
            except Unclear:
                return True
            raise AssertionError("it has an outcome")

        await until(given_up, what="nobody can know any more")

    async def again(calls):
        async def never(_key):
            raise AssertionError("it was made")

        return await calls.once("label/7", never)

    # A request may take 60 s, so that a slow machine still sends it; then nobody waits for those 60 s.
    with_calls(lose, longest=60)
    with_calls(look_again)
    assert outside_calls.main(["carrier"]) == 0
    assert capsys.readouterr().out.startswith("label/7  last sent ")
    with pytest.raises(SystemExit):
        outside_calls.main(["carrier", "label/7"])
    assert "--done JSON or --again" in capsys.readouterr().err
    assert outside_calls.main(["carrier", "label/7", "--done", '{"id": 7}']) == 0
    assert with_calls(again) == {"id": 7}
    assert outside_calls.main(["carrier", "label/7", "--again"]) == 1
    assert "only unclear and refused calls" in capsys.readouterr().err
