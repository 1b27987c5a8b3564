"""Commands that do little start at once: a help page needs no database library."""

import json
import os
import subprocess
import sys

import pytest
import typer

from studyhall import cli
from studyhall.access import QUEUES
from studyhall.jobs import job_types
from studyhall.stages import STAGES

# Each costs a quarter of a second or more.
HEAVY = {"sqlalchemy", "opentelemetry", "prometheus_client", "fastapi", "bullmq", "redis", "pydantic", "httpx2"}
# None stands for a module that must not be imported.
SHOWN = "import json, sys; print(json.dumps([name for name, module in sys.modules.items() if module is not None]))"


def loaded_by(code):
    """Top-level packages in a fresh interpreter after this code."""
    return {name.partition(".")[0] for name in modules_of(code)}


def modules_of(code):
    """All modules in a fresh interpreter after this code."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{SHOWN}"], capture_output=True, text=True, check=True, timeout=60
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def processor_seconds(code):
    """User and system time of a fresh interpreter that runs this code; the better of two."""
    used = []
    for _ in range(2):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=60)
        after = os.times()
        used.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(used)


CALLED = """
import sys
from studyhall import cli
sys.argv = ["studyhall", {}]
try:
    cli.main()
except SystemExit:
    pass
"""


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_no_heavy_library(option):
    assert not loaded_by(CALLED.format(f'"{option}"')) & HEAVY


def test_help_costs_less_than_importing_bullmq_and_typer():
    """It took four times as much before: every command's module was imported to list their names."""
    assert processor_seconds(CALLED.format('"--help"')) < processor_seconds("import bullmq, typer")


NEEDLESS = {"rich", "prometheus_client", "fastapi", "httpx2", "bullmq", "opentelemetry"}


@pytest.mark.parametrize(
    ("names", "needless"),
    {
        ("saga", "order", "outbox", "dlq", "status"): NEEDLESS | {"redis"},
        # redis-py loads OpenTelemetry's interface, not the SDK
        ("events",): (NEEDLESS | {"sqlalchemy"}) - {"opentelemetry"},
        ("health", "limits"): NEEDLESS - {"opentelemetry"},
        ("schedule",): {"rich", "prometheus_client", "fastapi", "httpx2"},
    }.items(),
)
def test_a_command_loads_no_library_that_it_does_not_use(names, needless):
    assert not loaded_by(f"from studyhall import cli; [cli.command(name) for name in {names!r}]") & needless


def test_no_command_loads_the_metrics_of_opentelemetry_for_redis():
    code = "from studyhall import cli; cli.command('health'); import redis, sys"
    assert "opentelemetry.sdk.metrics._internal" not in modules_of(code)


def test_no_command_that_reads_the_store_loads_the_orm_and_who_wants_it_gets_it(tmp_path):
    listed = CALLED.format(f'"saga", "list", "--data-dir", {str(tmp_path)!r}')
    assert {"sqlalchemy.ext.asyncio", "sqlalchemy.orm"} & modules_of(listed) == {"sqlalchemy.ext.asyncio"}
    more = "from sqlalchemy.ext.asyncio import AsyncEngine as it, AsyncSession, engine; assert it is engine.AsyncEngine"
    assert "sqlalchemy.orm" in modules_of(listed + more)


def test_looking_at_sagas_costs_little_more_than_its_libraries(tmp_path):
    """It cost three times as much."""
    libraries = processor_seconds("import sqlalchemy.ext.asyncio, pydantic, typer, uvloop; pydantic.BaseModel")
    listed = CALLED.format(f'"saga", "list", "--data-dir", {str(tmp_path)!r}')
    processor_seconds(listed)  # makes the tables
    assert processor_seconds(listed) < 1.3 * libraries


def test_the_queues_known_to_commands_are_those_of_the_job_types():
    assert list(QUEUES) == sorted(job_types().queues)
    assert {name: job_types()[name].queue for name in STAGES} == STAGES


def test_a_script_that_only_enqueues_loads_what_bullmq_loads():
    """bullmq itself brings opentelemetry, when it is installed; the producer adds no library to that."""
    code = "from studyhall.patterns.producer import JobRequest, Producer"
    extra = loaded_by(code) - loaded_by("import bullmq")
    assert not extra & (HEAVY | {"aiosqlite", "croniter", "uvloop"})
    assert processor_seconds(code) < processor_seconds("import bullmq") + 0.3


def test_the_list_of_commands_says_what_each_of_them_says():
    for name, (_, about) in cli.COMMANDS.items():
        text = cli.command(name).help.replace("\n", " ")
        assert text.startswith(about), f"{name}: {about!r} is not how its own help begins: {text!r}"


def test_relay_is_a_hidden_name_of_the_event_worker():
    listed = typer.main.get_command(cli.app)
    assert listed.commands["relay"].hidden  # type: ignore[attr-defined]
    old, new = cli.command("relay"), cli.command("event-worker")
    assert [option.name for option in old.params] == [option.name for option in new.params]
