"""Fixtures come from the modules in tests/harness. New server: add its module's name below."""

import os
import random

PLUGINS = "processes preloaded tcp_proxy redis figures postgres rabbitmq nats kafka node browser guide claude"
pytest_plugins = [f"harness.{name}" for name in PLUGINS.split()]


def pytest_configure(config):
    # In the environment, so that xdist's workers and every spawned process share it.
    os.environ.setdefault("QUEUESMITH_SEED", str(random.SystemRandom().randrange(2**31)))


def pytest_report_header():
    mode = "full" if os.environ.get("QUEUESMITH_FULL") == "1" else "quick"
    slow = "" if with_slow() else ", without the slow tests (make test-all)"
    return f"faults: {mode}{slow}, QUEUESMITH_SEED={os.environ['QUEUESMITH_SEED']}"


def with_slow():
    """In CI, with `make test-all` and in the full suites. A file that is named runs all of its tests, too."""
    wanted = (os.environ.get(name, "").lower() for name in ("CI", "QUEUESMITH_SLOW", "QUEUESMITH_FULL"))
    return any(value in {"1", "true", "yes"} for value in wanted)


# Servers that do not come with the requirements, as SQLite, Valkey and NATS do: by fixture, parameter or mark.
OPTIONAL = ("postgres", "own_postgres", "rabbitmq", "kafka", "any_kafka", "three_kafka", "needs_")


def pytest_collection_modifyitems(config, items):
    """Tests marked `full` run in `make faults` and `make full` alone, `slow` ones not in a plain `make test`. Those on
    optional servers count as slow: it takes as long on every machine. The longest go first, the last are shared."""
    for item in items:
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        names = [*getattr(item, "fixturenames", ()), *given, *(mark.name for mark in item.iter_markers())]
        if "figures" in names:
            item.add_marker("measured")
        if any(isinstance(name, str) and name.startswith(OPTIONAL) for name in names):
            item.add_marker("slow")
    out = set() if os.environ.get("QUEUESMITH_FULL") == "1" else {"full"}
    if not with_slow() and config.args == config.getini("testpaths"):
        out.add("slow")
    left_out = {item for item in items if any(item.get_closest_marker(name) for name in out)}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: [not item.get_closest_marker(name) for name in ("slow", "fault")])
