"""Real processes on an embedded Redis and a database of their own; nothing outlives a test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from {@ package @}.api import create_api
from {@ package @}.settings import PREFIX, Settings, load

from .processes import Processes

ROOT = Path(__file__).parents[1]


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The environment of this test's processes: quick take-over of what a dead one left."""
    configured = (PREFIX, "REDIS_URL", "DATABASE_URL", "BUS_URL")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(configured)}
    own = {
        "PYTHONPATH": str(ROOT / "src"),
        f"{PREFIX}DATA_DIR": str(tmp_path / "data"),
{@% if kind == 'event-driven' %@}
        f"{PREFIX}LEASE_SECONDS": "1",
        f"{PREFIX}PARTNER_SECONDS": "0.5",
{@% else %@}
        f"{PREFIX}LOCK_SECONDS": "2",
        f"{PREFIX}STALLED_SECONDS": "0.5",
        f"{PREFIX}STEP_SECONDS": "0.2",
{@% endif %@}
    }
    if url := os.environ.get("TEST_DATABASE_URL"):
        own["DATABASE_URL"] = url
    return {**inherited, **own}


@pytest.fixture
def settings(env: dict[str, str]) -> Settings:
    return load(env)


@pytest.fixture
def processes(env: dict[str, str], tmp_path: Path) -> Iterator[Processes]:
    logs = tmp_path / "logs"
    logs.mkdir()
    started = Processes(env, logs)
    try:
        yield started
    finally:
        started.end()


@pytest.fixture
def api(settings: Settings) -> Iterator[TestClient]:
    with TestClient(create_api(settings)) as client:
        yield client
