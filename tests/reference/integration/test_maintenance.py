"""StudyHall by the clock and by command: schedules, cancelling, reminders, reconciliation, health, end to end."""

import asyncio
import json
from pathlib import Path

import pytest
from sqlalchemy import select, update
from typer.testing import CliRunner

from harness.pipelines import full_pipeline
from harness.waiting import until
from harness.workers import at_work
from studyhall import cli, db, maintenance
from studyhall.app import open_app
from studyhall.cancellations import cancel_document, forget_reminder, remind
from studyhall.jobs import STAGES
from studyhall.maintenance import Maintenance
from studyhall.patterns import delayed
from studyhall.patterns.core.store import begin, read
from studyhall.patterns.health.alerts import Rule, raised
from studyhall.patterns.producer import JobRequest
from studyhall.patterns.schedule import ticking
from studyhall.schedules import schedules
from studyhall.services import Services
from studyhall.settings import Settings, SettingsError, load
from studyhall.submissions import states, submit

SAMPLES = Path(__file__).parents[3] / "reference" / "samples"


@pytest.fixture
async def hall(redis_url, tmp_path):
    async with open_app(Settings(data_dir=tmp_path, redis_url=redis_url)) as app:
        yield app


def services(app):
    nobody = None
    return Services(
        nobody,
        nobody,
        app.settings.blob_dir,
        maintenance=Maintenance(app.producer, app.store, app.jobs.queues, app.settings.blob_dir),
    )


async def result_of(app, request):
    """Run one maintenance job for real: queue, worker, signed pipeline."""
    ref = await app.producer.enqueue(request)
    queue = app.producer.queue(ref.queue)
    tick = ticking(schedules(app.jobs, app.settings, app.signer), app.store)
    pipeline = full_pipeline(app.jobs, app.store, tick, signer=app.signer, services=services(app))
    async with at_work(ref.queue, pipeline, url=app.redis.url):

        async def ended():
            return await queue.getJobState(ref.id) in ("completed", "failed")

        await until(ended, 20, f"{ref.id} ends")
    job = await queue.getJob(ref.id)
    assert job.failedReason is None, job.failedReason
    return job.returnvalue


async def test_a_document_whose_flow_was_lost_is_enqueued_again_and_others_are_left_alone(hall):
    lost = await submit(hall, SAMPLES / "water-cycle.md")
    kept = await submit(hall, SAMPLES / "water-cycle.md")
    gone = await submit(hall, SAMPLES / "water-cycle.md")
    await cancel_document(hall, gone, "not needed")
    for name in STAGES:
        for document in (lost, gone):
            await hall.producer.queue(hall.jobs[name].queue).remove(f"{name}.{document}")
    early = await Maintenance(hall.producer, hall.store, hall.jobs.queues, hall.settings.blob_dir).reconcile_documents()
    assert (early.repaired, early.young) == ([], 2), "an upload may still be on its way"
    async with begin(hall.store) as tx:
        await tx.execute(update(db.documents).values(updated_at=1.0))
    done = await result_of(hall, JobRequest("reconcile-documents", {}, key="now"))
    assert done == {"checked": 2, "repaired": [lost], "failed": {}}
    assert {stage.state for stage in await states(hall, lost)} == {"prioritized", "waiting-children"}
    again = await result_of(hall, JobRequest("reconcile-documents", {}, key="again"))
    assert again["repaired"] == []
    assert kept


async def test_cleanup_and_health_run_as_jobs(hall, monkeypatch):
    cleaned = await result_of(hall, JobRequest("nightly-cleanup", {}, key="now"))
    assert cleaned["markers"] == 0
    assert (await result_of(hall, JobRequest("evaluate-health", {}, key="1")))["alerts"] == []
    monkeypatch.setattr(maintenance, "RULES", (Rule("documents.backlog", raise_at=1, clear_at=0.5),))
    await submit(hall, SAMPLES / "water-cycle.md")
    sent = await result_of(hall, JobRequest("evaluate-health", {}, key="2"))
    assert sent["alerts"] == [{"signal": "documents.backlog", "raised": True}]
    assert (await result_of(hall, JobRequest("evaluate-health", {}, key="3")))["alerts"] == []
    assert [alert.signal for alert in await raised(hall.store)] == ["documents.backlog"]


