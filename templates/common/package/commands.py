{@% set jobs = kind != 'event-driven' %@}
{@% set scheduled = jobs and 'schedule' in patterns %@}
"""For operators: what waits, what failed, and what to do about it.

Every command prints a table, or JSON with --json; errors too. Times are in UTC.
"""

from __future__ import annotations

import argparse
import asyncio
{@% if not jobs %@}
import getpass
{@% endif %@}
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import {@ 'asdict, ' if not jobs @}dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn

from redis.exceptions import RedisError

from .app import App, open_app
{@% if not jobs %@}
from .bus import open_bus
from .consumers import GROUPS
{@% endif %@}
{@% if scheduled %@}
from .jobs import schedules
{@% endif %@}
from .lookup import look
{@% if jobs %@}
from .patterns import dead_letter
{@% endif %@}
from .patterns.core.errors import JobError{@ ', QueueUnavailable' if jobs @}, clean_text
{@% if jobs %@}
from .patterns.core.job import DAY
{@% endif %@}
from .patterns.core.open_store import WrongStoreUrl
from .patterns.core.redaction import redact
{@% if scheduled %@}
from .patterns.core.request import JobRequest
{@% endif %@}
from .patterns.engine import EngineError
from .patterns.health.alerts import raised, rule_for
from .patterns.observability import configure_logging
{@% if not jobs %@}
from .patterns.outbox import quarantine as outbox
from .patterns.replay import logged, replay
from .patterns.saga import repair
from .patterns.saga import store as sagas
{@% endif %@}
from .settings import SettingsError, environment, load
from .upkeep import RULES, clean_up, measured

__all__ = ["main"]

{@% if not jobs %@}
OUTBOX = "outbox"  # what could not be published, beside what a group could not read
MOST = 100_000
{@% endif %@}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """`data` as JSON; `rows`, or else `data`, as a table. `code`: the exit code."""

    data: Any
    rows: list[Row] | None = None
    code: int = 0


Do = Callable[[App, argparse.Namespace], Awaitable[Answer]]


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if "--json" in sys.argv:
            print(json.dumps({"error": message}))
            self.exit(2)
        super().error(message)


def main(argv: Sequence[str]) -> int:
    # What is not UTF-8 arrives as half characters, which no database takes.
    options = _parser().parse_args([each.encode(errors="replace").decode() for each in argv])
    try:
        settings = load(environment())
        configure_logging("warning", style="human")

        async def go() -> Answer:
            async with open_app(settings, redis_may_be_away=options.redis_may_be_away) as app:
                do: Do = options.do
                return await do(app, options)

        answer = asyncio.run(go())
    except (JobError, SettingsError, EngineError, WrongStoreUrl, RedisError) as error:
        # What redis-py says may quote a payload.
        text = type(error).__name__ if isinstance(error, RedisError) else clean_text(str(error), 1_000)
        if options.json:
            print(json.dumps({"error": text}))
        else:
            print(f"error: {text}", file=sys.stderr)
        return 1
    try:
        if options.json:
            print(json.dumps(answer.data, indent=2, default=str))
        else:
            rows = answer.rows if answer.rows is not None else answer.data
            _show(rows if isinstance(rows, list) else [{"": name, "value": value} for name, value in rows.items()])
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return answer.code


def _parser() -> Parser:
    parser = Parser(prog="{@ package @}", description=__doc__)
    groups = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(group: Any, name: str, do: Do, about: str, *, redis: bool = True) -> argparse.ArgumentParser:
        sub: argparse.ArgumentParser = group.add_parser(name, help=about, description=about)
        sub.add_argument("--json", action="store_true", help="for scripts")
        sub.set_defaults(do=do, redis_may_be_away=not redis)
        return sub

