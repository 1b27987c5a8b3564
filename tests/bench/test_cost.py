"""What reliability costs must not grow unnoticed: function calls per job, which no neighbour's load changes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.redis import RedisServer

PROGRAM = Path(__file__).parent / "programs" / "counted_calls.py"
# Calls per job; a change that lowers one lowers it here. They vary by 3 %, with how jobs fall into turns of the loop.
PAID = {"enqueue": 410, "enqueue_many": 150, "execute": 490}
MORE = 1.15


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    server = RedisServer.start()
    store = f"sqlite:///{tmp_path_factory.mktemp('cost') / 'store.db'}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, str(PROGRAM), server.url, store]
    try:
        ran = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=120, check=False)
    finally:
        server.stop()
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("part", PAID)
def test_a_job_costs_no_more_calls_than_it_did(part, counted):
    assert counted[part] <= PAID[part] * MORE, f"{counted}: more calls per job; find them with cProfile, or pay here"
