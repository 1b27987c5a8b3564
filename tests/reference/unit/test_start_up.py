"""Commands that do little start at once: a help page needs no database library."""

import json
import os
import subprocess
import sys

import pytest
import typer

from studyhall import cli

# Each costs a quarter of a second or more.
HEAVY = {"sqlalchemy", "opentelemetry", "prometheus_client", "fastapi", "bullmq", "redis", "pydantic", "httpx2"}
SHOWN = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"


def loaded_by(code):
    """Top-level packages in a fresh interpreter after this code."""
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
