"""The revisions in migrations/ make what the code needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fastapi.testclient import TestClient

from {@ package @}.api import create_api
from {@ package @}.settings import PREFIX, load

ROOT = Path(__file__).parents[1]


def test_the_revisions_make_the_tables_of_the_code_and_the_service_runs_on_them(env: dict[str, str]) -> None:
    env = {**env, f"{PREFIX}CREATE_TABLES": "no"}
    with TestClient(create_api(load(env)), base_url="http://localhost") as api:
        assert api.get("/readyz").json().keys() == {"database"}
    # In a process of its own: it knows the tables of the service, not those of its tests.
    both = "from alembic.config import main; main(['upgrade', 'head']); main(['check'])"
    alembic = [sys.executable, "-c", both]
    done = subprocess.run(alembic, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No new upgrade operations detected" in done.stdout + done.stderr
    with TestClient(create_api(load(env)), base_url="http://localhost") as api:
        assert api.get("/readyz").status_code == 200