{@% if jobs %@}
    dlq = groups.add_parser("dlq", help="jobs that failed for good").add_subparsers(required=True)
    sub = command(dlq, "list", dlq_list, "those that wait for a person, the newest first", redis=False)
    sub.add_argument("--limit", type=_count, default=50)
    sub.add_argument("--after", metavar="ID", help="next page: the last id of the page before")
    command(dlq, "show", dlq_show, "one, with payload and stack trace", redis=False).add_argument("id")
    sub = command(dlq, "replay", dlq_replay, "back into the queue, under their own ids")
    sub.add_argument("id", nargs="*")
    sub.add_argument("--all", action="store_true", help="all that wait, ten a second")
    sub = command(dlq, "purge", dlq_purge, "forget old ones for good", redis=False)
    sub.add_argument("--older-than", type=_days, required=True, metavar="DAYS")
    sub.add_argument("--yes", action="store_true", help="do not ask")
{@% if scheduled %@}
    clock = groups.add_parser("schedule", help="what runs by the clock").add_subparsers(required=True)
    command(clock, "list", schedule_list, "when each runs next, and what became of its ticks")
    command(clock, "run", schedule_run, "one of them now, beside its ticks").add_argument("id")
{@% endif %@}
{@% else %@}
    events = groups.add_parser("events", help="how far each group is").add_subparsers(required=True)
    command(events, "list", events_list, "the outbox and every group of consumers")
    command(events, "quarantine", events_quarantine, "what could not be published or handled, and why")
    sub = command(events, "retry", events_retry, "these again, after a fix: to this group alone")
    sub.add_argument("group", choices=[OUTBOX, *GROUPS])
    sub.add_argument("id", nargs="*")
    sub.add_argument("--all", action="store_true")
    sub = command(events, "replay", events_replay, "past events for one group; what it had is skipped")
    sub.add_argument("group", choices=list(GROUPS))
    sub.add_argument("--since", type=_moment, metavar="TIME", help="2026-11-30T12:00, in UTC")
    sub.add_argument("--before", type=_moment, metavar="TIME")
    sub.add_argument("--event", action="append", metavar="ID")
    sub.add_argument("--force", action="store_true", help="also what it had: repeats effects on purpose")
    saga = groups.add_parser("saga", help="what each saga is doing").add_subparsers(required=True)
    sub = command(saga, "list", saga_list, "the newest change first", redis=False)
    sub.add_argument("--state", help="needs_repair: those that wait for a person")
    command(saga, "show", saga_show, "its steps and all that happened", redis=False).add_argument("id")
    sub = command(saga, "repair", saga_repair, "how a stuck one goes on", redis=False)
    sub.add_argument("id")
    sub.add_argument("--note", required=True, help="what you found and did; kept in its history")
    how = sub.add_mutually_exclusive_group(required=True)
    how.add_argument("--retry", action="store_true", help="the stuck step again, with all its attempts")
    how.add_argument("--done", metavar="STEP", help="you did this step by hand")
    how.add_argument("--undone", metavar="STEP", help="you took this step back by hand")
    how.add_argument("--compensate", action="store_true", help="stop, and take back what was done")
    sub.add_argument("--result", type=json.loads, metavar="JSON", help="with --done: what the step returns")
    sub.add_argument("--force", action="store_true", help="also in the middle of a call")
{@% endif %@}
    command(groups, "health", health, "every signal and its limit; exit code 1 when one is over it", redis=False)
    command(groups, "purge", purge, "delete what is older than KEPT_DAYS", redis=False)
    command(groups, "status", status, "how far a request is").add_argument("id")
    return parser


async def health(app: App, options: argparse.Namespace) -> Answer:
    _, signals = await measured(app)
    standing = {alert.signal: alert.since for alert in await raised(app.store)}
    rows = []
    for name, value in signals.items():
        rule = rule_for(name, RULES)
        over = rule is not None and value >= rule.raise_at
        row = {"signal": name, "value": round(value, 3), "limit": rule.raise_at if rule else ""}
        because = rule.because if rule and (over or name in standing) else ""
        rows.append({**row, "alert_since_at": standing.get(name), "over": over, "because": because})
    healthy = not standing and not any(row["over"] for row in rows)
    return Answer({"healthy": healthy, "signals": rows}, rows, 0 if healthy else 1)


async def purge(app: App, options: argparse.Namespace) -> Answer:
    return Answer(await clean_up(app))


async def status(app: App, options: argparse.Namespace) -> Answer:
    if (state := await look(app, options.id)) is None:
        raise JobError(f"there is nothing with the id {options.id!r}")
    return Answer(state.model_dump())


