"""A saga: effects in several systems that all happen, or are all taken back, whatever dies meanwhile."""

from .definition import DbStep, Saga, SagaStep, StepContext
from .runner import SagaConflict, SagaRunner, UnknownSaga

__all__ = ["DbStep", "Saga", "SagaConflict", "SagaRunner", "SagaStep", "StepContext", "UnknownSaga"]
