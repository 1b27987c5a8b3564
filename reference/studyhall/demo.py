"""`studyhall demo`: a guided tour that kills its own worker and shows that nothing is lost or duplicated."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from sqlalchemy import func, select

from . import db
from .app import App, open_app
from .demo_orders import buy_packs
from .jobs import STAGES
from .patterns import dead_letter, idempotency
from .patterns.core.store import read
from .patterns.engine import RedisServer
from .settings import Settings
from .stages import StageState
from .submissions import replace_file, states, submit
from .terminal import run, settings_for

SAMPLES = Path(__file__).parents[1] / "samples"
OWNER = "demo"
PACE = 0.45  # seconds per part of a document: long enough to watch a graph grow and to kill in the middle


@dataclass(slots=True)
class WorkerProcess:
    """A worker of the tour: one process that we may kill. Its log goes to a file, its executions are counted."""

    process: asyncio.subprocess.Process
    log: Path

    def executions(self) -> Counter[str]:
        """job id -> how often this worker ran it to an end"""
        ran: Counter[str] = Counter()
        for line in self.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry.get("outcome") == "completed":
                    ran[entry["job_id"]] += 1
        return ran


@dataclass(slots=True)
class Story:
    """What happened, for the table at the end."""

    documents: list[str] = field(default_factory=list)
    workers: list[WorkerProcess] = field(default_factory=list)
    killed: int = 0
    resumed_at: str = ""
    recovery: float = 0.0
    dead_letters: int = 0
    replayed: int = 0
    orders: dict[str, object] = field(default_factory=dict)


def demo_command(
    keep: Annotated[bool, typer.Option("--keep", help="Leave everything running at the end, until Ctrl-C.")] = False,
) -> None:
    """A guided tour: documents flow, a worker is killed in the middle, a poison document is replayed."""
    raise typer.Exit(run(tour(settings_for(None), keep=keep, console=Console())))


async def tour(settings: Settings, *, keep: bool, console: Console) -> int:
    """Run the tour in its own data dir. 0 when every promise held."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="studyhall-")))
        # Nobody's real data.
        settings = settings.model_copy(update={"data_dir": folder, "database_url": None, "processes": 1})
        story, began = Story(), time.monotonic()
        async with _server_ended() as server, open_app(settings) as app, _stopping(story.workers):
            server.append(app.redis)
            console.rule("[bold]StudyHall")
            where = "embedded" if app.redis.owned else "yours"
            console.print(f"Redis/Valkey {app.redis.version} ({where}), SQLite, a local provider: no key, no network.")
            await _start_worker(app, story, console)
            await _follow_documents(app, story, console)
            await _poison(app, story, folder, console)
            story.orders = await buy_packs(app, folder, console)
            held = await _summary(app, story, time.monotonic() - began, console)
            if keep:
                await _keep_running(app, console)
            return 0 if held else 1


@contextlib.asynccontextmanager
async def _server_ended() -> AsyncIterator[list[RedisServer]]:
    """Waits until our embedded server has ended, after its last user: until then it writes files."""
    servers: list[RedisServer] = []
    try:
        yield servers
    finally:
        deadline = time.monotonic() + 15
        for pid in [server.pid for server in servers if server.owned and server.pid]:
            with contextlib.suppress(ProcessLookupError):
                while time.monotonic() < deadline:
                    os.kill(pid, 0)
                    await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def _stopping(workers: list[WorkerProcess]) -> AsyncIterator[None]:
    """Whatever happens, Ctrl-C included: no worker stays behind."""
    try:
        yield
    finally:
        for worker in workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.terminate()
        for worker in workers:
            try:
                async with asyncio.timeout(10):
                    await worker.process.wait()
            except TimeoutError:
                worker.process.kill()
                await worker.process.wait()


async def _start_worker(app: App, story: Story, console: Console) -> WorkerProcess:
    number = len(story.workers) + 1
    log = app.settings.data_dir / f"worker-{number}.log"
    env = {
        **os.environ,
        "STUDYHALL_PROVIDER_PACE": str(PACE),
        "STUDYHALL_GRACE_SECONDS": "3",
        "STUDYHALL_LOG_FORMAT": "json",
        "DATABASE_URL": "",
    }
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "studyhall",
            "worker",
            "--processes",
            "1",
            "--data-dir",
            str(app.settings.data_dir),
            "--parent",
            str(os.getpid()),
            stdout=out,
            stderr=out,
            env=env,
            start_new_session=True,
        )
    worker = WorkerProcess(process, log)
    story.workers.append(worker)
    deadline = time.monotonic() + 30
    while '"ready"' not in log.read_text(errors="replace"):
        if process.returncode is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the worker did not start:\n{log.read_text(errors='replace')[-2000:]}")
        await asyncio.sleep(0.05)
    console.print(f"Worker {number} runs as process {process.pid}.")
    return worker


