"""For bots on the gateway (discord.py): replaces api.py."""

from jobs import job_of
from patterns.deferred_reply import Interaction


async def deferred(replies, producer, command, **options):
    """Call it with the interaction and its options instead of doing the work."""
    await command.response.defer()  # within 3 s
    names = str(command.id), str(command.application_id), command.token
    asked = Interaction(*names, options=options)
    reply = await replies.accept(asked, lambda: producer.enqueue(job_of(asked)))
    if "data" in reply:  # Redis is away: say so now
        await command.edit_original_response(content=reply["data"]["content"])
