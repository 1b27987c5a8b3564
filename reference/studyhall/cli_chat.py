"""`studyhall chat register`: declare the command `/ask` on the chat platform. Once per application."""

import os
import time
from typing import Annotated
from urllib.parse import quote

import httpx2
import typer

from .patterns.core.errors import Permanent, RateLimited, Transient
from .patterns.retry import parse_retry_after
from .settings import SettingsError
from .terminal import DataDir, run, say, settings_for

app = typer.Typer(no_args_is_help=True, help="The chat command /ask.")
BOT_TOKEN = "CHAT_BOT_TOKEN"
COMMANDS = [
    {
        "name": "ask",
        "description": "Ask about your documents",
        "options": [{"type": 3, "name": "question", "description": "What you want to know", "required": True}],
    }
]


@app.command("register")
def register_command(
    application: Annotated[str, typer.Argument(help="Id of the application on the platform.")], data_dir: DataDir = None
) -> None:
    """Declare /ask; repeating it changes nothing. The bot's token comes from CHAT_BOT_TOKEN."""
    token = os.environ.get(BOT_TOKEN, "")
    if not token:
        raise SettingsError(f"put the bot's token into {BOT_TOKEN}; an option would end up in the shell's history")
    run(register(settings_for(data_dir).chat_url, application, token))
    say("registered /ask")


async def register(base_url: str, application: str, token: str) -> None:
    """A call outside any queue, with somebody waiting for it: a few tries, then say what is wrong."""
    from .patterns import inline_retry  # its library comes with the api extra

    url = f"{base_url.rstrip('/')}/applications/{quote(application, safe='')}/commands"
    async with httpx2.AsyncClient(timeout=10, follow_redirects=False) as client:

        async def put() -> None:
            try:
                reply = await client.put(url, json=COMMANDS, headers={"authorization": f"Bot {token}"})
            except httpx2.HTTPError as error:
                raise Transient(f"the chat platform cannot be reached ({type(error).__name__})") from None
            if reply.status_code == 429:
                wait = parse_retry_after(reply.headers.get("retry-after"), time.time())
                raise RateLimited("the chat platform asks us to wait", retry_after=wait or 1.0)
            if reply.status_code >= 500:
                raise Transient(f"the chat platform answered {reply.status_code}")
            if reply.status_code >= 300:
                raise Permanent(f"the chat platform refused ({reply.status_code}): check the id and the token")

        await inline_retry.call(put, attempts=4, timeout=30)
