"""Replies to chat commands against a platform that fails: nobody is left "thinking…", no paid answer is lost."""

import time

import pytest
from sqlalchemy import select, update

from harness.chat_platform import ChatPlatform
from studyhall.patterns.core.errors import FailedTwin, Permanent, QueueUnavailable, RateLimited, Snooze, Transient
from studyhall.patterns.core.job import RetryPolicy
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.deferred_reply import DeferredReplies, Interaction, InteractionWebhook, TokenEnded, message
from studyhall.patterns.deferred_reply.replies import BUSY, FAILED, chat_replies
from studyhall.patterns.retry import decide

DEFERRED = {"type": 5}


@pytest.fixture
async def platform():
    async with ChatPlatform() as platform:
        yield platform


@pytest.fixture
async def webhook(platform):
    webhook = InteractionWebhook(platform.url)
    yield webhook
    await webhook.close()


def asked(platform, ident):
    platform.command("why?", id=ident)
    return Interaction(ident, "app-1", f"token-{ident}", "user-1", "ask")


async def queued(): ...


async def forty_two(seconds):
    return "42"


async def state_of(store, ident):
    async with read(store) as connection:
        return str(await connection.scalar(select(chat_replies.c.state).where(chat_replies.c.id == ident)))


async def aged(store, ident, left):
    """As if most of its token's life had passed."""
    async with begin(store) as tx:
        row = update(chat_replies).where(chat_replies.c.id == ident)
        await tx.execute(row.values(expires_at=time.time() + left))


async def test_a_refused_interaction_that_is_delivered_again_is_not_left_thinking(store, platform, webhook):
    async def away():
        raise QueueUnavailable("no Redis")

    replies = DeferredReplies(store)
    question = asked(platform, "1")
    assert await replies.accept(question, away) == message(BUSY)
    again = DeferredReplies(store)  # another process, and Redis is back
    assert await again.accept(question, queued) == message(BUSY), "no job will answer it: it must not think"
    assert await again.answer("1", webhook, forty_two) == "refused"
    assert platform.posts == {}


@pytest.mark.parametrize("working", [False, True])
async def test_a_failed_twin_is_reported_and_not_an_error_of_the_endpoint(store, platform, webhook, working):
    async def failed_before():
        raise FailedTwin("a job with this key failed")

    async def broken(seconds):
        raise Transient("the model is away")

    replies, question = DeferredReplies(store), asked(platform, "1")
    assert await replies.accept(question, queued) == DEFERRED
    if working:
        with pytest.raises(Snooze):
            await replies.answer("1", webhook, broken)
    assert await replies.accept(question, failed_before) == message(FAILED)
    assert await replies.accept(question, queued) == message(FAILED)
    assert await state_of(store, "1") == "failed"


async def test_an_answered_interaction_stays_answered_when_it_is_delivered_again(store, platform, webhook):
    async def failed_before():
        raise FailedTwin("a job with this key failed")

    replies, question = DeferredReplies(store), asked(platform, "1")
    await replies.accept(question, queued)
    assert await replies.answer("1", webhook, forty_two) == "answered"
    assert await replies.accept(question, failed_before) == DEFERRED
    assert platform.posts["token-1"] == ["42"]


async def test_a_paid_answer_survives_every_failure_of_sending_it(store, platform, webhook):
    replies, calls = DeferredReplies(store), []

    async def paid(seconds):
        calls.append(seconds)
        return "42"

    await replies.accept(asked(platform, "1"), queued)
    platform.fail(*[503] * 6)
    last_attempt = RetryPolicy(attempts=1)
    for _ in range(6):
        with pytest.raises(Snooze) as later:
            await replies.answer("1", webhook, paid)
        assert decide(later.value, last_attempt, 0).delay is not None, "it comes back, with no attempt left"
    assert await replies.answer("1", webhook, paid) == "answered"
    assert platform.posts["token-1"] == ["42"]
    assert len(calls) == 1


