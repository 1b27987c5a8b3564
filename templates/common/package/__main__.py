{@% set process, entry = ('relay', 'relay') if kind == 'event-driven' else ('worker', 'work') %@}
{@% set operator = (['events', 'saga'] if kind == 'event-driven' else ['dlq'] + (['schedule'] if 'schedule' in patterns else [])) + ['health', 'purge', 'status'] %@}
"""python -m {@ package @} run | api | {@ process @}

For operators: {@ operator | join(' | ') @}
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

from . import __version__
from .quick_imports import quick_imports

if TYPE_CHECKING:  # the rest is imported where it is needed: --help and --version answer at once
    from .settings import Settings

PROCESSES = ("run", "api", "{@ process @}")
COMMANDS = ({@% for name in operator %@}"{@ name @}"{@ ', ' if not loop.last @}{@% endfor %@})
STOP_SECONDS = 3  # for open requests and event streams on SIGTERM


def main() -> int:
    parser = argparse.ArgumentParser(prog="{@ package @}", description=__doc__)
    version = f"{@ project_name @} {__version__}"
    parser.add_argument("--version", action="version", version=version)
    parser.add_argument(
        "process",
        choices=[*PROCESSES, *COMMANDS],
        help="run: the API and a {@ process @}, for development; COMMAND --help explains the others",
    )
    parser.add_argument("--with-parent", type=int, help=argparse.SUPPRESS)  # end when this process does
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        with quick_imports():
            from .commands import main as command
        return command(sys.argv[1:])
    given = parser.parse_args()
    process = given.process

    from .patterns.core.open_store import WrongStoreUrl
    from .patterns.core.store import StoreUnavailable
    from .patterns.engine import EngineError
    from .patterns.observability import configure_logging
    from .patterns.parent_death import die_with_parent
    from .settings import SettingsError, environment, load

    if given.with_parent:
        die_with_parent(given.with_parent)
    try:
        settings = load(environment())
        style = "human" if process == "run" else settings.log_format
        configure_logging(settings.log_level, style=style)
        if process == "{@ process @}":
            from .{@ process @} import {@ entry @}

            asyncio.run({@ entry @}(settings))
        elif process == "api":
            serve(settings)
        else:
            run(settings)
    except (SettingsError, EngineError, StoreUnavailable, WrongStoreUrl) as error:
        print(f"{@ package @}: {error}", file=sys.stderr)
        return 2
    return 0


def serve(settings: Settings, on_stop: Callable[[], None] = lambda: None) -> None:
    import uvicorn  # here: a {@ process @} is up sooner without a web server

    from .api import create_api
    from .impatient import MAX_CONNECTIONS, MAX_HEADERS, Impatient

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            on_stop()
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        create_api(settings),
        http=Impatient,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=STOP_SECONDS,
        h11_max_incomplete_event_size=MAX_HEADERS,
        limit_concurrency=MAX_CONNECTIONS,
    )
    Server(config).run()


def run(settings: Settings) -> None:
    """The API here, a {@ process @} beside it. In production each is a process of its own."""
    from .settings import PREFIX, SettingsError

    with contextlib.suppress(OSError), socket.create_connection((settings.host, settings.port), 1):
        raise SettingsError(f"port {settings.port} is taken, choose another one: {PREFIX}PORT=8001 make run")
    address = f"http://{settings.host}:{settings.port}"
    print(f"{@ project_name @} on {address} (Ctrl-C stops it)", flush=True)
    # Its own session: Ctrl-C reaches us, and we let it drain.
    itself = [sys.executable, "-m", "{@ package @}"]
    beside = subprocess.Popen(
        [*itself, "{@ process @}", "--with-parent", str(os.getpid())],
        start_new_session=True,
    )
    stopped = False

    def stop_it() -> None:
        nonlocal stopped
        stopped = True
        beside.terminate()

    # Until uvicorn handles signals: without it, our end would leave the {@ process @} behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        # The {@ process @} is told at once: it drains while open requests end here.
        serve(settings, on_stop=stop_it)
    except KeyboardInterrupt:
        pass
    finally:
        if not stopped:  # a second signal would mean: do not wait for running work
            stop_it()
        try:
            beside.wait(settings.grace_seconds + 10)
        except subprocess.TimeoutExpired:
            beside.kill()


if __name__ == "__main__":
    sys.exit(main())
