"""uvicorn, with event streams that end on SIGTERM."""

import asyncio
import socket

import uvicorn
from fastapi import FastAPI

from .state import ApiState


class StoppingAtOnce(uvicorn.Server):
    """Tells event streams and background tasks when the process must stop. uvicorn would wait for the
    streams until its grace is over, and the tasks would learn of it only then."""

    def __init__(self, config: uvicorn.Config, api: FastAPI, grace: float) -> None:
        super().__init__(config)
        self._api, self._grace = api, grace

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        state: ApiState | None = getattr(self._api.state, "studyhall", None)
        if state is not None:
            state.streams.stopping.set()
            self._draining = asyncio.create_task(state.tasks.drain(self._grace))
        await super().shutdown(sockets)
