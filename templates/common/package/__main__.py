{@% set process = 'relay' if kind == 'event-driven' else 'worker' %@}
"""python -m {@ package @} run | api | {@ process @}"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys

from .patterns.engine import EngineError
from .patterns.observability import configure_logging
from .patterns.parent_death import die_with_parent
from .patterns.store import StoreUnavailable, WrongStoreUrl
from .settings import PREFIX, Settings, SettingsError, environment, load


def main() -> int:
    parser = argparse.ArgumentParser(prog="{@ package @}", description=__doc__)
    parser.add_argument(
        "process", choices=["run", "api", "{@ process @}"], help="run: the API and a {@ process @}, for development"
    )
    parser.add_argument("--with-parent", type=int, help=argparse.SUPPRESS)  # end when this process does
    given = parser.parse_args()
    process = given.process
    if given.with_parent:
        die_with_parent(given.with_parent)
    try:
        settings = load(environment())
        style = "human" if process == "run" else settings.log_format
        configure_logging(settings.log_level, style=style)
        if process == "{@ process @}":
            from .{@ process @} import {@ 'relay' if kind == 'event-driven' else 'work' @}

            asyncio.run({@ 'relay' if kind == 'event-driven' else 'work' @}(settings))
        elif process == "api":
            serve(settings)
        else:
            run(settings)
    except (SettingsError, EngineError, StoreUnavailable, WrongStoreUrl) as error:
        print(f"{@ package @}: {error}", file=sys.stderr)
        return 2
    return 0


def serve(settings: Settings) -> None:
    import uvicorn  # here: a {@ process @} is up sooner without a web server

    from .api import create_api

    api = create_api(settings)
    uvicorn.run(api, host=settings.host, port=settings.port, log_config=None, access_log=False)


def run(settings: Settings) -> None:
    """The API here, a {@ process @} beside it. In production each is a process of its own."""
    with contextlib.suppress(OSError), socket.create_connection((settings.host, settings.port), 1):
        raise SettingsError(f"port {settings.port} is taken, choose another one: {PREFIX}PORT=8001 make run")
    address = f"http://{settings.host}:{settings.port}/docs"
    print(f"{@ project_name @} on {address} (Ctrl-C stops it)", flush=True)
    # Its own session: Ctrl-C reaches us, and we let it drain.
    itself = [sys.executable, "-m", "{@ package @}"]
    beside = subprocess.Popen(
        [*itself, "{@ process @}", "--with-parent", str(os.getpid())],
        start_new_session=True,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # or uvicorn's end would leave it behind
    try:
        serve(settings)
    except KeyboardInterrupt:
        pass
    finally:
        beside.send_signal(signal.SIGTERM)
        beside.wait()


if __name__ == "__main__":
    sys.exit(main())
