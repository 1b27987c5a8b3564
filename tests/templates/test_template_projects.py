"""Generated projects do what their README says: `make test` is green, `make run` answers. On the servers they name."""

import json
import os
import re
import resource
import runpy
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from uuid import uuid4

import pytest

from harness.figures import full
from harness.ports import free_port
from harness.waiting import until_sync

from .combinations import COMBINATIONS, QUICK

pytestmark = pytest.mark.slow

VENV = Path(sys.executable).parents[1]  # already built: one test alone installs it

every_combination = pytest.mark.parametrize(
    "answers",
    [
        pytest.param(answers, id=name, marks=() if name in QUICK else pytest.mark.full)
        for name, answers in COMBINATIONS.items()
    ],
)


@pytest.fixture
def servers(answers, request):
    """DATABASE_URL and BUS_URL of what this combination names, started for real (Kafka where Java is)."""
    env = {}
    if answers.get("database") == "postgres":
        env["DATABASE_URL"] = request.getfixturevalue("postgres_url")
    if answers.get("broker") == "kafka":
        url = request.getfixturevalue("kafka_url")
        env["BUS_URL"] = f"kafka://{url.removeprefix('mock:')}"
        env["BUS_CREATE_TOPICS"] = "no" if url.startswith("mock:") else "yes"
    elif answers.get("broker"):
        env["BUS_URL"] = request.getfixturevalue(f"{answers['broker']}_url")
    return env


@pytest.mark.fault
@every_combination
def test_a_project_passes_its_own_tests_on_the_servers_it_names(render, run, answers, servers):
    project = render(**answers)
    env = {f"TEST_{name}": value for name, value in servers.items()}
    # One broker is enough for the rest, which uses none.
    bus_only = not full() and answers.get("broker") in ("rabbitmq", "nats")
    files = "tests/test_api.py tests/test_saga.py tests/test_migrations.py" if bus_only else ""
    out = run("make", f"VENV={VENV}", "test", f"ARGS=-v {files}", cwd=project, env=env).stdout
    assert " passed" in out
    assert "skipped" not in out
    assert re.search(r"test_(jobs|saga).py::test_\w+ PASSED", out)


@pytest.mark.fault
@pytest.mark.timeout(600)
@every_combination
def test_a_project_proves_itself_under_faults(render, run, answers, installed, request):
    """`make prove` starts servers of its own: these fixtures say how to get one that is not there."""
    if answers.get("database") == "postgres":
        request.getfixturevalue("postgres_server")
    broker = answers.get("broker", "redis")
    if broker != "redis":
        request.getfixturevalue(f"{broker}_server")
    faults = ["kill-random", "term", "broker-kill" if broker != "redis" else "redis-kill"]
    out = run(
        "make",
        f"VENV={VENV}",
        f"QUEUESMITH={sys.executable} {installed / 'bin' / 'queuesmith'}",
        "prove",
        "ARGS=" if full() else f"ARGS=--only {','.join(faults)} --strict",
        cwd=render(**answers),
        timeout=560,
    ).stdout
    for name in faults:
        assert re.search(rf"^  {name} .* held$", out, re.MULTILINE), out


def test_the_first_revision_of_a_job_service_fits_its_tables_on_postgresql(render, run, postgres_url):
    """The tests above cover event-driven services and SQLite."""
    project = render(database="postgres", patterns=["schedule"])
    make = ("make", f"VENV={VENV}", "test", "ARGS=-q tests/test_migrations.py")
    assert "1 passed" in run(*make, cwd=project, env={"TEST_DATABASE_URL": postgres_url}).stdout


@pytest.mark.full
@pytest.mark.parametrize("kind", ["background-jobs", "event-driven"])
def test_make_load_tells_what_the_machine_carries(render, run, kind):
    out = run("make", f"VENV={VENV}", "load", "ARGS=25", cwd=render(kind=kind)).stdout
    assert re.search(r"^ +25 +\d+ +\d+ ", out, re.MULTILINE), out
    assert re.search(
        r"^carries (25 requests a second, and was asked|fewer than 25 requests a second; saturated)", out, re.M
    )


WITNESS = """
import os

from my_service.bus import open_bus
from my_service.settings import Settings


async def test_the_bus_is_the_one_that_was_named(settings: Settings):
    async with open_bus(settings, "redis://nowhere") as bus:
        assert (type(bus).__name__, bus.url) == ("NatsBus", os.environ["TEST_BUS_URL"])
"""


def test_the_tests_of_a_project_use_the_servers_that_were_named(render, run):
    """Or the test above would prove nothing."""
    project = render(kind="event-driven", broker="nats", database="postgres")
    nowhere = f"127.0.0.1:{free_port()}"
    (project / "tests" / "test_witness.py").write_text(WITNESS)
    make = ("make", f"VENV={VENV}", "test", "ARGS=-q tests/test_witness.py")
    assert "1 passed" in run(*make, cwd=project, env={"TEST_BUS_URL": f"nats://{nowhere}"}).stdout
    env = {"TEST_DATABASE_URL": f"postgresql://nobody@{nowhere}/none"}
    assert "psycopg.OperationalError" in run(*make, cwd=project, env=env, code=2).stdout


