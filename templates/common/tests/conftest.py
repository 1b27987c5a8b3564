{@% set servers = (['TEST_DATABASE_URL'] if database == 'postgres' else []) + (['TEST_BUS_URL'] if kind == 'event-driven' else []) %@}
{@% if servers %@}
"""Real processes on an embedded Redis and a database of their own; nothing outlives a test.

{@% if database == 'postgres' %@}
TEST_DATABASE_URL: a PostgreSQL server to test on, each test in a new database; without it SQLite.
{@% endif %@}
{@% if kind == 'event-driven' %@}
TEST_BUS_URL: a broker to test on, each test under names of its own, which stay; without it Redis Streams.
{@% endif %@}
"""
{@% else %@}
"""Real processes on an embedded Redis and a database of their own; nothing outlives a test."""
{@% endif %@}

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
{@% if database == 'postgres' %@}
from urllib.parse import urlsplit
{@% endif %@}
{@% if servers %@}
from uuid import uuid4
{@% endif %@}

{@% if database == 'postgres' %@}
import psycopg
{@% endif %@}
import pytest
from fastapi.testclient import TestClient

from {@ package @}.api import create_api
from {@ package @}.settings import PREFIX, Settings, load

from .processes import Processes

ROOT = Path(__file__).parents[1]


{@% if database == 'postgres' %@}
@pytest.fixture
def database() -> Iterator[str | None]:
    """A new database on the server of TEST_DATABASE_URL; None: SQLite."""
    if (server := os.environ.get("TEST_DATABASE_URL")) is None:
        yield None
        return
    name = f"test_{uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
        yield urlsplit(server)._replace(path=f"/{name}").geturl()
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.fixture
def env(tmp_path: Path, database: str | None) -> dict[str, str]:
{@% else %@}
@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
{@% endif %@}
    """The environment of this test's processes: a dead one's work is taken over fast."""
    configured = (PREFIX, "REDIS_URL", "DATABASE_URL", "BUS_URL")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(configured)}
    own = {
        "PYTHONPATH": str(ROOT / "src"),
        f"{PREFIX}DATA_DIR": str(tmp_path / "data"),
{@% if kind == 'event-driven' %@}
        f"{PREFIX}LEASE_SECONDS": "1",
        f"{PREFIX}PARTNER_SECONDS": "0.1",
{@% else %@}
        f"{PREFIX}LOCK_SECONDS": "2",
        f"{PREFIX}STALLED_SECONDS": "0.5",
        f"{PREFIX}STEP_SECONDS": "0.2",
{@% endif %@}
    }
{@% if database == 'postgres' %@}
    if database is not None:
        own["DATABASE_URL"] = database
{@% endif %@}
{@% if kind == 'event-driven' %@}
    if url := os.environ.get("TEST_BUS_URL"):
        own |= {"BUS_URL": url, f"{PREFIX}BUS_PREFIX": f"test-{uuid4().hex}"}
{@% if broker == 'kafka' %@}
        own[f"{PREFIX}BUS_CREATE_TOPICS"] = os.environ.get("TEST_BUS_CREATE_TOPICS", "yes")
{@% endif %@}
{@% endif %@}
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
    with TestClient(create_api(settings), base_url="http://localhost") as client:
        yield client
