"""`studyhall dlq`: jobs that failed for good, and what to do about them."""

import json
from typing import Annotated, Any

import typer

from .access import QUEUES, connected, opened
from .patterns import dead_letter
from .patterns.core.job import DAY
from .patterns.core.redaction import redact
from .terminal import AsJson, DataDir, ago, ask, fail, run, say, show_fields, show_json, show_table

app = typer.Typer(no_args_is_help=True, help="Dead letters: list, look at, replay or purge jobs that failed for good.")


LetterId = Annotated[str, typer.Argument(metavar="DEAD_LETTER", help="Id from `studyhall dlq list`.")]


def _brief(letter: dead_letter.DeadLetter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "queue": letter.queue,
        "job": letter.job_id,
        "name": letter.name,
        "cause": letter.cause,
        "reason": letter.reason,
        "attempts": letter.attempts_made,
        "failed_at": letter.failed_at,
        "replayed_at": letter.replayed_at,
    }


def _trace(letter: dead_letter.DeadLetter) -> str:
    traces = json.loads(letter.snapshot["fields"].get("stacktrace") or "[]")
    return str(traces[-1]) if traces else ""


@app.command("list")
def list_(
    queue: Annotated[str | None, typer.Option(help="Only this queue.")] = None,
    replayed: Annotated[bool, typer.Option("--replayed", help="Those already replayed instead.")] = False,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most this many.")] = 50,
    after: Annotated[str | None, typer.Option(help="Next page: the last id of the page before.")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Newest first."""

    async def work() -> list[dict[str, Any]]:
        async with connected(data_dir) as studyhall:
            await dead_letter.sweep(QUEUES, studyhall.redis, studyhall.store)
            letters = await dead_letter.list_dead_letters(
                studyhall.store, queue=queue, replayed=replayed, limit=limit, after=after
            )
            return [_brief(letter) for letter in letters]

    letters = run(work())
    if as_json:
        show_json(letters)
        return
    show_table(
        "Dead letters",
        ["id", "job", "cause", "reason", "attempts", "failed"],
        [[x["id"], x["job"], x["cause"], x["reason"], x["attempts"], ago(x["failed_at"])] for x in letters],
        "No dead letters: every job that ended, ended well.",
    )


@app.command()
def show(letter: LetterId, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """One dead letter with its payload (secrets masked), its stack traces and the earlier deaths of the same job."""

    async def work() -> list[dead_letter.DeadLetter]:
        async with opened(data_dir) as store:
            return await dead_letter.show(store, letter)

    letters = run(work())
    detail = {
        **_brief(letters[0]),
        "payload": redact(letters[0].data),
        "trace": redact(_trace(letters[0])),
        "earlier": [_brief(earlier) for earlier in letters[1:]],
    }
    if as_json:
        show_json(detail)
    else:
        show_fields({**detail, "failed_at": ago(letters[0].failed_at)})


@app.command()
def replay(
    letter: Annotated[str | None, typer.Argument(metavar="DEAD_LETTER", help="Its id; none with --all.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Replay all that match --queue and --name.")] = False,
    queue: Annotated[str | None, typer.Option(help="With --all: only this queue.")] = None,
    name: Annotated[str | None, typer.Option(help="With --all: only jobs of this name.")] = None,
    rate: Annotated[float, typer.Option(min=0.01, help="With --all: at most this many per second.")] = 10.0,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Put jobs back into their queue, under their own id, with their history."""
    if (letter is None) == (not every):
        raise fail("name one dead letter, or say --all", 2)

    async def work() -> dict[str, Any]:
        async with connected(data_dir) as studyhall:
            redis, store = studyhall.redis, studyhall.store
            if letter is not None:
                return {"replayed": [(await dead_letter.replay(store, redis, letter)).job_id]}
            done = await dead_letter.replay_many(store, redis, queue=queue, name=name, per_second=rate)
            return {"replayed": done.job_ids, "refused": done.refused}

    done = run(work())
    if as_json:
        show_json(done)
    else:
        say(f"replayed {len(done['replayed'])}: {', '.join(done['replayed'][:10])}")
        for ident, why in done.get("refused", {}).items():
            say(f" {ident}: {why}", "left", "yellow")
    if done.get("refused"):
        raise typer.Exit(1)


@app.command()
def purge(
    older_than: Annotated[float, typer.Option("--older-than", min=0, help="Days.")] = 30.0,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Forget old dead letters for good."""
    if not yes:
        ask(f"Delete every dead letter older than {older_than:g} days?")

    async def work() -> int:
        async with opened(data_dir) as store:
            return await dead_letter.purge(store, older_than * DAY)

    purged = run(work())
    show_json({"purged": purged}) if as_json else say(f"purged {purged}")
