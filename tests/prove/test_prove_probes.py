"""The state of a key is read from wherever the service keeps it."""

import re
import sys
import urllib.request
from collections import Counter
from types import SimpleNamespace

import pytest
import redis

from queuesmith.prove import probes
from queuesmith.prove.provider import PlayedProvider
from queuesmith.prove.spec import Probe, Provider, Route
from queuesmith.prove.timeline import Timeline

KEYS = ["k1", "k2", "k3"]


@pytest.fixture
def world(redis_url, tmp_path):
    """As much of a run as a probe needs, with a real server."""

    def keys_in(text):
        return set(re.findall(r"k\d", text)) & set(KEYS)

    def client(_timeout=5):
        return redis.Redis.from_url(redis_url, decode_responses=True)

    return SimpleNamespace(
        redis=SimpleNamespace(client=client),
        values=lambda: {"dir": tmp_path},
        environment=lambda: None,
        name_of=str,
        key_of=lambda text: next(iter(keys_in(text)), ""),
        keys_in=keys_in,
        resting={"hash done:*"},
        spec=SimpleNamespace(folder=tmp_path, service=SimpleNamespace(queue="", prefix="bull")),
        log_lines=lambda: ["sold k1", "sold k1", "looked at k2"],
    )


@pytest.fixture
def shop():
    """A provider with a look-up, as an address to read from."""
    routes = (Route("POST", "/labels", effect="json:parcel"), Route("GET", "/labels/{id}", lookup="path:id"))
    provider = PlayedProvider(Provider("shop", routes), Timeline(), 1, str, 1.0)
    provider.start()
    yield provider
    provider.close()


def seen(probe, world):
    return {key: count for key, count in probes.read(probe, world, KEYS).items() if count}


def test_redis_by_hash_by_list_and_by_key(world):
    with world.redis.client() as client:
        client.hset("counts", mapping={"parcel k1": 2, "k2": 1, "stranger": 9})
        client.rpush("sold", "k1", "k1", "k3")
        client.set("label:k2", "L-17")
    assert seen(Probe("redis", "HGETALL counts"), world) == {"k1": 2, "k2": 1}
    assert seen(Probe("redis", "LRANGE sold 0 -1"), world) == {"k1": 2, "k3": 1}
    assert seen(Probe("redis", "EXISTS label:{key}"), world) == {"k2": 1}


def test_an_address_a_command_and_a_log(world, shop):
    request = urllib.request.Request(f"{shop.url}/labels", b'{"parcel": "k2"}')
    urllib.request.urlopen(request, timeout=5).close()
    assert seen(Probe("http", f"{shop.url}/labels/{{key}}"), world) == {"k2": 1}
    assert seen(Probe("command", f"{sys.executable} -c \"print('k1 3')\""), world) == {"k1": 3}
    assert seen(Probe("log", "sold {key}"), world) == {"k1": 2}


def test_of_several_providers_a_job_is_done_when_each_has_done_it(world, shop):
    world.providers = {"shop": shop, "mail": SimpleNamespace(counts=lambda: Counter({"k1": 2}))}
    for key in ("k1", "k2"):
        request = urllib.request.Request(f"{shop.url}/labels", f'{{"parcel": "{key}"}}'.encode())
        urllib.request.urlopen(request, timeout=5).close()
    assert seen(Probe("provider", "shop mail"), world) == {"k1": 1}


def test_what_cannot_be_read_is_named(world, tmp_path):
    for probe, says in (
        (Probe("sql", f"sqlite:///{tmp_path}/none.db", "select 1"), "there is no"),
        (Probe("redis", "NOSUCH"), "unknown command"),
        (Probe("command", f"{sys.executable} -c 1/0"), "ZeroDivisionError"),
        (Probe("http", "http://127.0.0.1:1/{key}"), "refused"),
    ):
        with pytest.raises(probes.Unreadable, match=says):
            probes.read(probe, world, KEYS)


def test_places_of_done_jobs_do_not_count_as_queued(world):
    with world.redis.client() as client:
        client.hset("done:17", "data", "k1")
        client.hset("done:18", "data", "k2")
        client.lpush("working:a", '{"parcel": "k2"}')
        client.set("lock:k3", "somebody")
    assert probes.queued(world, set(KEYS)) == {"k2": "list working:a"}


def test_a_provider_without_keys_sells_twice_and_one_with_keys_once(shop):
    for _ in range(2):
        urllib.request.urlopen(urllib.request.Request(f"{shop.url}/labels", b'{"parcel": "k3"}'), timeout=5).close()
    assert shop.counts() == {"k3": 2}
