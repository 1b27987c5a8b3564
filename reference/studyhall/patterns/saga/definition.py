"""What a saga is made of: its steps, how each is undone, and what their providers promise."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from sqlalchemy.ext.asyncio import AsyncConnection

from ..core.job import DAY, RetryPolicy

__all__ = ["DbStep", "Inside", "Outside", "Result", "Saga", "SagaStep", "AnyStep", "StepContext"]


@dataclass(frozen=True)
class StepContext:
    """What a step is given. `result`: what `do` returned, None while its effect is uncertain."""

    saga_id: str
    data: Mapping[str, Any]
    step: str
    attempt: int
    key: str
    undo_key: str
    result: Mapping[str, Any] | None
    results: Mapping[str, Mapping[str, Any]]  # of all steps that were done, by step name
    error: str | None  # why the saga goes backward


Result = Mapping[str, Any] | None
Outside = Callable[[StepContext], Awaitable[Result]]
Inside = Callable[[StepContext, AsyncConnection], Awaitable[Result]]

TRY = RetryPolicy(base=0.5, cap=60, attempts=5, max_age=3600)
TRY_HARD = RetryPolicy(base=0.5, cap=60, attempts=20)  # for undo, where giving up calls for a person


@dataclass(frozen=True)
class _Limits:
    _: KW_ONLY
    deadline: float = 10.0  # seconds for one try, and how long a dead process holds the saga
    retry: RetryPolicy = TRY
    undo_retry: RetryPolicy = TRY_HARD
    crashes: int = 10  # processes that may die in this step; a crash is not an attempt
    independent: bool = False  # its undo may run before or after any other, so a stuck one holds up none
    final: bool = False  # once it has begun, the saga can no longer be cancelled


@dataclass(frozen=True)
class SagaStep(_Limits):
    """An effect in another system. `resolve` asks there for its result, None if there is no effect.

    `longest`: seconds that system may keep working on a request whose answer was lost. Until then nothing is
    repeated, looked up or undone; we give a request up after the same time. 0: all requests with one key make one
    effect, and what was undone is refused. `key_life`: how long it remembers a key, 0 if it takes none.
    """

    name: str
    do: Outside
    undo: Outside | None = None
    resolve: Outside | None = None
    _: KW_ONLY
    longest: float = 0.0
    key_life: float = DAY


@dataclass(frozen=True)
class DbStep(_Limits):
    """An effect in the saga's own database, made in the given transaction. Short, and no outside calls.

    `do=None`, for the first steps only: the transaction that starts the saga does it.
    """

    name: str
    do: Inside | None = None
    undo: Inside | None = None


AnyStep = SagaStep | DbStep


@dataclass(frozen=True)
class Saga:
    """Steps in business order. Sagas in flight hold the step names: rename the saga when you change them."""

    name: str
    steps: Sequence[AnyStep]

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"saga {self.name!r} needs steps with different names, got {names}")
        made = [step.do is None for step in self.steps]
        if made != sorted(made, reverse=True):
            raise ValueError(f"saga {self.name!r}: only its first steps may have do=None")
