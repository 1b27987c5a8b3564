"""The limit of Redis is measured with scripts that really do their work, by either load generator."""

import pytest
import redis

from bench.sections import ceiling
from bench.sections.bullmq_scripts import Scripts, blast


@pytest.mark.parametrize("tool", [None, ceiling.TOOL] if ceiling.TOOL else [None])
def test_every_call_of_the_load_adds_or_finishes_a_job(redis_url, tool):
    rows = ceiling.run(redis_url, jobs=900, tool=tool)  # more than the 800 in flight; refusals would raise
    for row in rows.values():
        assert all(isinstance(value, int | float) and value > 0 for value in row.values())
        assert row.keys() == ceiling.COLUMNS.keys()


def test_a_refused_call_is_an_error_and_not_a_figure(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        scripts = Scripts(client, "empty")
        with pytest.raises(RuntimeError, match="refused"):
            blast(redis_url, scripts.finish(), 1)


def test_the_scripts_leave_jobs_as_bullmq_does(redis_url):
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        scripts = Scripts(client, "q")
        blast(redis_url, scripts.add(b'{"i":7}'), 3, connections=1, pipeline=3)
        assert client.lrange("bull:q:wait", 0, -1) == ["3", "2", "1"]
        blast(redis_url, scripts.take(), 1)
        assert client.lrange("bull:q:active", 0, -1) == ["1"]
        blast(redis_url, scripts.finish(), 1)
        assert client.zrange("bull:q:completed", 0, -1) == ["1"]
        assert client.lrange("bull:q:active", 0, -1) == ["2"], "the next one is handed out in the same call"
        assert client.hgetall("bull:q:1")["data"] == '{"i":7}'