{@% if jobs %@}
async def dlq_list(app: App, options: argparse.Namespace) -> Answer:
    try:
        async with app.producer.bounded(10):
            await dead_letter.sweep(app.jobs.queues, app.producer.redis, app.store)
    except QueueUnavailable:  # the archive can be read all the same
        print("Redis does not answer: jobs that failed since the last sweep are missing here", file=sys.stderr)
    letters = await dead_letter.list_dead_letters(app.store, limit=options.limit, after=options.after)
    return Answer([_letter(letter) for letter in letters])


async def dlq_show(app: App, options: argparse.Namespace) -> Answer:
    letter, *earlier = await dead_letter.show(app.store, options.id)
    trace = json.loads(letter.snapshot["fields"].get("stacktrace") or "[]")[-1:]
    row = {**_letter(letter), "payload": redact(letter.data), "trace": redact("".join(trace))}
    return Answer({**row, "earlier": [_letter(each) for each in earlier]})


async def dlq_replay(app: App, options: argparse.Namespace) -> Answer:
    if bool(options.id) == options.all:
        raise JobError("replay which? Name their ids, or --all")
    done = await dead_letter.replay_many(app.store, app.producer.redis, options.id or None)
    return Answer({"replayed": done.job_ids, "refused": done.refused}, code=1 if done.refused else 0)


async def dlq_purge(app: App, options: argparse.Namespace) -> Answer:
    if not options.yes:
        _ask(f"Delete every dead letter older than {options.older_than:g} days?")
    return Answer({"dead_letters": await dead_letter.purge(app.store, options.older_than * DAY)})


def _count(text: str) -> int:
    if not 1 <= (count := int(text)) <= 10_000:
        raise argparse.ArgumentTypeError("say a number from 1 to 10000")
    return count


def _days(text: str) -> float:
    if not 0 <= (days := float(text)) <= 36_500:
        raise argparse.ArgumentTypeError("say a number of days from 0 to 36500")
    return days


