"""URLs and the options they become. No server needed."""

import sys
from functools import partial

import pytest
from redis.asyncio import Redis

from studyhall.patterns.core.connections import producer_client
from studyhall.patterns.core.worker_connections import blocking_client, lock_client, worker_client

worker = partial(worker_client, kind=Redis)
worker.__name__ = "worker_client"  # type: ignore[attr-defined]
CLIENTS = [producer_client, worker, blocking_client, lock_client]


@pytest.mark.parametrize("make", CLIENTS)
def test_every_client_decodes_and_has_its_own_limits(make):
    options = make("redis://example:7000/3").connection_pool.connection_kwargs
    assert (options["host"], options["port"], options["db"]) == ("example", 7000, 3)
    assert options["decode_responses"]
    assert options["socket_connect_timeout"] <= 2
    assert options["socket_timeout"] is not None


@pytest.mark.parametrize("make", CLIENTS)
def test_tls_and_unix_sockets_are_urls_too(make):
    assert make("rediss://example").connection_pool.connection_class.__name__ == "SSLConnection"
    options = make("unix:///run/redis.sock?db=2").connection_pool.connection_kwargs
    assert (options["path"], options["db"]) == ("/run/redis.sock", 2)


@pytest.mark.parametrize("make", CLIENTS)
def test_sentinel_url_names_hosts_service_and_database(make):
    pool = make("redis+sentinel://me:se%40cret@one:26379,two:26380,[::1]:26381/main/4").connection_pool
    hosts = [sentinel.connection_pool.connection_kwargs for sentinel in pool.sentinel_manager.sentinels]
    assert [(host["host"], host["port"]) for host in hosts] == [("one", 26379), ("two", 26380), ("::1", 26381)]
    assert pool.service_name == "main"
    options = pool.connection_kwargs
    assert (options["db"], options["username"], options["password"]) == (4, "me", "se@cret")
    assert all(host["socket_connect_timeout"] <= 2 for host in hosts)


def test_sentinel_url_without_a_service_says_what_is_missing():
    with pytest.raises(ValueError, match="service name"):
        producer_client("redis+sentinel://one:26379")


@pytest.mark.parametrize("make", CLIENTS)
def test_sentinel_url_without_its_part_says_how_to_add_it(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "studyhall.patterns.core.sentinel", None)
    with pytest.raises(ImportError, match=r"queuesmith add producer.sentinel"):
        make("redis+sentinel://one/main")


def test_a_blocking_client_outlives_every_block_time():
    from studyhall.patterns.bullmq_worker import worker as bullmq_worker

    options = blocking_client("redis://example").connection_pool.connection_kwargs
    assert options["socket_timeout"] > bullmq_worker.POLL_SECONDS + 5
