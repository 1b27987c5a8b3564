"""`studyhall saga`: what every saga is doing, and repair by hand of those that got stuck."""

import getpass
import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from .access import opened
from .patterns.core.redaction import redact
from .patterns.saga import repair as saga_repair
from .patterns.saga import store as saga_store
from .terminal import AsJson, DataDir, ago, fail, run, say, show_fields, show_json, show_table

app = typer.Typer(no_args_is_help=True, help="Sagas: list, look at their timeline, repair the ones that got stuck.")

STATES = ("running", "compensating", "needs_repair", "completed", "compensated")


@app.command("list")
def list_(
    state: Annotated[str | None, typer.Option(help=f"Only one state: {', '.join(STATES)}.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most this many.")] = 50,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Newest change first. `--state needs_repair` is the list that waits for you."""
    if state is not None and state not in STATES:
        raise fail(f"there is no state {state!r}; choose one of {', '.join(STATES)}", 2)

    async def work() -> list[saga_store.SagaRow]:
        async with opened(data_dir) as store:
            return await saga_store.list_sagas(store, state=state, limit=limit)

    sagas = run(work())
    if as_json:
        show_json([_brief(saga) for saga in sagas])
        return
    show_table(
        "Sagas",
        ["id", "saga", "state", "changed", "why"],
        [[saga.id, saga.name, saga.state, ago(saga.updated_at), saga.error or ""] for saga in sagas],
        "No saga waits for a human." if state == "needs_repair" else "No sagas. Try: studyhall order buy biology-101",
    )


@app.command()
def show(saga: str, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """One saga with its steps and everything that ever happened to it."""

    async def work() -> tuple[saga_store.SagaRow, list[saga_store.HistoryRow]]:
        async with opened(data_dir) as store:
            return await saga_store.load(store, saga), await saga_store.history(store, saga)

    row, history = run(work())
    if as_json:
        steps = [redact(asdict(step)) for step in row.steps]
        show_json({**_brief(row), "data": redact(row.data), "steps": steps, "history": list(map(asdict, history))})
        return
    show_fields({**_brief(row), "data": json.dumps(redact(row.data))})
    show_table(
        "Steps",
        ["step", "state", "tries", "undo tries", "result"],
        [[s.name, s.state, s.attempts, s.undo_attempts, json.dumps(redact(s.result))] for s in row.steps],
        "no steps",
    )
    show_table(
        "Timeline",
        ["time (UTC)", "step", "what", "detail", "by"],
        [[_clock(entry.at), entry.step or "", entry.event, entry.detail or "", entry.actor] for entry in history],
        "nothing yet",
    )


@app.command()
def repair(
    saga: str,
    *,
    note: Annotated[str, typer.Option(help="What you found and did; kept in the timeline.")],
    retry: Annotated[bool, typer.Option("--retry", help="Try the stuck step again, with all its attempts.")] = False,
    done: Annotated[str | None, typer.Option(metavar="STEP", help="You did this step by hand.")] = None,
    undone: Annotated[str | None, typer.Option(metavar="STEP", help="You took this step back by hand.")] = None,
    compensate: Annotated[bool, typer.Option("--compensate", help="Stop, and take back what was done.")] = False,
    result: Annotated[str | None, typer.Option(metavar="JSON", help="With --done: what the step returns.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also in the middle of a call, which may still take effect.")
    ] = False,
    by: Annotated[str | None, typer.Option(help="Who repairs (default: your user name).")] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Say how a stuck saga goes on; a running event worker picks it up at once."""
    if sum((retry, done is not None, undone is not None, compensate)) != 1:
        raise fail("say exactly one of --retry, --done STEP, --undone STEP, --compensate", 2)
    if result is not None and done is None:
        raise fail("--result belongs to --done STEP", 2)
    try:
        value = json.loads(result or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise fail('--result is a JSON object, for example \'{"id": "ch_1"}\'', 2)
    who = by or getpass.getuser()

    async def work() -> saga_store.SagaRow:
        async with opened(data_dir) as store:
            if retry:
                await saga_repair.retry(store, saga, by=who, note=note, force=force)
            elif compensate:
                await saga_repair.compensate(store, saga, by=who, note=note, force=force)
            elif done is not None:
                await saga_repair.mark(store, saga, done, "done", by=who, note=note, result=value, force=force)
            else:
                await saga_repair.mark(store, saga, str(undone), "undone", by=who, note=note, force=force)
            return await saga_store.load(store, saga)

    row = run(work())
    if as_json:
        show_json(_brief(row))
    else:
        say(f"saga {row.id} is {row.state} again; follow it with: studyhall saga show {row.id}")


def _brief(saga: saga_store.SagaRow) -> dict[str, Any]:
    return {
        "id": saga.id,
        "saga": saga.name,
        "state": saga.state,
        "error": saga.error,
        "owner": saga.owner,
        "due_at": saga.due_at,
        "created_at": saga.created_at,
        "updated_at": saga.updated_at,
    }


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%m-%d %H:%M:%S.%f")[:-3]
