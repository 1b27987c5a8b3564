"""`studyhall event-worker`: publishes the outbox, drives the sagas and feeds the consumers, until SIGTERM."""

import asyncio
import json
import os
import signal
from functools import wraps
from typing import Annotated, Any

import typer

from . import event_worker
from .app import open_app
from .bus import open_bus
from .orders.consumers import GROUPS
from .patterns.parent_death import die_with_parent
from .settings import SettingsError
from .terminal import DataDir, run, say, settings_for


def event_worker_command(
    payment_url: Annotated[
        str | None, typer.Option(help="Address of the payment provider (or STUDYHALL_PAYMENT_URL).")
    ] = None,
    group: Annotated[
        list[str] | None, typer.Option(help=f"Only these consumers: {', '.join(GROUPS)}; may be repeated.")
    ] = None,
    data_dir: DataDir = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Publish events, drive orders, feed their consumers. Any number may run at once."""
    settings = settings_for(data_dir, quiet=False, payment_url=payment_url)
    unknown = sorted(set(group or ()) - set(GROUPS))
    if unknown:
        raise SettingsError(f"unknown consumer {unknown[0]!r}; there are {', '.join(GROUPS)}")
    if not settings.payment_url:
        raise SettingsError(
            "no payment provider: give --payment-url, or start the sandbox with `python -m studyhall.payment_sandbox`"
        )
    if parent is not None:
        die_with_parent(parent)
    provider = settings.payment_url

    async def work() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with open_app(settings) as studyhall, open_bus(settings.bus_url or studyhall.redis.url) as bus:
            print(json.dumps({"event": "ready", "pid": os.getpid(), "bus": bus.capabilities.broker}), flush=True)
            await event_worker.run(studyhall.store, bus, provider, stop=stop, groups=group or tuple(GROUPS))

    run(work())


@wraps(event_worker_command)
def relay_command(*args: Any, **options: Any) -> None:
    say("`studyhall relay` is now `studyhall event-worker`", err=True)
    event_worker_command(*args, **options)
