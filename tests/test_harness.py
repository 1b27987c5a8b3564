"""The harness: servers come back with their data, and nothing outlives the run."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest
import redis

from harness import figures as figures_module
from harness.missing import missing
from harness.processes import ROOT, alive, start_tied
from harness.waiting import until, until_sync


def test_shared_server_is_empty_at_the_start_of_a_test(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("left", "over")


def test_shared_server_is_empty_again_in_the_next_test(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0


@pytest.mark.fault
def test_killed_server_restarts_on_the_same_port_with_its_data(own_redis):
    url, first = own_redis.url, own_redis.pid
    with own_redis.client() as client:
        client.set("kept", "yes")
    own_redis.kill()
    assert not alive(first)
    own_redis.restart()
    assert own_redis.url == url
    assert own_redis.pid != first
    with own_redis.client() as client:
        assert client.get("kept") == "yes"


@pytest.mark.fault
def test_paused_server_answers_nothing_until_resumed(own_redis):
    with redis.Redis.from_url(own_redis.url, socket_timeout=0.3, retry=None) as client:
        assert client.ping()
        own_redis.pause()
        with pytest.raises(redis.TimeoutError):
            client.ping()
        own_redis.resume()
    with own_redis.client() as client:
        assert client.ping()


def test_servers_take_settings_by_keyword(make_redis):
    server = make_redis(maxmemory="20mb", requirepass="sesame")
    with server.client() as client:
        assert client.config_get("maxmemory")["maxmemory"] == str(20 * 1024 * 1024)


async def test_until_returns_the_value_or_names_what_never_came():
    values = iter([0, None, "there"])
    assert await until(lambda: next(values), what="a value") == "there"
    with pytest.raises(AssertionError, match="the moon"):
        await until(lambda: False, timeout=0.05, what="the moon")
    with pytest.raises(AssertionError, match="the sun"):
        until_sync(lambda: 0, timeout=0.05, what="the sun")


async def test_spawned_process_shows_its_output_when_it_ends_too_early(spawn, tmp_path):
    program = tmp_path / "ends.py"
    program.write_text("import sys\nprint('what went wrong')\nsys.exit(3)\n")
    child = spawn(program)
    assert await child.line("went") == "what went wrong"
    with pytest.raises(AssertionError, match=r"(?s)ended with 3 .*what went wrong"):
        await child.line("never printed")
    assert await child.exited() == 3


@pytest.mark.fault
def test_child_forked_from_a_short_lived_thread_outlives_the_thread(spawn):
    started = []
    thread = threading.Thread(target=lambda: started.append(spawn.command("sleep", "60")))
    thread.start()
    thread.join()
    with pytest.raises(AssertionError, match="still running"):
        started[0].wait(0.3)


@pytest.mark.fault
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child to its parent's death")
def test_sigkill_of_pytest_takes_its_servers_and_children_along(tmp_path):
    inner = tmp_path / "test_inner.py"
    inner.write_text(
        "import time\n"
        "def test_hold(own_redis, spawn):\n"
        "    child = spawn.command('sleep', '300')\n"
        f"    open({str(tmp_path / 'pids')!r}, 'w').write(f'{{own_redis.pid}} {{child.pid}}\\n')\n"
        "    time.sleep(300)\n"
    )
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml")]
    plugins = ["-p", "harness.processes", "-p", "harness.redis", f"--basetemp={tmp_path / 'base'}"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    with (tmp_path / "log").open("wb") as log:
        outer = start_tied([*run, *plugins, str(inner)], stdout=log, stderr=log, env=env)
    try:
        pids = until_sync(
            lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text().split(), 60, "inner test runs"
        )
        assert len(pids) == 2
        assert all(alive(int(pid)) for pid in pids)
    finally:
        outer.send_signal(signal.SIGKILL)
        outer.wait(10)
    until_sync(lambda: not any(alive(int(pid)) for pid in pids), 10, "server and child are gone")


def test_a_child_hears_ctrl_c_also_when_its_caller_ignores_it(spawn):
    """As in a shell's background job, whose children inherit the ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = spawn.command("sleep", "300")
    finally:
        signal.signal(signal.SIGINT, before)
    child.signal(signal.SIGINT)
    assert child.wait(20) == -signal.SIGINT


def test_figures_of_parallel_writers_are_all_kept(tmp_path, monkeypatch):
    code = (
        "import sys; from harness.figures import record\n"
        "for n in range(10): record('parallel', f'{sys.argv[1]}-{n}', 'a proof', 1, {'n': n})\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "QUEUESMITH_FIGURES": str(tmp_path)}
    writers = [subprocess.Popen([sys.executable, "-c", code, str(number)], env=env) for number in range(3)]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    kept = json.loads((tmp_path / "parallel.json").read_text())
    assert len(kept) == 30 + 1
    assert kept["2-9"]["figures"] == {"n": 9}
    assert "bullmq 3" in str(kept["runs"])
    with monkeypatch.context() as patch:  # a second run: each entry says which is its own
        patch.setenv("QUEUESMITH_FIGURES", str(tmp_path))
        figures_module.record("parallel", "later", "a proof", 2, {})
    kept = json.loads((tmp_path / "parallel.json").read_text())
    assert [kept[name]["run"].split()[2] for name in ("2-9", "later")] == ["1", "2"]
    assert [path.name for path in tmp_path.iterdir()] == ["parallel.json"]


def test_figures_scale_and_seed_follow_the_environment(monkeypatch, tmp_path, figures, scale, seed):
    monkeypatch.setenv("QUEUESMITH_FIGURES", str(tmp_path))
    monkeypatch.setenv("QUEUESMITH_FULL", "1")
    assert scale(10, 1000) == 1000
    kept = json.loads(figures("harness", name="one", lost=0).read_text())
    entry, (run,) = kept["one"], kept["runs"]
    assert run.endswith(f" full {seed}")
    assert entry["figures"] == {"lost": 0}
    assert entry["proof"] == "test_figures_scale_and_seed_follow_the_environment"
    monkeypatch.setenv("QUEUESMITH_FULL", "0")
    assert not figures_module.full()
    assert scale(10, 1000) == 10


def test_missing_server_is_a_skip_on_a_laptop_and_a_failure_in_ci(monkeypatch):
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt install teapot"):
        missing("teapot", "apt install teapot")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt install teapot"):
        missing("teapot", "apt install teapot")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere Python is started, not forked")
def test_a_forked_python_is_a_process_like_any_other(spawn, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import json, os, sys, time\n"
        "print(json.dumps([sys.argv[1:], os.getcwd(), os.environ.get('COLOUR'), os.getsid(0) == os.getpid(),\n"
        "    sys.path[0], 'bullmq' in sys.modules, 'studyhall' in sys.modules, __name__]))\n"
        "time.sleep(float(sys.argv[1]))\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    first = spawn(program, 0, 3, env={"COLOUR": "blue"}, cwd=tmp_path)
    folder = str(tmp_path)
    expected = [["0", "3"], folder, "blue", True, folder, True, False, "__main__"]
    assert json.loads(first.line_sync("[", 60)) == expected
    assert first.wait() == 3
    second = spawn(program, 60, 0)
    second.line_sync("null", 60)
    second.kill()
    assert second.returncode == -signal.SIGKILL
