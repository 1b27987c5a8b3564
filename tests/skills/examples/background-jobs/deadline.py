# [use]
import asyncio
import sys

from patterns.core.job import Deadline
from patterns.deadline import owned_process, run_within
from patterns.typed_jobs import JobTypes, Payload

jobs = JobTypes()


class Render(Payload):
    page: str


# Attempt 1 gets 60 s, then 120, 240, at most 300. The pipeline stops the work before it raises.
@jobs.register(name="render", payload=Render, deadline=Deadline(60, growth=2, longest=300))
async def render(ctx, payload: Render) -> str:
    async with owned_process(sys.executable, "-c", "print('pdf')", stdout=asyncio.subprocess.PIPE) as child:
        out, _ = await child.communicate()  # the deadline kills the whole process group
    return out.decode().strip()


async def with_partial_result(pages, read) -> list:
    """Outside the pipeline, keeping what was finished when time ran out (`error.partial`)."""
    pages_read: list = []

    async def work() -> list:
        for page in pages:
            pages_read.extend([await read(page)])
        return pages_read

    return await run_within(30, work, partial=lambda: list(pages_read))


# [/use]


async def example(redis_url: str, store_url: str) -> None:
    from patterns.deadline import DeadlineExceeded

    assert await render.handler(None, Render(page="1")) == "pdf"

    async def read(page: int) -> int:
        await asyncio.sleep(0 if page < 2 else 60)
        return page

    assert await with_partial_result([0, 1], read) == [0, 1]
    try:
        await run_within(0.1, read, 2, partial=lambda: "so far")
    except DeadlineExceeded as error:
        kept = error.partial
    assert kept == "so far", "hung work is stopped, what it had is kept"
