"""The `studyhall` command. Each command's module is imported when it is called: `--help` answers at once."""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .quick_imports import quick_imports

# name -> where it is, and the first line of its own help (a test compares them).
COMMANDS = {
    "worker": (
        "cli_worker:worker_command",
        "Take jobs and run them until SIGTERM; then running jobs finish or are released.",
    ),
    "event-worker": (
        "cli_event_worker:event_worker_command",
        "Publish events, drive orders, feed their consumers. Any number may run at once.",
    ),
    "api": ("cli_api:api_command", "Serve the API and the console until SIGTERM."),
    "demo": (
        "demo:demo_command",
        "A guided tour: documents flow, a worker is killed in the middle, a poison document is replayed.",
    ),
    "submit": (
        "cli_documents:submit_command",
        "Upload documents (PDF, DOCX, Markdown, text) and start their flow of jobs.",
    ),
    "status": ("cli_documents:status_command", "Documents and their progress."),
    "cancel": (
        "cli_cancel:cancel_command",
        "Stop a document's work, or a job and its flow: waiting, delayed or running. It does not come back.",
    ),
    "remind": (
        "cli_cancel:remind_command",
        "Remind the owner to go over a document in some days; asked again, the reminder moves.",
    ),
    "order": ("cli_orders:order", "Orders: buy a study pack, list orders, follow one."),
    "dlq": ("cli_dlq:app", "Dead letters: list, look at, replay or purge jobs that failed for good."),
    "saga": ("cli_saga:app", "Sagas: list, look at their timeline, repair the ones that got stuck."),
    "outbox": ("cli_orders:outbox", "Events on their way to the bus: how many, how old, what is stuck."),
    "events": (
        "cli_events:app",
        "Consumers of events: how far behind, what they could not read, and replay to one of them.",
    ),
    "schedule": ("cli_schedule:app", "Schedules: list them, or run one now."),
    "health": (
        "cli_maintenance:health_command",
        "Queues, dead letters and outbox in numbers. Exit code 1 when a limit is passed or an alert stands.",
    ),
    "limits": (
        "cli_limits:limits_command",
        "Queues and their limits, the AI provider's breaker, and requests that wait in the database.",
    ),
    "cleanup": (
        "cli_maintenance:cleanup_command",
        "Delete what is past its retention: markers, dead letters, checkpoints, files of deleted documents.",
    ),
    "chat": ("cli_chat:app", "The chat command /ask."),
}
HIDDEN = {"relay": ("cli_event_worker:relay_command", "The old name of event-worker.")}


class _OnDemand(TyperGroup):
    """Lists commands by name and help alone, and imports the one that is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(ctx, args)
        return name, command(str(name)), rest


app = typer.Typer(
    cls=_OnDemand,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # boxes around the help cost half of its time
)


def _say_version(wanted: bool) -> None:
    if wanted:
        from queuesmith.catalogue import version

        typer.echo(f"studyhall {version()}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print and exit.")]


@app.callback()
def _studyhall(version: Version = False) -> None:
    """StudyHall: a study assistant whose background work survives crashes, duplicates and outages."""


for _name, (_, _about) in (COMMANDS | HIDDEN).items():
    app.command(_name, short_help=_about, hidden=_name in HIDDEN)(lambda: None)


def command(name: str) -> Any:
    """The real command, imported now."""
    module, _, attribute = (COMMANDS | HIDDEN)[name][0].partition(":")
    with quick_imports():
        loaded = getattr(import_module(f".{module}", __package__), attribute)
    if isinstance(loaded, typer.Typer):
        return typer.main.get_group(loaded)
    alone = typer.Typer(add_completion=False)
    alone.command(name)(loaded)
    return typer.main.get_command(alone)


def main() -> None:
    try:
        if "--json" in sys.argv:  # then usage errors are JSON too
            sys.exit(app(standalone_mode=False) or 0)
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        # Not at the top: what can fail has imported them already, and --help needs none of them.
        from .patterns.core.errors import JobError
        from .patterns.engine import EngineError
        from .settings import SettingsError
        from .supervisor import UNUSABLE
        from .terminal import fail

        if isinstance(error, typer.exceptions.TyperException):
            usage: Any = error
            fail(usage.format_message() if hasattr(usage, "format_message") else "stopped")
            sys.exit(getattr(usage, "exit_code", 1))
        if not isinstance(error, SettingsError | EngineError | JobError):
            raise
        fail(str(error))
        sys.exit(1 if isinstance(error, JobError) else UNUSABLE)
