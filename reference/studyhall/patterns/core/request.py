"""What is asked for: a request for a job, and the job on its way into the queue."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["AddNext", "AddStep", "JobRef", "JobRequest", "Outgoing", "compact", "payload_of"]


@dataclass(frozen=True, slots=True)
class JobRef:
    """Where the job is."""

    queue: str
    name: str
    id: str
    key: str


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What to run. `key` is what makes the request unique in the business, such as the order number."""

    name: str
    payload: Any  # a mapping, or a model of the job type
    key: str
    delay: float = 0.0
    priority: str | int = "normal"
    max_age: float | None = None  # seconds after which running it is pointless
    children: Sequence[JobRequest] = field(default=())
    on_failure: str = "wait"  # as a child: what its failure does to its parent, see `flow`
    meta: Mapping[str, Any] = field(default_factory=dict)
    queue: str = ""  # if no job type names it


@dataclass(slots=True)
class Outgoing:
    """A job on its way into the queue: the steps of a producer fill it in."""

    request: JobRequest
    ref: JobRef
    data: dict[str, Any]
    opts: dict[str, Any]
    children: list[Outgoing] = field(default_factory=list)
    sealed: tuple[Any, str] = (None, "")  # data and its JSON, from a step that wrote it

    def tree(self) -> list[Outgoing]:
        """This job, and all below it."""
        return [self, *(job for child in self.children for job in child.tree())]

    @property
    def text(self) -> str:
        data, text = self.sealed
        return text if data is self.data else compact(self.data)


def payload_of(data: Any) -> Any:
    """What the key stands for: the payload, without what differs between sends."""
    return data["payload"] if isinstance(data, dict) and "v" in data and "payload" in data else data


compact = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
AddNext = Callable[[], Awaitable[None]]
AddStep = Callable[[Sequence[Outgoing], AddNext], Awaitable[None]]  # of a producer: `await call_next()` adds them
