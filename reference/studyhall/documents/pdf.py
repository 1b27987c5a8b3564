"""Text of a PDF, page by page."""

import logging
import re
from typing import BinaryIO

from .content import MAX_CHARS, Section
from .errors import Corrupt, DocumentRejected, Encrypted, TooLarge

MAX_PAGES = 3000
# pypdf writes a warning per odd object, with bytes of the document in it: neither belongs in a log.
logging.getLogger("pypdf").setLevel(logging.CRITICAL)


def read(file: BinaryIO) -> tuple[str, list[Section], int]:
    # Here, because pypdf takes as long to load as half of the rest, and most processes never open a PDF.
    from pypdf.errors import DependencyError, LimitReachedError

    try:
        return _read(file)
    except (DocumentRejected, OSError, MemoryError, RecursionError):
        raise
    except LimitReachedError as error:
        raise TooLarge("The PDF unpacks to far more than it should. Print it to a new PDF and upload that.") from error
    except (DependencyError, NotImplementedError) as error:
        raise Encrypted(
            "The PDF uses an encryption we cannot open. Save it without protection and upload it again."
        ) from error
    except Exception as error:
        # pypdf documents that a broken file may cause any exception; the file is the cause of each of them.
        raise Corrupt(
            "The PDF is damaged or was cut off. Open it, save or print it as a new PDF and upload that."
        ) from error


def _read(file: BinaryIO) -> tuple[str, list[Section], int]:
    from pypdf import PdfReader

    reader = PdfReader(file, strict=False)
    # Many PDFs only restrict printing and open with an empty password; those we may read.
    if reader.is_encrypted and not reader.decrypt(""):
        raise Encrypted("The PDF has a password. Save a copy without it and upload that.")
    pages = len(reader.pages)
    if pages > MAX_PAGES:
        raise TooLarge(f"The PDF has {pages:,} pages, the limit is {MAX_PAGES:,}. Split it into parts.")
    if pages == 0:
        raise Corrupt("The PDF has no pages. Open it, save or print it as a new PDF and upload that.")
    sections: list[Section] = []
    length = 0
    for page in reader.pages:
        text = _reflow(page.extract_text() or "")
        length += len(text)
        if length > MAX_CHARS:
            raise TooLarge(f"The PDF holds more than {MAX_CHARS:,} characters of text. Split it into parts.")
        sections.append(Section("", text))
    title = reader.metadata.title if reader.metadata else None
    return (title if isinstance(title, str) else ""), sections, pages


def _reflow(text: str) -> str:
    """Lines of a page back into paragraphs: a sentence cut by the right margin is one sentence."""
    text = re.sub(r"([^\W\d_])[-\u00ad]\n([a-zß-ÿ])", r"\1\2", text)
    paragraphs: list[str] = []
    longest = max((len(line) for line in text.split("\n")), default=0)
    open_line = False  # the previous line reached the margin, so this one continues it
    for line in text.split("\n"):
        stripped = line.strip()
        if open_line and stripped:
            paragraphs[-1] += " " + stripped
        elif stripped:
            paragraphs.append(stripped)
        open_line = bool(stripped) and len(stripped) > 0.6 * longest
    return "\n\n".join(paragraphs)
