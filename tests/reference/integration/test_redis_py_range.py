"""The versions of redis-py that pyproject.toml allows: the tests of the clients and the worker pass on each."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from harness.missing import missing

HERE = Path(__file__).parent
TESTS = [
    *sorted(HERE.glob("test_*_redis.py")),
    HERE / "test_bullmq_worker_outcomes.py",
    HERE / "test_event_bus_conformance.py",
]


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("version", ["6.2.0", "7.4.1"])
async def test_everything_on_redis_runs_on_this_redis_py_too(
    version: str, spawn: Any, tmp_path: Path
) -> None:
    uv = Path(sys.executable).with_name("uv")
    where = ["--python", sys.executable, "--target", tmp_path, "--no-deps"]
    install = spawn.command(uv, "pip", "install", "-q", *where, f"redis=={version}")
    if await install.exited(120) != 0:
        missing(f"redis-py {version}", "a package registry in reach")
    env = {"PYTHONPATH": f"{tmp_path}", "QUEUESMITH_FULL": "0"}
    asked = spawn.command(sys.executable, "-c", "import redis; print(redis.__version__)", env=env)
    assert await asked.exited(60) == 0, asked
    assert asked.lines() == [version]
    quiet = ["-q", "-p", "no:cacheprovider", "-m", "not measured and not needs_node"]
    tests = spawn.command(sys.executable, "-m", "pytest", *quiet, *TESTS, env=env)
    assert await tests.exited(1000) == 0, tests
