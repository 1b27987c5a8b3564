"""HTTP answers for StudyHall's own errors, then for those of the patterns."""

from queuesmith.console.problems import MEANINGS as PATTERNS
from queuesmith.console.problems import Meaning, Problem
from studyhall.documents import DocumentRejected, TooLarge, WrongType
from studyhall.jobs.reference import UnknownDocument
from studyhall.orders.service import OrderRefused

__all__ = ["MEANINGS", "Problem"]

MEANINGS: tuple[Meaning, ...] = (
    (UnknownDocument, 404, "not-found"),
    (TooLarge, 413, "too-large"),
    (WrongType, 415, "wrong-type"),
    (DocumentRejected, 422, "document-rejected"),
    (OrderRefused, 422, "order-refused"),
    *PATTERNS,
)