def _ask(question: str) -> None:
    """Go on only after a yes. A script says --yes: it has nobody to ask."""
    if not sys.stdin.isatty():
        raise JobError("there is no terminal to ask; to go on anyway: --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if input().strip().lower() not in ("y", "yes"):
        raise JobError("nothing was deleted")


def _letter(letter: dead_letter.DeadLetter) -> Row:
    names = ("id", "failed_at", "cause", "attempts_made", "name", "queue", "job_id", "reason")
    return {name: getattr(letter, name) for name in names}
{@% if scheduled %@}


async def schedule_list(app: App, options: argparse.Namespace) -> Answer:
    rows = []
    for state in await schedules(app.jobs, app.signer).states(app.producer, app.store):
        next_at, last_at = (None if slot is None else slot / 1000 for slot in (state.next_slot, state.last_slot))
        row = {"id": state.schedule.id, "next_at": next_at, "last_at": last_at, "ticks": state.ticks}
        rows.append({**row, "missed": state.missed, "skipped": state.skipped, "when": str(state.schedule.cadence)})
    return Answer(rows)


async def schedule_run(app: App, options: argparse.Namespace) -> Answer:
    task = schedules(app.jobs, app.signer)[options.id]
    key = f"{task.id}-by-hand-{datetime.now(UTC):%Y%m%dT%H%M%S-%f}"
    return Answer({"job": (await app.producer.enqueue(JobRequest(task.job, task.payload, key=key))).id})
{@% endif %@}
{@% else %@}
async def events_list(app: App, options: argparse.Namespace) -> Answer:
    lag = await outbox.lag(app.store)
    rows = [{"group": OUTBOX, "waiting": lag.waiting, "quarantined": lag.quarantined}]
    async with open_bus(app.settings, app.server.url) as bus:
        for group in GROUPS:
            aside = len(await bus.quarantined(group, MOST))
            rows.append({"group": group, "waiting": await bus.lag(group), "quarantined": aside})
    return Answer(rows)


async def events_quarantine(app: App, options: argparse.Namespace) -> Answer:
    rows = []
    for given_up in await outbox.quarantined(app.store):
        row = {"id": given_up.event_id, "group": OUTBOX, "tries": given_up.attempts, "at": None}
        rows.append({**row, "type": given_up.type, "reason": given_up.reason})
    async with open_bus(app.settings, app.server.url) as bus:
        for group in GROUPS:
            for entry in await bus.quarantined(group):
                row = {"id": entry.id, "group": group, "tries": entry.deliveries, "at": entry.at.timestamp()}
                what = entry.event.type if entry.event else entry.topic
                rows.append({**row, "type": what, "reason": entry.reason})
    return Answer(rows)


async def events_retry(app: App, options: argparse.Namespace) -> Answer:
    if bool(options.id) == options.all:
        raise JobError("retry which? Name their ids, or --all")
    if options.group == OUTBOX:
        all_of_it = [row.event_id for row in await outbox.quarantined(app.store, limit=MOST)]
        done = await outbox.requeue(app.store, options.id or all_of_it)
    else:
        async with open_bus(app.settings, app.server.url) as bus:
            all_of_it = [entry.id for entry in await bus.quarantined(options.group, MOST)]
            done = await bus.replay_quarantined(options.group, options.id or all_of_it)
    return Answer({"retried": done}, code=1 if done < len(options.id) else 0)


async def events_replay(app: App, options: argparse.Namespace) -> Answer:
    if not (options.since or options.before or options.event):
        raise JobError("replay which? Say --since, --before or --event")
    past = logged(app.store, since=options.since, before=options.before, ids=options.event)
    report = await replay(app.store, options.group, past, GROUPS[options.group], force=options.force)
    return Answer(asdict(report), code=1 if report.failed else 0)


async def saga_list(app: App, options: argparse.Namespace) -> Answer:
    return Answer([_saga(saga) for saga in await sagas.list_sagas(app.store, state=options.state)])


async def saga_show(app: App, options: argparse.Namespace) -> Answer:
    saga, past = await sagas.load(app.store, options.id), await sagas.history(app.store, options.id)
    steps, history = redact([asdict(step) for step in saga.steps]), [asdict(each) for each in past]
    row = {**_saga(saga), "data": redact(saga.data), "steps": steps, "history": history}
    return Answer(row, history)


async def saga_repair(app: App, options: argparse.Namespace) -> Answer:
    by = {"by": getpass.getuser(), "note": options.note, "force": options.force}
    if options.retry:
        await repair.retry(app.store, options.id, **by)
    elif options.compensate:
        await repair.compensate(app.store, options.id, **by)
    elif options.done:
        await repair.mark(app.store, options.id, options.done, "done", result=options.result, **by)
    else:
        await repair.mark(app.store, options.id, options.undone, "undone", **by)
    return Answer(_saga(await sagas.load(app.store, options.id)))


def _saga(saga: sagas.SagaRow) -> Row:
    return {name: getattr(saga, name) for name in ("id", "state", "updated_at", "created_at", "name", "error")}


def _moment(text: str) -> datetime:
    when = datetime.fromisoformat(text)
    return when if when.tzinfo else when.replace(tzinfo=UTC)
{@% endif %@}


def _show(rows: list[Row]) -> None:
    """Columns that fit stand side by side, the rest below; ids stay whole, to be copied."""
    if not rows:
        print("nothing")
        return
    wide = shutil.get_terminal_size((80, 24)).columns
    cells = [{name: _cell(name, value) for name, value in row.items()} for row in rows]
    sizes = {name: max(len(name), *(len(row[name]) for row in cells)) for name in cells[0]}
    beside: list[str] = []
    for name, size in sizes.items():
        if sum(sizes[column] + 2 for column in beside) + size > wide:
            break
        beside.append(name)
    print("  ".join(f"{name:<{sizes[name]}}" for name in beside).rstrip())
    for row in cells:
        print("  ".join(f"{row[name]:<{sizes[name]}}" for name in beside).rstrip())
        for name in sizes:
            if name not in beside and row[name]:
                text = f"{name}: {row[name]}".strip(": ")
                fold = textwrap.TextWrapper(wide, "    ", "      ", break_long_words=False, break_on_hyphens=False)
                print(fold.fill(text))


def _cell(name: str, value: Any) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, float) and name.endswith("at"):
        return f"{datetime.fromtimestamp(value, UTC):%Y-%m-%d %H:%M:%S}"
    # Foreign text must not move the cursor.
    return clean_text(value if isinstance(value, str) else json.dumps(value, default=str))
