"""Turn an uploaded file into clean text.

Promises
- The type is decided by the bytes; a PDF named notes.txt is a PDF.
- A file over the limit is refused by its size alone, before a byte of it is read.
- Whatever the bytes are, the outcome is text or a `DocumentRejected`. I/O errors of our own disk pass
  through: they are not the document's fault and a retry may help.
- The text holds no NUL, no other control characters and no lone surrogates: PostgreSQL and JSON refuse them.

When they do not hold: a hostile PDF can still burn CPU inside the parser. `extract` is a plain top-level
function with picklable arguments, result and errors, so run it in a subprocess that can be killed
(`patterns/isolation/pool.py`).
"""

import errno
import os
import re
import stat
import unicodedata
from pathlib import Path
from typing import BinaryIO

from . import docx, pdf, plain
from .content import MAX_BYTES, MAX_CHARS, Extracted, Kind, Section
from .detect import detect
from .errors import Corrupt, Missing, NoText, TooLarge

MAX_TITLE = 120
# Control characters but tab and newline, soft hyphens, zero-width and direction marks, lone surrogates.
INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff\ud800-\udfff]")


def extract(path: str | Path, max_bytes: int = MAX_BYTES) -> Extracted:
    """The text of the file at `path`, or a `DocumentRejected` that tells the user what to do."""
    with _open_checked(Path(path), max_bytes) as file:
        try:
            kind, title, sections, pages = _read(file)
        except (MemoryError, RecursionError) as error:
            raise Corrupt(
                "The file is built in a way that exhausts its reader. Export it again and upload that."
            ) from error
        except OSError as error:
            # Offsets that point outside the file make seek() fail with EINVAL or no errno at all.
            # Any other errno is our disk's fault.
            if error.errno in (None, errno.EINVAL):
                raise Corrupt("The file is damaged. Save it again and upload the new file.") from error
            raise
    return _tidy(kind, title, sections, pages)


def _read(file: BinaryIO) -> tuple[Kind, str, list[Section], int | None]:
    match detect(file):
        case Kind.PDF:
            title, sections, pages = pdf.read(file)
            return Kind.PDF, title, sections, pages
        case Kind.DOCX:
            title, sections = docx.read(file)
            return Kind.DOCX, title, sections, None
        case _:
            kind, title, sections = plain.read(file)
            return kind, title, sections, None


def _open_checked(path: Path, max_bytes: int) -> BinaryIO:
    try:
        # O_NONBLOCK: opening a FIFO for reading would otherwise wait for a writer forever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Missing("The uploaded file is no longer there. Upload it again.") from None
    file = os.fdopen(descriptor, "rb") if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    if file is None:
        os.close(descriptor)
        raise Missing("The upload is not a file. Upload it again.")
    size = os.fstat(descriptor).st_size
    if size > max_bytes:
        file.close()
        raise TooLarge(
            f"The file has {_megabytes(size)}, the limit is {_megabytes(max_bytes)}. "
            "Split it or remove its pictures, then upload it again."
        )
    if size == 0:
        file.close()
        raise NoText("The file is empty. Check that it was saved, then upload it again.")
    return file


def _tidy(kind: Kind, title: str, sections: list[Section], pages: int | None) -> Extracted:
    kept: list[Section] = []
    total = 0
    for section in sections:
        cleaned = Section(_one_line(section.heading), _clean(section.text))
        total += len(cleaned.heading) + len(cleaned.text) + 4
        if total > MAX_CHARS:
            raise TooLarge(f"The document holds more than {MAX_CHARS:,} characters of text. Split it into parts.")
        if cleaned.text or cleaned.heading:
            kept.append(cleaned)
    text = "\n\n".join(part for section in kept for part in (section.heading, section.text) if part)
    if not any(character.isalpha() for character in text):
        hint = " If it is a scan, run text recognition (OCR) on it first." if kind is Kind.PDF else ""
        raise NoText(f"There is no text in this document.{hint}")
    first_line = next((line for line in text.splitlines() if line.strip()), "")
    return Extracted(kind, _one_line(title) or _one_line(first_line), text, tuple(kept), pages)


def _clean(text: str) -> str:
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n\n")
    text = unicodedata.normalize("NFC", text)
    text = INVISIBLE.sub("", text)
    text = re.sub(r"[ \t\u00a0]+", " ", text)
    text = re.sub(r" ?\n ?", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _one_line(text: str) -> str:
    line = " ".join(_clean(text).split())
    return line if len(line) <= MAX_TITLE else line[: MAX_TITLE - 1].rstrip() + "…"


def _megabytes(size: int) -> str:
    return f"{size / 1_048_576:.0f} MB" if size >= 10 * 1_048_576 else f"{size / 1_048_576:.1f} MB"
