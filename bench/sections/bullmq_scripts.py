"""BullMQ's own Lua scripts as plain EVALSHA commands, for clients that can only repeat one command.

A load generator such as redis-benchmark sends the same bytes again and again, so they must fit every job: `add` lets
the script number the jobs, `take` fetches whatever is next, and `finish` first looks up the oldest active job (one
LINDEX before the unchanged script) because BullMQ needs its id.
"""

import selectors
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import bullmq
import hiredis
import msgpack
import redis
from bullmq.queue_keys import QueueKeys

FOLDER = Path(bullmq.__file__).parent / "commands"
TOKEN = "bench"
# Command lines cannot carry a NUL byte, and msgpack writes whole numbers with leading zeros. A float with a full
# mantissa has none.
TIMESTAMP = 1767225600123.4567
QUEUE_KEYS = ("wait", "active", "prioritized", "events", "stalled", "limiter", "delayed", "paused", "meta", "pc")
OLDEST_ACTIVE = 'local oldest = redis.call("LINDEX", KEYS[2], -1)\nARGV[1] = oldest\nKEYS[12] = ARGV[7] .. oldest\n'


@dataclass(frozen=True, slots=True)
class Command:
    """One EVALSHA, ready to be repeated."""

    sha: str
    keys: tuple[str, ...]
    args: tuple[bytes, ...]

    @property
    def argv(self) -> list[bytes]:
        words = [b"EVALSHA", self.sha.encode(), str(len(self.keys)).encode()]
        return [*words, *(key.encode() for key in self.keys), *self.args]

    @property
    def bytes(self) -> bytes:
        """As it goes over the wire."""
        parts = [b"*%d\r\n" % len(self.argv)]
        parts += [b"$%d\r\n%s\r\n" % (len(word), word) for word in self.argv]
        return b"".join(parts)


class Scripts:
    """The three commands of a job's life in `queue`, loaded into the server of `client`."""

    def __init__(self, client: redis.Redis, queue: str, prefix: str = "bull") -> None:
        self._client = client
        self.key: dict[str, str] = QueueKeys(prefix).getKeys(queue)

    def add(self, data: bytes = b'{"i":1}', name: str = "noop") -> Command:
        packed = msgpack.packb([self.key[""], "", name, TIMESTAMP, *[None] * 5])
        keys = ("wait", "paused", "meta", "id", "completed", "delayed", "active", "events", "marker")
        return self._command("addStandardJob-9", keys, [packed, data, msgpack.packb({}), str(int(TIMESTAMP))])

    def take(self) -> Command:
        claim = {"token": TOKEN, "lockDuration": 30_000, "limiter": None}
        args = [self.key[""], str(int(TIMESTAMP)), msgpack.packb(claim)]
        return self._command("moveToActive-11", (*QUEUE_KEYS, "marker"), args)

    def finish(self) -> Command:
        """Complete the oldest active job and take the next one: what a worker does once per job."""
        claim = {
            "token": TOKEN,
            "keepJobs": {"count": -1},
            "lockDuration": 30_000,
            "limiter": None,
            "attempts": 3,
            "attemptsMade": 1,  # a zero would be a NUL byte
            "maxMetricsSize": "",
            "fpof": False,
            "cpof": False,
            "idof": False,
            "rdof": False,
        }
        prefix = self.key[""]
        args = ["", str(int(TIMESTAMP)), "returnvalue", "null", "completed", "1", prefix, msgpack.packb(claim)]
        command = self._command("moveToFinished-14", (*QUEUE_KEYS, "completed"), args, before=OLDEST_ACTIVE)
        keys = (*command.keys, f"{prefix}0", f"{prefix}metrics:completed", self.key["marker"])
        return Command(command.sha, keys, command.args)

    def _command(self, script: str, keys: tuple[str, ...], args: list[Any], before: str = "") -> Command:
        sha = self._client.script_load(before + (FOLDER / f"{script}.lua").read_text())
        raw = tuple(arg.encode() if isinstance(arg, str) else arg for arg in args)
        assert not any(b"\0" in arg for arg in raw), f"{script}: an argument has a NUL byte"
        return Command(str(sha), tuple(self.key[name] for name in keys), raw)


def blast(url: str, command: Command, count: int, *, connections: int = 50, pipeline: int = 1) -> float:
    """Send `command` `count` times, `pipeline` of them in flight per connection; seconds until the last reply."""
    address = urlsplit(url)
    request, left_to_send, left_to_read = command.bytes, count, count
    with selectors.DefaultSelector() as ready:
        try:
            began = time.perf_counter()
            for _ in range(connections):
                opened = socket.create_connection((str(address.hostname), address.port or 6379), timeout=30)
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ready.register(opened, selectors.EVENT_READ, hiredis.Reader())
                first = min(pipeline, left_to_send)
                opened.sendall(request * first)
                left_to_send -= first
            while left_to_read:
                for key, _ in ready.select(30):
                    connection: Any = key.fileobj
                    answered = _read(connection, key.data)
                    left_to_read -= answered
                    more = min(answered, left_to_send)
                    connection.sendall(request * more)
                    left_to_send -= more
            return time.perf_counter() - began
        finally:
            for key in list(ready.get_map().values()):
                socket.socket.close(key.fileobj)  # type: ignore[arg-type]


def _read(connection: socket.socket, reader: Any) -> int:
    data = connection.recv(1 << 20)
    if not data:
        raise ConnectionError("Redis closed the connection in the middle of the benchmark")
    reader.feed(data)
    answered = 0
    while (reply := reader.gets()) is not False:
        if isinstance(reply, hiredis.ReplyError) or (isinstance(reply, int) and reply < 0):
            raise RuntimeError(f"the script refused: {reply}")
        answered += 1
    return answered
