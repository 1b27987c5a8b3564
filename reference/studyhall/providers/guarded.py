"""A provider behind the shared circuit breaker: while it is down, jobs wait instead of calling it."""

from collections.abc import Sequence
from typing import Any

from studyhall.patterns.circuit_breaker import CircuitBreaker

from .protocol import AIProvider, OnProgress
from .results import ConceptGraph, Explanation, Link, Quiz


class GuardedProvider:
    """Every call of `provider` passes the breaker; `BreakerOpen` sends the job back, and no attempt is consumed."""

    def __init__(self, provider: AIProvider, breaker: CircuitBreaker) -> None:
        self._provider, self._breaker = provider, breaker

    @property
    def name(self) -> str:
        return self._provider.name

    async def concept_graph(
        self, text: str, *, key: str, on_progress: OnProgress, deadline: float, resume: dict[str, Any] | None = None
    ) -> ConceptGraph:
        async with self._breaker:
            return await self._provider.concept_graph(
                text, key=key, on_progress=on_progress, deadline=deadline, resume=resume
            )

    async def quiz(
        self, text: str, graph: ConceptGraph, *, key: str, on_progress: OnProgress, deadline: float, questions: int = 8
    ) -> Quiz:
        async with self._breaker:
            return await self._provider.quiz(
                text, graph, key=key, on_progress=on_progress, deadline=deadline, questions=questions
            )

    async def explain(
        self, connections: Sequence[Link], text: str, *, key: str, on_progress: OnProgress, deadline: float
    ) -> list[Explanation]:
        async with self._breaker:
            return await self._provider.explain(connections, text, key=key, on_progress=on_progress, deadline=deadline)

    async def answer(self, question: str, text: str, *, key: str, deadline: float) -> str:
        async with self._breaker:
            return await self._provider.answer(question, text, key=key, deadline=deadline)

    async def close(self) -> None:
        await self._provider.close()
