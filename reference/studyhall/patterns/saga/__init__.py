"""A saga: effects in several systems that all happen, or are all taken back, whatever dies meanwhile."""

from __future__ import annotations

from .runner import DbStep, Saga, SagaRunner, Step, StepContext
from .store import (
    HistoryRow,
    Lease,
    LeaseLost,
    SagaConflict,
    SagaRow,
    StepRow,
    UnknownSaga,
    claim,
    create,
    history,
    list_sagas,
    load,
    purge,
    record,
    redact,
)

__all__ = [
    "DbStep",
    "HistoryRow",
    "Lease",
    "LeaseLost",
    "Saga",
    "SagaConflict",
    "SagaRow",
    "SagaRunner",
    "Step",
    "StepContext",
    "StepRow",
    "UnknownSaga",
    "claim",
    "create",
    "history",
    "list_sagas",
    "load",
    "purge",
    "record",
    "redact",
]
