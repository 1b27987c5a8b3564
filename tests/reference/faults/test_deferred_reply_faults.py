"""Chat commands against the real API, real workers and a platform with rules: quick acks, one answer, in time."""

import asyncio
import statistics
import time
from contextlib import asynccontextmanager

import pytest
from sqlalchemy import select

from harness.ai_server import AIServer, Answer, Hang, Reply
from harness.api import api_at
from harness.chat_platform import ChatPlatform
from harness.waiting import until
from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.core.open_store import close, open_store
from studyhall.patterns.core.store import read
from studyhall.patterns.deferred_reply import InteractionWebhook, TokenEnded
from studyhall.patterns.deferred_reply.replies import BUSY, FAILED, SLOW, chat_replies
from studyhall.providers import LocalProvider

pytestmark = pytest.mark.fault

PLATFORM_WAITS = 3.0
DEFERRED, IMMEDIATE = 5, 4
SECRET = "sk-chat-0123456789abcdefghij"


async def ask(api, platform, ident, question="what is rain?"):
    body, headers = platform.command(question, id=ident)
    began = time.monotonic()
    response = await api.client.post("/interactions", content=body, headers=headers)
    assert response.status_code == 200, response.text
    return time.monotonic() - began, response.json()


def p99(seconds):
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


@asynccontextmanager
async def hall(spawn, directory, redis_url, platform, **settings):
    chat = {"chat_public_key": platform.public_key, "chat_url": platform.url, "request_rate": "10000"}
    quick = {"lock_seconds": "1", "stalled_seconds": "0.2"}
    async with api_at(spawn, directory, redis_url, **{**chat, **quick, **settings}) as api:
        yield api


def ai(server):
    return {
        "provider": "openai",
        "provider_url": server.url,
        "provider_model": "m",
        "provider_key": SECRET,
        "breaker_failures": "1000",
    }


@pytest.mark.slow
async def test_commands_are_acknowledged_at_once_while_twenty_slow_ones_run(spawn, redis_url, tmp_path, figures, scale):
    pace, count = PLATFORM_WAITS + 0.2, scale(60, 300)
    naive = LocalProvider(pace=pace)

    async def inline(_):
        """The twin: the answer is made within the request."""
        began = time.monotonic()
        await naive.answer("what is rain?", "Rain is water.", key="k", deadline=began + 60)
        return time.monotonic() - began

    async with (
        ChatPlatform() as platform,
        hall(spawn, tmp_path, redis_url, platform, provider_pace=str(pace), concurrency="400") as api,
    ):
        await api.worker("--queue", "chat", "--concurrency", 400)
        await ask(api, platform, "warm-up")
        twins = asyncio.gather(*(inline(number) for number in range(20)))
        slow = [f"slow-{number}" for number in range(20)]
        for ident in slow:
            await ask(api, platform, ident)
        times = []
        for number in range(count):
            spent, answer = await ask(api, platform, f"quick-{number}")
            assert answer == {"type": DEFERRED}
            times.append(spent)
        too_late = sum(spent > PLATFORM_WAITS for spent in await twins)
        assert too_late == 20, "the twin's commands have failed on the platform"
        names = [*slow, *(f"quick-{number}" for number in range(count))]
        await until(lambda: all(f"token-{name}" in platform.posts for name in names), 60, "all are answered")
        assert all(len(platform.posts[f"token-{name}"]) == 1 for name in names)
    limit = scale(1.0, 0.3)  # the quick suite runs on loaded machines
    assert p99(times) < limit
    figures(
        "deferred-reply",
        name="acknowledgements under load",
        slow_commands=len(slow),
        commands=count,
        ack_p99_ms=round(1000 * p99(times)),
        ack_median_ms=round(1000 * statistics.median(times)),
        naive_too_late=too_late,
    )


@pytest.mark.slow
async def test_while_redis_is_away_the_user_is_told_at_once_and_nothing_contradicts_it(
    spawn, own_redis, tmp_path, figures, scale
):
    async with ChatPlatform() as platform, hall(spawn, tmp_path, own_redis.url, platform) as api:
        await api.worker("--queue", "chat")
        assert (await ask(api, platform, "before"))[1] == {"type": DEFERRED}
        await until(lambda: platform.posts.get("token-before"), 30, "the first answer")

        await asyncio.to_thread(own_redis.kill)
        killed = [await ask(api, platform, f"killed-{number}") for number in range(30)]
        assert all(answer["type"] == IMMEDIATE for _, answer in killed)
        assert all(answer["data"]["content"] == BUSY for _, answer in killed)
        await asyncio.to_thread(own_redis.restart)

        async def accepted():
            return (await ask(api, platform, f"again-{time.time_ns()}"))[1]["type"] == DEFERRED

        await until(accepted, 20, "commands are taken again, without a restart of the API", every=0.2)
        own_redis.pause()  # frozen: connections stay open, an add may still land
        frozen = [await ask(api, platform, f"frozen-{number}") for number in range(10)]
        own_redis.resume()
        assert all(answer["type"] == IMMEDIATE for _, answer in frozen)
        assert max(spent for spent, _ in frozen) < PLATFORM_WAITS
        await until(accepted, 20, "and again", every=0.2)
        answered = f"done-{time.time_ns()}"
        await ask(api, platform, answered)
        await until(lambda: platform.posts.get(f"token-{answered}"), 30, "a later command is answered")
        late = [token for token in platform.posts if "killed" in token or "frozen" in token]
        assert late == [], "a user told to ask again gets no second answer"
    times = [spent for spent, _ in killed]
    assert p99(times) < scale(1.0, 0.3)
    figures(
        "deferred-reply",
        name="Redis away",
        commands=len(killed) + len(frozen),
        told_at_once=len(killed) + len(frozen),
        ack_p99_ms=round(1000 * p99(times)),
        slowest_frozen_ms=round(1000 * max(spent for spent, _ in frozen)),
        contradicted=len(late),
    )


