"""Text out of uploaded files. `extract(path)` is the only entry; what it refuses is a `DocumentRejected`."""

from .content import Extracted, Kind, Section
from .errors import Corrupt, DocumentRejected, Encrypted, Missing, NoText, TooLarge, WrongType
from .extract import extract

__all__ = [
    "Corrupt",
    "DocumentRejected",
    "Encrypted",
    "Extracted",
    "Kind",
    "Missing",
    "NoText",
    "Section",
    "TooLarge",
    "WrongType",
    "extract",
]
