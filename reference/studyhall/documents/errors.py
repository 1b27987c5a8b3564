"""Why a document is refused. The message is shown to the person who uploaded it, so it says what to do.

All are `Permanent`: the same bytes will be refused again, so a retry only costs time. Each takes one string,
which is what lets it travel back from the extraction process by pickle.
"""

from studyhall.patterns.core.errors import Permanent


class DocumentRejected(Permanent):
    """The document cannot be used as it is."""

    code = "rejected"


class TooLarge(DocumentRejected):
    """More bytes, pages or text than we take."""

    code = "too-large"


class WrongType(DocumentRejected):
    """Not a PDF, DOCX, Markdown or text file, whatever its name says."""

    code = "wrong-type"


class Corrupt(DocumentRejected):
    """The right type, but broken: cut off, altered or made to break its reader."""

    code = "corrupt"


class Encrypted(DocumentRejected):
    """Opens only with a password."""

    code = "encrypted"


class NoText(DocumentRejected):
    """Readable, but there are no words in it (a scan, an empty file)."""

    code = "no-text"


class Missing(DocumentRejected):
    """The stored file is gone."""

    code = "missing"
