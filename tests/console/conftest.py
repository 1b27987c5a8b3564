"""A Redis server and a console on it, for the tests of one file."""

import pytest

from harness.browser import ConsoleServer
from harness.redis import RedisServer


@pytest.fixture(scope="module")
def server():
    made = RedisServer.start()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def console(server, tmp_path_factory):
    running = ConsoleServer(tmp_path_factory.mktemp("console"), server.url)
    yield running
    running.close()
