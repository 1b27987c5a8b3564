"""What every AI provider can do, local or remote.

The first three calls work in steps. After each step the provider awaits `on_progress`; for the long one, the
concept graph, the step carries a `state` that can be stored and passed back as `resume`, so a killed worker
repeats one step at most.

`key` is the idempotency key of the whole call; a provider derives one key per request from it. `deadline` is
a moment on the clock of `time.monotonic()`. Errors are those of `patterns.errors`: the class says whether a
retry helps.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from studyhall.patterns.core.errors import Permanent
from studyhall.patterns.deadline import DeadlineExceeded

from .results import ConceptGraph, Explanation, Link, Quiz


@dataclass(frozen=True, slots=True)
class Advance:
    """`done` of `total` steps are finished. `state` is JSON, a few kilobytes at most."""

    stage: str
    done: int
    total: int
    state: dict[str, Any] | None = None


OnProgress = Callable[[Advance], Awaitable[object]]


class TooLittleText(Permanent):
    """The document is too short to find connected ideas in it. Upload a longer one."""


class AIProvider(Protocol):
    """AI work: slow, usually remote, and paid for."""

    @property
    def name(self) -> str: ...

    async def concept_graph(
        self, text: str, *, key: str, on_progress: OnProgress, deadline: float, resume: dict[str, Any] | None = None
    ) -> ConceptGraph: ...

    async def quiz(
        self, text: str, graph: ConceptGraph, *, key: str, on_progress: OnProgress, deadline: float, questions: int = 8
    ) -> Quiz: ...

    async def explain(
        self, connections: Sequence[Link], text: str, *, key: str, on_progress: OnProgress, deadline: float
    ) -> list[Explanation]: ...

    async def answer(self, question: str, text: str, *, key: str, deadline: float) -> str: ...

    async def close(self) -> None: ...


def time_left(deadline: float) -> float:
    """Seconds until `deadline`; raises when there are none, so that no step starts that cannot end."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineExceeded("no time left for the next step; the next attempt goes on from the last checkpoint")
    return left