async def test_a_reminder_comes_once_moves_and_can_be_called_off(hall):
    document = await submit(hall, SAMPLES / "water-cycle.md")
    async with begin(hall.store) as tx:
        await tx.execute(update(db.documents).values(status="ready"))
    ref = await remind(hall, document, delayed.after(days=3))
    first = await delayed.due_at(hall.producer, ref)
    await remind(hall, document, delayed.after(days=5))
    second = await delayed.due_at(hall.producer, ref)
    assert first is not None
    assert second is not None
    assert round((second - first) / 86400) == 2
    await forget_reminder(hall, document)
    with pytest.raises(delayed.AlreadyStarted):
        await forget_reminder(hall, document)
    payload = {"document_id": document, "owner": "you"}
    done = await result_of(hall, JobRequest("study-reminder", payload, key=document, delay=0.1))
    assert done["document_id"] == document
    async with read(hall.store) as connection:
        assert len((await connection.execute(select(db.reminders))).all()) == 1


def test_an_unknown_time_zone_is_refused_with_the_name_of_the_setting():
    with pytest.raises(SettingsError, match="STUDYHALL_TIME_ZONE"):
        load({"STUDYHALL_TIME_ZONE": "Europe/Atlantis"})


async def test_the_command_line_lists_runs_cancels_and_reports(redis_url, tmp_path, spawn):
    env = {"REDIS_URL": redis_url, "STUDYHALL_PROVIDER_PACE": "5", "STUDYHALL_GRACE_SECONDS": "1"}

    async def studyhall(*args, code=0):
        """In a thread, because the commands bring their own event loop; a process each takes far longer."""
        command = [str(part) for part in (*args, "--data-dir", tmp_path, "--json")]
        done = await asyncio.to_thread(CliRunner(env=env).invoke, cli.app, command)
        assert done.exit_code == code, f"{command}: {done.output} {done.exception}"
        return json.loads(done.stdout) if code == 0 else str(done.exception)

    worker = spawn("studyhall", "worker", "--processes", "1", "--data-dir", tmp_path, env=env)
    await worker.line('"ready"', 60)
    await worker.line("schedules changed", 20)
    listed = {row["id"]: row for row in await studyhall("schedule", "list")}
    assert set(listed) == {"nightly-cleanup", "reconcile-documents", "evaluate-health"}
    assert listed["nightly-cleanup"]["next"].endswith("03:15:00+00:00")
    ran = await studyhall("schedule", "run", "nightly-cleanup")
    await worker.line(ran["job"], 20)
    assert "declared:" in await studyhall("schedule", "run", "nightly", code=1)

    (document,) = (await studyhall("submit", SAMPLES / "water-cycle.md")).values()

    async def graph_runs():
        async with open_app(Settings(data_dir=tmp_path, redis_url=redis_url)) as app:
            return (await states(app, document))[1].state == "active"

    await until(graph_runs, 40, "the graph is being made", every=0.2)
    assert (await studyhall("health"))["healthy"] is True
    ended = {each["job_id"]: each["state"] for each in await studyhall("cancel", document)}
    assert ended[f"document-processing.{document}"] == "too-late"
    assert ended[f"graph-generation.{document}"] == "stopping"

    async def over():
        async with open_app(Settings(data_dir=tmp_path, redis_url=redis_url)) as app:
            now = [stage.state for stage in await states(app, document)]
            return now == ["completed", "cancelled", "cancelled", "cancelled"]

    await until(over, 20, "every later stage ends as cancelled", every=0.2)
    (row,) = await studyhall("status")
    assert row["error"] == "Cancelled: by the operator"
    assert await studyhall("dlq", "list") == []
    assert "neither a document nor a job" in await studyhall("cancel", "nonsense", code=1)
    worker.terminate()
    assert await worker.exited(20) == 0