@pytest.mark.slow
async def test_one_answer_in_time_whatever_the_model_and_the_platform_do(
    spawn, redis_url, redis_server, tmp_path, figures
):
    life = 8.0
    async with (
        AIServer() as server,
        ChatPlatform(life=life) as platform,
        hall(spawn, tmp_path, redis_url, platform, chat_token_seconds=str(life), **ai(server)) as api,
    ):
        await api.worker("--queue", "chat")

        # The same interaction, ten times at once and once more when it is done.
        server.will(Answer({"text": "Rain is water."}))
        answers = await asyncio.gather(*(ask(api, platform, "twice") for _ in range(10)))
        assert {answer["type"] for _, answer in answers} == {DEFERRED}
        await until(lambda: platform.posts.get("token-twice"), 20, "the answer")
        answers.append(await ask(api, platform, "twice"))
        calls, edits = len(server.requests), platform.edits("token-twice")
        assert (calls, edits, platform.posts["token-twice"]) == (1, 1, ["Rain is water."])

        # Longer than the platform takes, and it asks us to wait.
        text = "\n\n".join("word " * 300 for _ in range(3)).strip()
        webhook = InteractionWebhook(platform.url)
        platform.command("", id="naive")
        with pytest.raises(Permanent):
            await webhook.edit("app-1", "token-naive", text)  # what the naive version sends
        platform.busy(2, 0.2)
        server.will(Answer({"text": text}))
        await ask(api, platform, "long")
        await until(lambda: len(platform.posts.get("token-long", [])) == 3, 20, "all parts")
        parts = platform.posts["token-long"]
        assert " ".join(" ".join(parts).split()) == " ".join(text.split())

        # A refusal by the model is passed on without internals.
        server.will(Reply(400, {"error": {"code": "invalid_request", "message": f"bad key {SECRET}"}}))
        await ask(api, platform, "refused")
        await until(lambda: platform.posts.get("token-refused"), 20, "the note")
        assert platform.posts["token-refused"] == [FAILED]

        # It never answers: a friendly note before the token ends. What is sent after that is refused.
        server.will(Hang())
        await ask(api, platform, "hangs")
        await until(lambda: platform.posts.get("token-hangs"), 20, "the note")
        at = next(when for when, _, token, _ in platform.requests if token == "token-hangs")
        left = platform.ends["token-hangs"] - at
        assert platform.posts["token-hangs"] == [SLOW]
        assert left > 0
        await until(lambda: time.time() > platform.ends["token-hangs"], 20)
        with pytest.raises(TokenEnded):
            await webhook.edit("app-1", "token-hangs", "late")  # what a retry after five minutes does
        await webhook.close()

        # The tokens: in no job, in no log, and not in the database any more.
        with redis_server.client() as client:
            dumped = " ".join(
                str(client.hgetall(key)) for key in client.keys("bull:chat:*") if client.type(key) == "hash"
            )
        assert "answer-question" in dumped
        assert "token-" not in dumped
        assert "token-" not in api.logs()
        assert SECRET not in api.logs()
        store = open_store(f"sqlite:///{tmp_path / 'studyhall.db'}")
        async with read(store) as connection:
            assert set(await connection.scalars(select(chat_replies.c.token))) == {""}
        await close(store)
    figures(
        "deferred-reply",
        name="one answer",
        deliveries=len(answers),
        model_calls=calls,
        edits=edits,
        parts_of_a_long_answer=len(parts),
        token_seconds=life,
        seconds_left_when_told=round(left, 1),
    )


@pytest.mark.slow
async def test_a_worker_killed_in_the_middle_of_the_call_costs_the_user_nothing(
    spawn, redis_url, tmp_path, figures, scale
):
    kills = scale(1, 20)
    async with (
        AIServer() as server,
        ChatPlatform() as platform,
        hall(spawn, tmp_path, redis_url, platform, **ai(server)) as api,
    ):
        worker = await api.worker("--queue", "chat")
        for number in range(kills):
            before = len(server.requests)
            server.will(Hang(), Answer({"text": f"answer {number}"}))
            await ask(api, platform, f"killed-{number}")
            await until(lambda before=before: len(server.requests) > before, 20, "the call is under way")
            worker.kill()
            assert platform.posts.get(f"token-killed-{number}") is None, "killed in the middle"
            worker = await api.worker("--queue", "chat")
            await until(lambda number=number: platform.posts.get(f"token-killed-{number}"), 30, "the answer")
        posts = [platform.posts[f"token-killed-{number}"] for number in range(kills)]
        assert posts == [[f"answer {number}"] for number in range(kills)]
        edits = sum(platform.edits(f"token-killed-{number}") for number in range(kills))
        assert edits == kills
    figures("deferred-reply", name="killed workers", kills=kills, answers=len(posts), edits=edits)
