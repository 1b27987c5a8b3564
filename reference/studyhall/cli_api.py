"""`studyhall api`: the HTTP API and the web console."""

import ipaddress
import os
import socket
from typing import Annotated

import typer

from .patterns.parent_death import die_with_parent
from .settings import SettingsError
from .terminal import DataDir, run, say, settings_for

STOP_SECONDS = 3  # open event streams are ended after this


def api_command(
    host: Annotated[
        str, typer.Option(help="Address to listen on. Beyond loopback, set the admin token and a proxy.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port, printed.")] = 8000,
    data_dir: DataDir = None,
    parent: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve the API and the console until SIGTERM."""
    try:
        import uvicorn

        from .api import create_app
        from .api.impatient import MAX_CONNECTIONS, MAX_HEADERS, Impatient
        from .api.server import StoppingAtOnce
    except ImportError as missing:
        raise SettingsError(f"the API needs {missing.name}: pip install 'queuesmith[api]'") from None
    settings = settings_for(data_dir, quiet=False)
    if parent is not None:
        die_with_parent(parent)
    if not _loopback(host):
        say(
            f"listening on {host}: whoever can reach it can use StudyHall as anybody, because X-User is believed. "
            "Put a proxy in front that signs people in and sets X-User",
            err=True,
        )
    api = create_app(settings)
    config = uvicorn.Config(
        api,
        http=Impatient,
        host=host,
        port=port,
        log_config=None,  # our own: redacted, one line each
        access_log=False,  # addresses may hold what people typed
        server_header=False,
        timeout_graceful_shutdown=STOP_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADERS,
        limit_concurrency=MAX_CONNECTIONS,
        # uvicorn believes X-Forwarded-For from 127.0.0.1 by itself, and with it any number of addresses.
        proxy_headers=settings.trusted_proxies is not None,
        forwarded_allow_ips=settings.trusted_proxies,
    )
    _check_free(host, port)
    run(StoppingAtOnce(config, api, settings.grace_seconds).serve())


def _check_free(host: str, port: int) -> None:
    """Fails in one line before anything starts; uvicorn fails after the whole app is up."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise SettingsError(f"cannot listen on {host}, port {port}: {why}. Choose another --port or --host") from None


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