async def _follow_documents(app: App, story: Story, console: Console) -> None:
    paths = sorted(path for path in SAMPLES.iterdir() if path.suffix in (".md", ".docx", ".pdf"))
    console.print(
        f"\n[bold]1.[/] Uploading {len(paths)} documents: text -> graph -> quiz -> explanations, one flow each."
    )
    for path in paths:
        story.documents.append(await submit(app, path, OWNER))
    with _bars(console) as bars:
        tasks = {
            ident: bars.add_task(path.name, total=100, what="")
            for ident, path in zip(story.documents, paths, strict=True)
        }
        killed_at = 0.0
        while True:
            every = {ident: await states(app, ident) for ident in story.documents}
            for ident, stages in every.items():
                _show(bars, tasks[ident], stages)
            graph = [stage for stages in every.values() for stage in stages if stage.name == "graph-generation"]
            if not story.killed and any(stage.state == "active" and stage.percent >= 40 for stage in graph):
                story.workers[0].process.send_signal(signal.SIGKILL)
                await story.workers[0].process.wait()
                story.killed, killed_at = 1, time.monotonic()
                busy = sum(stage.state == "active" for stage in graph)
                story.resumed_at = ", ".join(f"{stage.percent:.0f} %" for stage in graph if stage.state == "active")
                bars.console.print(
                    f"\n[bold red]2.[/] SIGKILL to worker 1 in the middle of {busy} graphs. Nobody told Redis: "
                    "their locks run out, then another worker takes the jobs over, from their last checkpoint."
                )
                await _start_worker(app, story, bars.console)
            if killed_at and not story.recovery and await _taken_over(app):
                story.recovery = time.monotonic() - killed_at
            if all(stage.state == "completed" for stages in every.values() for stage in stages):
                return
            if any(stage.state == "failed" for stages in every.values() for stage in stages):
                raise RuntimeError("a sample document failed; its worker's log says why")
            await asyncio.sleep(0.1)


async def _taken_over(app: App) -> bool:
    """A second start of a graph job that the killed worker had begun."""
    queue = app.producer.queue("graphs")
    for ident in await app.producer.redis.zrange(queue.toKey("completed"), 0, -1) + await app.producer.redis.lrange(
        queue.toKey("active"), 0, -1
    ):
        if int(await app.producer.redis.hget(queue.toKey(ident), "ats") or 0) > 1:
            return True
    return False


async def _poison(app: App, story: Story, folder: Path, console: Console) -> None:
    console.print("\n[bold]3.[/] A damaged PDF. Trying again would not help, so it goes to the dead letters at once.")
    good = (SAMPLES / "photosynthesis.pdf").read_bytes()
    broken = folder / "damaged.pdf"
    broken.write_bytes(good[: len(good) // 3])
    ident = await submit(app, broken, OWNER)
    letters: list[dead_letter.DeadLetter] = []
    while not letters:
        letters = await dead_letter.list_dead_letters(app.store)
        await asyncio.sleep(0.1)
    story.dead_letters = len(letters)
    console.print(f"   dead letter: [yellow]{escape(letters[0].reason)}[/]")
    console.print("   The file is repaired and the dead letter replayed: the same job, and its flow goes on.")
    broken.write_bytes(good)
    await replace_file(app, ident, broken, OWNER)
    await dead_letter.replay(app.store, app.producer.redis, letters[0].id)
    story.replayed = 1
    story.documents.append(ident)
    with _bars(console) as bars:
        task = bars.add_task("damaged.pdf", total=100, what="")
        while True:
            stages = await states(app, ident)
            _show(bars, task, stages)
            if all(stage.state == "completed" for stage in stages):
                return
            await asyncio.sleep(0.1)


async def _summary(app: App, story: Story, seconds: float, console: Console) -> bool:
    async with read(app.store) as connection:
        results = {
            "graph-generation": await connection.scalar(select(func.count()).select_from(db.graphs)),
            "quiz-creation": await connection.scalar(select(func.count()).select_from(db.quizzes)),
            "connection-explanations": await connection.scalar(select(func.count()).select_from(db.explanation_sets)),
        }
        done = (
            await connection.scalar(
                select(func.count()).select_from(idempotency.inbox).where(idempotency.inbox.c.consumer.in_(STAGES))
            )
            or 0
        )
    completed = sum((worker.executions() for worker in story.workers), Counter[str]())
    jobs = len(story.documents) * len(STAGES)
    lost = jobs - done
    duplicated = sum(times - 1 for times in completed.values())
    missing = sum(len(story.documents) - (count or 0) for count in results.values())
    console.print()
    table = Table(title="What happened", title_justify="left", show_header=False)
    for name, value in (
        ("documents", len(story.documents)),
        ("jobs", jobs),
        ("workers killed in the middle of their jobs", story.killed),
        ("graphs were at", story.resumed_at),
        ("taken over after", f"{story.recovery:.1f} s"),
        ("dead letters / replayed", f"{story.dead_letters} / {story.replayed}"),
        ("jobs lost", lost),
        ("effects duplicated", duplicated),
        ("results missing", missing),
        *((name, value) for name, value in story.orders.items() if name != "held"),
        ("the tour took", f"{seconds:.0f} s"),
    ):
        table.add_row(name, str(value))
    console.print(table)
    held = (lost, duplicated, missing, story.killed) == (0, 0, 0, 1) and bool(story.orders["held"])
    console.print(
        "[green]Nothing was lost, nothing was done twice.[/]"
        if held
        else "[red]A promise did not hold; please report this run.[/]"
    )
    return held


async def _keep_running(app: App, console: Console) -> None:
    folder = app.settings.data_dir
    console.print(
        f"\nStill running. In another terminal:\n  studyhall status --owner {OWNER} --data-dir {folder}\n"
        f"  studyhall submit FILE --data-dir {folder}\n  studyhall dlq list --data-dir {folder}\nCtrl-C ends it."
    )
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()


def _bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:<22}"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f} %  {task.fields[what]}"),
        console=console,
    )


def _show(bars: Progress, task: TaskID, stages: list[StageState]) -> None:
    share = 100 / len(stages)
    done = sum(share * stage.percent / 100 for stage in stages)
    now = next((stage for stage in stages if stage.state != "completed"), None)
    what = f"{now.name}: {now.message or now.state}" if now else "done"
    bars.update(task, completed=done, what=escape(what[:60]))
