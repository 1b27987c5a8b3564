"""`queuesmith console`: the console on a port of this machine."""

import argparse
import ipaddress
import secrets
import socket
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn

from queuesmith.record import Refused
from studyhall.patterns.core.open_store import WrongStoreUrl
from studyhall.patterns.core.store import StoreUnavailable

from .app import LOOPBACK, console


def run(options: argparse.Namespace) -> int:
    host, port, token = options.host, options.port, options.token or secrets.token_urlsafe(24)
    if len(token) < 12:
        raise Refused("the token is short enough to be guessed: use 12 characters or more, openssl rand -hex 16")
    if options.database and options.database.startswith("sqlite:") and not _file(options.database).exists():
        raise Refused(f"there is no database {_file(options.database)}. The console reads one, it makes none")
    names = {*LOOPBACK, *options.allow_host, host if ":" not in host else f"[{host}]"}
    try:
        app = console(
            options.redis,
            token=token,
            database=options.database,
            queues=options.queue or None,
            prefix=options.prefix,
            hosts=names,
        )
    except (ValueError, WrongStoreUrl, StoreUnavailable) as error:
        raise Refused(str(error)) from None
    server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    shown = f"[{host}]" if ":" in host else host
    print(f"console of {_plain(options.redis)} on http://{shown}:{server.getsockname()[1]}/")
    if not options.token:
        print(f"token: {token}   (made for this run; QUEUESMITH_CONSOLE_TOKEN sets one)")
    if not _loopback(host):
        print("it can be reached from other machines: put TLS in front, the token travels in a header")
    print("Ctrl-C ends it; the queues go on", flush=True)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=2,
        limit_concurrency=200,
    )
    uvicorn.Server(config).run([server])
    return 0


def _file(url: str) -> Path:
    return Path(url.partition(":///")[2].partition("?")[0])


def _plain(url: str) -> str:
    """Without the password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