async def test_failing_work_comes_back_with_growing_pauses_until_the_token_is_about_to_end(store, platform, webhook):
    """Three attempts with short pauses bridged 6 s."""
    replies = DeferredReplies(store, life=900)

    async def broken(seconds):
        raise ConnectionError("the model is away")

    await replies.accept(asked(platform, "1"), queued)
    age, tries = 0.0, 0
    while True:
        await aged(store, "1", 900 - age)
        try:
            await replies.answer("1", webhook, broken)
            break
        except Snooze as later:
            pause = later.delay
        assert min(max(age, 1), 60) / 2 <= pause <= 61
        age, tries = age + pause, tries + 1
    assert 10 < tries < 40
    assert 810 < age < 885, "for all of the token's life"
    assert platform.posts["token-1"] == [FAILED], "and then the user is told"


async def test_a_wait_that_the_platform_asks_for_is_not_undercut(store, platform, webhook):
    replies = DeferredReplies(store)
    await replies.accept(asked(platform, "1"), queued)
    platform.busy(1, 300.0)
    with pytest.raises(RateLimited) as wait:
        await replies.answer("1", webhook, forty_two)
    assert wait.value.retry_after == 300.0


async def test_a_refused_message_is_not_called_expired(store, platform, webhook):
    replies = DeferredReplies(store)
    await replies.accept(asked(platform, "1"), queued)
    platform.fail(400)
    with pytest.raises(Permanent, match="400") as refused:
        await replies.answer("1", webhook, forty_two)
    assert not isinstance(refused.value, TokenEnded)
    assert await state_of(store, "1") == "failed"
    assert platform.posts["token-1"] == [FAILED], "the user reads a note instead"
    await replies.accept(asked(platform, "2"), queued)
    platform.ends["token-2"] = 0
    with pytest.raises(TokenEnded):
        await replies.answer("2", webhook, forty_two)
    assert await state_of(store, "2") == "expired"


async def test_an_answer_that_is_quicker_than_the_acknowledgement_is_sent_again(store, platform, webhook):
    """The job may run before "thinking…" has reached the platform, which then knows no message to edit."""
    replies, question = DeferredReplies(store), Interaction("1", "app-1", "token-1", "user-1", "ask")
    assert await replies.accept(question, queued) == DEFERRED
    with pytest.raises(Snooze):
        await replies.answer("1", webhook, forty_two)
    platform.command("why?", id="1")  # now it has arrived
    assert await replies.answer("1", webhook, forty_two) == "answered"
    assert platform.posts["token-1"] == ["42"]
    await replies.accept(asked(platform, "2"), queued)
    await aged(store, "2", 600)
    platform.fail(404)
    with pytest.raises(TokenEnded):
        await replies.answer("2", webhook, forty_two)
    assert await state_of(store, "2") == "expired", "after minutes it was deleted"


async def test_fields_of_discord_go_to_discord_only(platform, webhook):
    platform.command("why?", id="1")
    other = InteractionWebhook(platform.url, fields={})
    await webhook.edit("app-1", "token-1", "hi @everyone")
    await other.edit("app-1", "token-1", "hi")
    await other.close()
    assert platform.bodies == [{"content": "hi @everyone", "allowed_mentions": {"parse": []}}, {"content": "hi"}]
    assert message("hi", fields={}) == {"type": 4, "data": {"content": "hi", "flags": 64}}


async def test_a_job_that_ends_without_a_word_leaves_nobody_thinking(store, platform, webhook):
    """Crash limit, max_age, a dead letter: the handler never ran, or never again."""
    replies = DeferredReplies(store, life=900)
    for ident in ("dead", "late", "paid", "fresh", "over"):
        await replies.accept(asked(platform, ident), queued)
    platform.fail(503)
    with pytest.raises(Snooze):
        await replies.answer("paid", webhook, forty_two)
    assert await replies.give_up("dead", webhook) == "answered"
    assert await replies.tell_late(webhook) == 0, "the others have time"
    await aged(store, "late", 5)
    await aged(store, "paid", 5)
    await aged(store, "over", -1)
    assert await replies.tell_late(webhook) == 2
    assert await replies.tell_late(webhook) == 0
    assert platform.posts == {"token-dead": [FAILED], "token-late": [FAILED], "token-paid": ["42"]}, (
        "the paid answer is sent, not a note"
    )
    assert await state_of(store, "fresh") == "waiting"
