"""`studyhall health` and `studyhall cleanup`: numbers of the queues, and deletion of old data."""

from dataclasses import asdict
from typing import Any

import typer

from .access import QUEUES, connected
from .patterns.health.alerts import raised, rule_for
from .terminal import AsJson, DataDir, run, say, settings_for, show_fields, show_json, show_table
from .watching import RULES, signals


def health_command(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Queues, dead letters and outbox in numbers. Exit code 1 when a limit is passed or an alert stands."""

    async def go() -> dict[str, Any]:
        async with connected(data_dir) as studyhall:
            measured, values = await signals(studyhall.redis, studyhall.store, QUEUES)
            standing = [asdict(alert) for alert in await raised(studyhall.store)]
        over = {
            name: rule.because
            for name, value in values.items()
            if (rule := rule_for(name, RULES)) and value >= rule.raise_at
        }
        fine = not over and not standing
        return {"healthy": fine, "over_limit": over, "alerts": standing, "signals": values, **measured.as_dict()}

    outcome = run(go())
    if as_json:
        show_json(outcome)
    else:
        _print(outcome)
    if not outcome["healthy"]:
        raise typer.Exit(1)


def _print(report: dict[str, Any]) -> None:
    columns = ["queue", "workers", "backlog", "oldest", "active", "delayed", "children", "failing", ""]
    rows = [
        [
            queue["queue"],
            "?" if queue["workers"] is None else queue["workers"],
            queue["backlog"],
            f"{queue['oldest']:.0f} s",
            queue["active"],
            queue["delayed"],
            queue["waiting_children"],
            f"{100 * queue['failure_rate']:.0f} %",
            "nobody works" if queue["unattended"] else "paused" if queue["paused"] else "",
        ]
        for queue in report["queues"]
    ]
    show_table("Queues", columns, rows, "No queues.")
    say(f"dead letters: {report['dead_letters']}, outbox: {report['signals']['outbox.oldest']:.0f} s behind")
    for name, because in report["over_limit"].items():
        say(f" is over its limit: {because}", name, "red", err=True)
    for alert in report["alerts"]:
        if alert["signal"] not in report["over_limit"]:
            say(" was over its limit and is not back below it", alert["signal"], "yellow", err=True)
    if report["healthy"]:
        idle = all(queue["workers"] == 0 for queue in report["queues"])
        say(": but nobody is working, no worker is alive" if idle else "", "healthy", "green")


def cleanup_command(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Delete what is past its retention: markers, dead letters, checkpoints, files of deleted documents."""
    from .database import open_database
    from .maintenance import clean_up

    async def go() -> dict[str, int]:
        settings = settings_for(data_dir)
        async with open_database(settings) as store:
            return (await clean_up(store, settings.blob_dir)).numbers()

    done = run(go())
    show_json(done) if as_json else show_fields(done)
