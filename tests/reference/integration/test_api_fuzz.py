"""Every endpoint, from the API's own description, with values nobody would think of: never an error of ours."""

import sys

import pytest

from harness.api import TOKEN, standing_api

pytestmark = pytest.mark.slow


def test_no_request_made_from_the_openapi_document_is_answered_with_a_server_error(
    spawn, redis_url, tmp_path, seed, scale
):
    settings = {"request_rate": "100000", "queue_depth": "0", "log_level": "warning"}
    with standing_api(tmp_path, redis_url, worker=False, **settings) as hall:
        count = len(hall.client.get("/openapi.json").json()["paths"])
        fuzz = spawn.command(
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{hall.url}/openapi.json",
            "--checks=not_a_server_error",
            "--phases=examples,coverage,fuzzing",
            "--mode=all",
            f"--max-examples={scale(5, 100)}",
            f"--max-time={scale(25, 240)}",
            f"--seed={seed}",
            "--exclude-path-regex=/events$",  # they never end
            "--exclude-path=/readyz",
            f"--header=Authorization: Bearer {TOKEN}",
            "--request-timeout=20",
            "--generation-database=none",
            "--no-color",
            cwd=tmp_path,
        )
        code = fuzz.wait(280)
        report = "\n".join(fuzz.lines())
        errors = [line for line in hall.logs().splitlines() if "a request failed" in line]
    assert count > 25
    assert "Test cases:" in report or "passed" in report, report[-3_000:]
    assert errors == []
    assert code == 0, report[-3_000:]