@pytest.mark.fault
@every_combination
def test_make_run_answers_the_requests_of_the_readme_and_leaves_nothing_behind(render, run, spawn, answers, servers):
    project = render("service", **answers)
    prefix = f"{answers.get('package', 'service').upper()}_"
    port = free_port()
    env = {f"{prefix}PORT": str(port), "PYTHONPATH": ""}
    for name, value in servers.items():
        env[name if name.endswith("_URL") else prefix + name] = value
    if answers.get("kind") == "event-driven":
        env[f"{prefix}BUS_PREFIX"] = f"test-{uuid4().hex}"
        done = {"status": "confirmed"}
    else:
        env[f"{prefix}STEP_SECONDS"] = "0.01"
        done = {"state": "completed"}
    running = spawn.command("make", f"VENV={VENV}", "run", cwd=project, env=env)
    base = f"http://127.0.0.1:{port}"
    until_sync(lambda: _ask(f"{base}/readyz") == {}, 60, "a service that is ready")
    first, rest = _requests_of_the_readme(project, base)
    out = run("bash", "-ec", first, cwd=project).stdout
    assert "HTTP/1.1 202 Accepted" in out
    ident = json.loads(out.splitlines()[-1])["id"]
    out = run("bash", "-euc", rest, cwd=project, env={"ID": ident}).stdout
    if answers.get("kind") == "async-flow":
        assert "event: completed" in out  # the stream ended by itself
    address = base + runpy.run_path(str(project / "tests" / "example.py"))["URL"]
    until_sync(lambda: done.items() <= _ask(f"{address}/{ident}").items(), 60, "the request carried out")
    assert _ask(f"{base}/openapi.json")["openapi"]
    if not answers:  # a second one, on the same port
        out = run("make", f"VENV={VENV}", "run", cwd=project, env={**env, "SERVICE_DATA_DIR": "other"}, code=2)
        assert f"port {port} is taken" in out.stderr
    folder = str(project.resolve())
    assert len(_using(folder)) >= 4, "make, the API, the process beside it, Redis"
    # Ctrl-C; or worse, which the process beside it, in a session of its own, must not survive either
    os.killpg(running.pid, signal.SIGKILL if answers.get("kind") == "async-flow" else signal.SIGINT)
    running.wait(60)
    until_sync(lambda: not _using(folder), 20, "the end of all of them")


@pytest.mark.full
@pytest.mark.parametrize("cache", ["warm", "cold"])
def test_from_nothing_to_green_tests_in_less_than_a_minute(run, installed, tmp_path, figures, cache):
    """A new folder, a new home, an environment of its own: what the project does not ask for is not there.

    warm: packages were downloaded before; cold: uv has to fetch every one of them.
    """
    (tmp_path / "home").mkdir()
    env = {"HOME": str(tmp_path / "home"), "PYTHON": sys.executable}
    if cache == "cold":
        env["UV_CACHE_DIR"] = str(tmp_path / "cache")
    else:
        env["UV_CACHE_DIR"] = run("uv", "cache", "dir", cwd=tmp_path).stdout.strip()
    began, used = time.monotonic(), _processor_seconds()
    crowd = os.getloadavg()[0] / (os.cpu_count() or 1)
    run(sys.executable, installed / "bin" / "queuesmith", "new", "shop", "--defaults", cwd=tmp_path, env=env)
    scaffolded = time.monotonic()
    project = tmp_path / "shop"
    run("make", "install", cwd=project, env=env)
    built = time.monotonic()
    assert " passed" in run("make", "test", cwd=project, env=env).stdout
    green = time.monotonic()
    figures(
        "scaffold",
        name=f"default-{cache}-packages",
        scaffold_seconds=round(scaffolded - began, 1),
        install_seconds=round(built - scaffolded, 1),
        test_seconds=round(green - built, 1),
        total_seconds=round(green - began, 1),
        processor_seconds=round(_processor_seconds() - used, 1),
        waiting_per_core=round(crowd, 1),
        cache=cache,
    )
    # On a busy machine the clock measures its load; the CPU time of this stays the same.
    taken = green - began if crowd < 1 else _processor_seconds() - used
    assert taken < 60
    run("make", "lint", cwd=project, env=env)


def _processor_seconds():
    """Of all programs started here that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _requests_of_the_readme(project, base):
    """The request that asks for something, and those that look at it with the id in its answer."""
    blocks = re.findall(r"```sh\n(.*?)```", (project / "README.md").read_text(), re.DOTALL)
    (curls,) = [block for block in blocks if "curl" in block]
    curls = curls.replace("http://127.0.0.1:8000", base).replace("curl ", "curl -s ")
    second = curls.index("curl ", 1)
    return curls[:second], curls[second:]


def _ask(url):
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ConnectionError) as error:
        return {"error": str(error)}


def _using(folder):
    """Processes whose working directory or command line is this project's."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if folder in (process / "cmdline").read_text(errors="replace") or str(
                (process / "cwd").readlink()
            ).startswith(folder):
                pids.append(process.name)
        except OSError:
            continue
    return pids
