"""Generated projects do what their README says: `make test` is green, `make run` answers."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.ports import free_port
from harness.processes import Spawner
from harness.waiting import until_sync

VENV = Path(sys.executable).parents[1]  # already built: installing is the subject of one test alone
KINDS = ["background-jobs", "async-flow", "event-driven"]
Render = Callable[..., Path]
Run = Callable[..., Any]


@pytest.mark.fault
def test_a_new_project_passes_its_own_tests_kill_9_included(render: Render, run: Run) -> None:
    said = run("make", f"VENV={VENV}", "test", cwd=render()).stdout
    assert " passed" in said
    assert "skipped" not in said


@pytest.mark.full
@pytest.mark.fault
@pytest.mark.parametrize("broker", ["redis", "kafka"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_project_passes_its_own_tests(render: Render, run: Run, kind: str, broker: str) -> None:
    project = render(kind=kind, broker=broker, database="postgres", patterns=["circuit-breaker"])
    assert " passed" in run("make", f"VENV={VENV}", "test", cwd=project).stdout


@pytest.mark.full
@pytest.mark.fault
def test_a_new_project_tests_itself_on_postgresql(render: Render, run: Run, postgres_url: str) -> None:
    project = render(database="postgres")
    run("make", f"VENV={VENV}", "test", cwd=project, env={"TEST_DATABASE_URL": postgres_url})


@pytest.mark.full
def test_a_cold_install_is_typed_and_passes_the_tests(render: Render, run: Run) -> None:
    """Nothing of this environment: what is not in the project's dependencies is not there."""
    project = render()
    assert " passed" in run("make", f"PYTHON={sys.executable}", "test", cwd=project).stdout
    run("make", "lint", cwd=project)


@pytest.mark.parametrize("kind", KINDS)
def test_make_run_answers_a_request_and_leaves_nothing_behind(
    render: Render, spawn: Spawner, tmp_path: Path, kind: str
) -> None:
    project = render("service", kind=kind)
    port = free_port()
    env = {"SERVICE_PORT": str(port), "PYTHONPATH": "", "SERVICE_STEP_SECONDS": "0.01"}
    if kind == "event-driven":
        del env["SERVICE_STEP_SECONDS"]
    running = spawn.command("make", f"VENV={VENV}", "run", cwd=project, env=env)
    base = f"http://127.0.0.1:{port}"
    until_sync(lambda: _ask(f"{base}/readyz") == {}, 60, "a service that is ready")
    path, body, done = {
        "background-jobs": ("/send-report", {"customer": "a", "pages": 1}, {"state": "completed"}),
        "async-flow": ("/write-summary", {"customer": "a", "pages": 1}, {"state": "completed"}),
        "event-driven": ("/orders", {"customer": "a", "amount": 1}, {"status": "confirmed"}),
    }[kind]
    ident = _ask(base + path, body)["id"]
    until_sync(lambda: done.items() <= _ask(f"{base}{path}/{ident}").items(), 60, "the request carried out")
    folder = str(project.resolve())
    assert len(_using(folder)) >= 4, "make, the API, the process beside it, Redis"
    os.killpg(running.pid, signal.SIGINT)  # Ctrl-C
    running.wait(60)
    until_sync(lambda: not _using(folder), 20, "the end of all of them")


def _ask(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except (urllib.error.URLError, ConnectionError) as error:
        return {"error": str(error)}


def _using(folder: str) -> list[str]:
    """Processes whose working directory or command line is this project's."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if folder in (process / "cmdline").read_text() or str((process / "cwd").readlink()).startswith(
                folder
            ):
                found.append(process.name)
        except OSError:
            continue
    return found
