"""`studyhall schedule`: what runs by the clock."""

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from .app import open_app
from .patterns.producer import JobRequest
from .schedules import schedules
from .terminal import AsJson, DataDir, run, say, settings_for, show_json, show_table

app = typer.Typer(no_args_is_help=True, help="Schedules: list them, or run one now.")


def _moment(millis: int | None) -> str | None:
    return datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="seconds") if millis else None


@app.command("list")
def list_(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Every schedule, when it runs next, and what became of its ticks. A worker applies them."""

    async def go() -> list[dict[str, Any]]:
        async with open_app(settings_for(data_dir)) as studyhall:
            declared = schedules(studyhall.jobs, studyhall.settings, studyhall.signer)
            return [
                {
                    "id": state.schedule.id,
                    "job": state.schedule.job,
                    "when": str(state.schedule.cadence),
                    "next": _moment(state.next_slot),
                    "last": _moment(state.last_slot),
                    "ticks": state.ticks,
                    "missed": state.missed,
                    "skipped": state.skipped,
                }
                for state in await declared.states(studyhall.producer, studyhall.store)
            ]

    rows = run(go())
    if as_json:
        show_json(rows)
        return
    show_table(
        "Schedules (times in UTC)",
        ["id", "when", "next", "last", "ticks", "missed", "skipped"],
        [
            [
                row["id"],
                row["when"],
                row["next"] or "not applied: start a worker",
                row["last"] or "never",
                row["ticks"],
                row["missed"],
                row["skipped"],
            ]
            for row in rows
        ],
        "No schedules are declared.",
    )


@app.command("run")
def run_(
    schedule: Annotated[str, typer.Argument(help="Id of a schedule.")],
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Run a schedule's job now, beside its regular ticks."""

    async def go() -> str:
        async with open_app(settings_for(data_dir)) as studyhall:
            task = schedules(studyhall.jobs, studyhall.settings, studyhall.signer)[schedule]
            # Not a long number: one in ten of those is redacted in logs, because it could be a card's.
            key = f"{task.id}-by-hand-{datetime.now(UTC):%Y%m%dT%H%M%S-%f}"
            return (await studyhall.producer.enqueue(JobRequest(task.job, task.payload, key=key))).id

    job = run(go())
    show_json({"job": job}) if as_json else say(f"queued as {job}")
