"""The text of a document, and how much of it we take."""

from dataclasses import dataclass
from enum import StrEnum

MAX_BYTES = 50 * 1024 * 1024
MAX_CHARS = 5_000_000  # about ten long novels; keeps rows, prompts and checkpoints in bounds


class Kind(StrEnum):
    PDF = "pdf"
    DOCX = "docx"
    MARKDOWN = "markdown"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Section:
    """A page of a PDF, or the text under one heading of the other kinds. `heading` may be empty."""

    heading: str
    text: str


@dataclass(frozen=True, slots=True)
class Extracted:
    """`pages` is None for kinds that have no pages before they are printed."""

    kind: Kind
    title: str
    text: str
    sections: tuple[Section, ...]
    pages: int | None = None
