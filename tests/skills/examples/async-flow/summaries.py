# [job]
# summaries.py: the job type, shared by the API and the worker (background-jobs skill)
from patterns.pipeline import Done, JobContext
from patterns.typed_jobs import JobTypes, Payload

jobs = JobTypes()


class Summarise(Payload):
    text: str


@jobs.register(name="summarise", payload=Summarise, queue="ai", deadline=120.0)
async def summarise(ctx: JobContext, payload: Summarise) -> Done:
    await ctx.progress("reading", 10, "reading the text")
    words = payload.text.split()
    await ctx.progress("writing", 90, f"{len(words)} words")
    return Done({"summary": " ".join(words[:5])})


# [/job]
