"""For bots on the gateway (discord.py): no api.py, the rest stays."""

from jobs import job_of
from patterns.deferred_reply import Interaction


async def deferred(replies, producer, interaction, **options):
    """Call it from the command, instead of doing the work there."""
    await interaction.response.defer()  # within 3 s
    names = str(interaction.id), str(interaction.application_id), interaction.token
    asked = Interaction(*names, options=options)
    said = await replies.accept(asked, lambda: producer.enqueue(job_of(asked)))
    if "data" in said:  # Redis is away: say so now
        await interaction.edit_original_response(content=said["data"]["content"])
