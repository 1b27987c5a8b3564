"""Fixtures come from the modules in tests/harness. New server: add its module's name below."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

HARNESS = Path(__file__).parent / "harness"

pytest_plugins = [
    f"harness.{name}"
    for name in (
        "processes",
        "preloaded",
        "tcp_proxy",
        "redis",
        "figures",
        "postgres",
        "rabbitmq",
        "nats",
        "kafka",
        "node",
        "browser",
        "guide",
        "claude",
    )
    if (HARNESS / f"{name}.py").exists()
]


def pytest_configure(config: pytest.Config) -> None:
    # In the environment, so that xdist's workers and every spawned process share it.
    os.environ.setdefault("QUEUESMITH_SEED", str(random.SystemRandom().randrange(2**31)))


def pytest_report_header() -> str:
    mode = "full" if os.environ.get("QUEUESMITH_FULL") == "1" else "quick"
    return f"faults: {mode}, QUEUESMITH_SEED={os.environ['QUEUESMITH_SEED']}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `full` run in `make faults` and `make full` alone."""
    for item in items:
        if "figures" in getattr(item, "fixturenames", ()):
            item.add_marker("measured")
    if os.environ.get("QUEUESMITH_FULL") == "1":
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
