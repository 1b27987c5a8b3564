"""The same kills duplicate the effects of an ordinary handler, and none of the pipeline's."""

import sqlite3
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.lab import ENVS, ORDER, OURS, Peer
from bench.sections import crash, kills

pytestmark = pytest.mark.slow

# Ours in every run; the others where `make bench` has built their environments, in the full fault suite.
INSTALLED = [
    pytest.param(name, marks=() if name in OURS else (pytest.mark.full, pytest.mark.fault))
    for name in ORDER
    if name in OURS or (ENVS / f"{name}.ready").exists()
]


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(kills, "TAKEOVER", 2.0)
    monkeypatch.setattr(kills, "AT_A_TIME", 10)
    # At a job's row, 20 ms before its end: an ordinary handler is hit between effect and end.
    monkeypatch.setattr(kills, "moments", lambda jobs, count, seed: [(20 * (n + 1), 0.0) for n in range(count)])


@pytest.mark.fault
def test_kills_duplicate_the_ordinary_insert_and_nothing_of_the_pipeline(lab, soon):
    with ThreadPoolExecutor(2) as turns:
        pipeline, bare = turns.map(
            lambda name: kills.survive(lab, Peer.load(name), jobs=80, kills=2, limit=90, seed=1), OURS
        )
    assert (pipeline["kills"], bare["kills"]) == (2, 2)
    assert (pipeline["lost"], pipeline["duplicated"], pipeline["given_up"], pipeline["stuck"]) == (0, 0, 0, 0)
    assert bare["lost"] == 0
    assert bare["duplicated"] > 0, "the kills hit nothing: this run proves nothing"
    assert {*pipeline, *kills.words("queuesmith")} == {*kills.COLUMNS}


def test_moments_follow_from_the_seed_and_lie_where_work_is_left():
    planned = kills.moments(1000, 20, seed=3)
    assert planned == kills.moments(1000, 20, seed=3) != kills.moments(1000, 20, seed=4)
    marks = [mark for mark, _ in planned]
    assert marks == sorted(set(marks))
    assert 50 <= marks[0] <= marks[-1] < 900
    assert all(0 <= more <= 0.04 for _, more in planned)


@pytest.mark.parametrize("name", INSTALLED)
def test_what_a_queue_holds_is_read_from_the_keys_of_the_peer(lab, name):
    peer = Peer.load(name)
    with crash.alone(lab, peer) as (bench, effects, client):
        bench.enqueue(3, kind="row", takeover=5, tries=2)
        assert crash.held(peer, client, bench.queue).waiting == 3
        workers = bench.start(concurrency=1, takeover=5, tries=2)
        assert kills._at_rest(effects, 3, lambda: crash.held(peer, client, bench.queue), 60) is not None, workers.said()
        assert crash.held(peer, client, bench.queue).dead == 0
        assert set(effects.times()) == {0, 1, 2}


def test_rows_of_a_database_and_lines_of_a_file_are_effects_alike(tmp_path):
    effects = crash.Effects(tmp_path)
    with sqlite3.connect(tmp_path / "store.db") as database:
        database.executemany("INSERT INTO effects (job) VALUES (?)", [(1,), (2,), (2,)])
    (tmp_path / "store.db.rows").write_text("2\n3\n4")  # the last line is being written
    assert effects.times() == {1: 1, 2: 3, 3: 1}
    effects.close()


def test_every_peer_is_described():
    assert set(crash.WORDS) == set(ORDER)
