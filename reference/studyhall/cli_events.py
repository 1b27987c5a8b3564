"""`studyhall events`: how far each consumer is, what it could not read, and replay to one of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from .access import opened, redis_url
from .bus import open_bus
from .orders import GROUP_NAMES
from .patterns.core.errors import JobError
from .patterns.core.redaction import redact_text
from .patterns.event_bus import BrokerUnavailable, EventBus, Quarantined
from .terminal import AsJson, DataDir, ago, fail, run, say, settings_for, show_fields, show_json, show_table

app = typer.Typer(
    no_args_is_help=True,
    help="Consumers of events: how far behind, what they could not read, and replay to one of them.",
)

ALL = 100_000  # the limit where every entry is meant
Group = Annotated[str, typer.Option(help=f"One of {', '.join(GROUP_NAMES)}.")]


@asynccontextmanager
async def bus_of(data_dir: Path | None) -> AsyncIterator[EventBus]:
    """The bus of the settings; whatever its client raises becomes one line."""
    settings = settings_for(data_dir)
    settings.make_data_dir()
    with redis_url(settings) as redis:
        async with open_bus(settings.bus_url or redis) as bus:
            try:
                yield bus
            except (JobError, typer.Exit):
                raise
            except Exception as error:
                why = redact_text(f"{bus.capabilities.broker} does not answer, is it running? {error!r}")
                raise BrokerUnavailable(why) from error


@app.command()
def status(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Per consumer: events it has not finished, and events it gave up on."""

    async def work() -> list[dict[str, Any]]:
        async with bus_of(data_dir) as bus:
            return [
                {"group": group, "waiting": await bus.lag(group), "quarantined": len(await bus.quarantined(group, ALL))}
                for group in GROUP_NAMES
            ]

    rows = run(work())
    if as_json:
        show_json(rows)
        return
    show_table("Consumers", ["group", "waiting", "quarantined"], [list(row.values()) for row in rows], "")


@app.command()
def quarantine(
    group: Annotated[str | None, typer.Option(help=f"Only one of {', '.join(GROUP_NAMES)}.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most this many per consumer.")] = 50,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """What a consumer could not read or failed on for good, oldest first, with the reason."""
    groups = [_known(group)] if group is not None else list(GROUP_NAMES)

    async def work() -> list[dict[str, Any]]:
        async with bus_of(data_dir) as bus:
            return [_told(each, entry) for each in groups for entry in await bus.quarantined(each, limit=limit)]

    rows = run(work())
    if as_json:
        show_json(rows)
        return
    show_table(
        "Quarantined events",
        ["consumer", "id", "type", "when", "reason"],
        [[row["group"], row["id"], row["type"], ago(row["at"]), row["reason"]] for row in rows],
        "Every consumer could read everything.",
    )


@app.command()
def retry(
    group: Group,
    ids: Annotated[list[str] | None, typer.Argument(help="Ids from `studyhall events quarantine`.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All events of this consumer.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Deliver quarantined events again, to this consumer alone and with fresh attempts: after a fix."""
    _known(group)
    if bool(ids) == everything:
        raise fail("say which: ids from `studyhall events quarantine`, or --all", 2)

    async def work() -> tuple[int, int]:
        async with bus_of(data_dir) as bus:
            chosen = ids or [entry.id for entry in await bus.quarantined(group, ALL)]
            return await bus.replay_quarantined(group, chosen), len(chosen)

    count, wanted = run(work())
    show_json({"delivered": count}) if as_json else say(f"delivered {count} of {wanted} again")
    if count < wanted:
        raise fail("the others are not in quarantine; see: studyhall events quarantine", answered=True)


@app.command()
def replay(
    group: Group,
    *,
    since: Annotated[datetime | None, typer.Option(help="Events from this time on (local time).")] = None,
    before: Annotated[datetime | None, typer.Option(help="Events before this time (local time).")] = None,
    event: Annotated[list[str] | None, typer.Option(help="Only these event ids; may be repeated.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Apply again what it had already: repeats effects on purpose.")
    ] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Replay past events from the outbox to one consumer; what it had is skipped, no other notices."""
    _known(group)
    if since is None and before is None and not event:
        raise fail("say which: --since, --before or --event", 2)

    from .orders.consumers import GROUPS, inbox_name
    from .patterns.replay import ReplayReport, logged
    from .patterns.replay import replay as replay_to

    async def work() -> ReplayReport:
        async with opened(data_dir) as store:
            past = logged(store, since=_local(since), before=_local(before), ids=event or None)
            return await replay_to(store, inbox_name(group), past, GROUPS[group], force=force)

    report = run(work())
    show_json(asdict(report)) if as_json else show_fields(asdict(report))
    if report.failed:
        raise fail("some events failed again; those behind them of the same subject were left alone", answered=True)


def _known(group: str) -> str:
    if group not in GROUP_NAMES:
        raise fail(f"there is no consumer {group!r}; choose one of {', '.join(GROUP_NAMES)}", 2)
    return group


def _local(when: datetime | None) -> datetime | None:
    return when.astimezone() if when is not None else None


def _told(group: str, entry: Quarantined) -> dict[str, Any]:
    event = entry.event  # None: what was on the wire is not an event
    return {
        "group": group,
        "id": entry.id,
        "event": event.id if event else "",
        "type": event.type if event else entry.topic,
        "subject": event.subject if event else "",
        "tries": entry.deliveries,
        "at": entry.at.timestamp(),
        "reason": entry.reason,
    }
