"""The versions of redis-py that pyproject.toml allows: the tests of what talks to Redis pass on each."""

import sys
from pathlib import Path

import pytest

from harness.missing import missing

HERE = Path(__file__).parent
TESTS = [
    HERE / f"test_{name}.py"
    for name in (
        "autopipeline_redis",
        "bullmq_worker_outcomes",
        "connections_redis",
        "event_bus_conformance",
        "producer_redis",
        "progress_stream_redis",
        "rate_limit_redis",
    )
]


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", ["6.2.0", "7.4.1"])
async def test_clients_worker_and_bus_run_on_this_redis_py_too(version, spawn, tmp_path):
    uv = Path(sys.executable).with_name("uv")
    where = ["--python", sys.executable, "--target", tmp_path, "--no-deps"]
    install = spawn.command(uv, "pip", "install", "-q", *where, f"redis=={version}")
    if await install.exited(120) != 0:
        missing(f"redis-py {version}", "a package registry in reach")
    env = {"PYTHONPATH": f"{tmp_path}", "QUEUESMITH_FULL": "0"}
    asked = spawn.command(sys.executable, "-c", "import redis; print(redis.__version__)", env=env)
    assert await asked.exited(60) == 0, str(asked)
    assert asked.lines() == [version]
    quiet = ["-q", "-p", "no:cacheprovider", "-m", "not measured and not needs_node"]
    tests = spawn.command(sys.executable, "-m", "pytest", *quiet, *TESTS, env=env)
    assert await tests.exited(1000) == 0, str(tests)
