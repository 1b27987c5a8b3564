"""python worker.py: answers until SIGTERM; start as many as you like."""

import asyncio
import os
from functools import partial

from jobs import KEY, QUEUE, Task
from patterns.bullmq_worker import ReliableWorker
from patterns.core.clock import Periodic
from patterns.core.open_store import close, create_all, open_store
from patterns.dead_letter.sweeping import log_it, sweeping
from patterns.deadline import within_deadline
from patterns.deferred_reply import DeferredReplies, InteractionWebhook
from patterns.observability import configure_logging, logged
from patterns.pipeline import JobContext, Pipeline
from patterns.shutdown import run_until_signalled
from patterns.stall_budget import crash_budget
from patterns.typed_jobs import plain


async def think(task: Task, seconds: float) -> str:
    """Yours. Errors are retried while the token lives, then the user is told."""
    return f"You said: {task.model_dump_json()}"


async def main():
    configure_logging()
    url, store = os.environ["REDIS_URL"], open_store(os.environ["DATABASE_URL"])
    await create_all(store)
    replies = DeferredReplies(store)
    webhook = InteractionWebhook(os.environ["PLATFORM_URL"])

    async def handle(ctx: JobContext, task: Task) -> str:
        ident = str(getattr(task, KEY))
        return await replies.answer(ident, webhook, partial(think, task))

    async def alert(letter):  # its job is dead: tell the user now
        await log_it(letter)
        await replies.give_up(str(letter.data[KEY]), webhook)

    pipeline = Pipeline(
        logged(),
        plain(Task, handle, deadline=930),
        crash_budget(3),
        within_deadline(),
    )
    parts = [
        ReliableWorker(QUEUE, pipeline, url=url, concurrency=20),
        sweeping([QUEUE], store, url, alert),
        Periodic("late answers", lambda: replies.tell_late(webhook), every=2),
        Periodic("purge", lambda: replies.purge(older_than=86_400), every=3600),
    ]
    await run_until_signalled(parts, grace=25)
    await webhook.close()
    await close(store)


if __name__ == "__main__":
    asyncio.run(main())
