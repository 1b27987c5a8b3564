"""What a file is, by its bytes. Names and upload headers are claims; these are facts."""

from typing import BinaryIO

from .content import Kind
from .errors import Encrypted, WrongType

ACCEPTED = "Upload a PDF, a Word document (.docx), Markdown or plain text."
OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"{\\rtf", "a rich-text file"),
    (b"\x89PNG", "a picture"),
    (b"\xff\xd8\xff", "a picture"),
    (b"GIF8", "a picture"),
    (b"II*\x00", "a picture"),
    (b"MM\x00*", "a picture"),
    (b"%!PS", "a PostScript file"),
    (b"\x1f\x8b", "a compressed file"),
    (b"7z\xbc\xaf", "a compressed file"),
    (b"Rar!", "a compressed file"),
    (b"\x7fELF", "a program"),
    (b"MZ", "a program"),
    (b"SQLite format 3\x00", "a database"),
)


def detect(file: BinaryIO) -> Kind:
    """PDF, DOCX (any zip: its reader looks inside), or TEXT for whatever may still turn out to be text."""
    file.seek(0)
    head = file.read(4096)
    file.seek(0)
    if b"%PDF-" in head[:1024]:  # readers accept junk before the header, and mail gateways add it
        return Kind.PDF
    if head.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return Kind.DOCX
    if head.startswith(OLE):
        # Word wraps a .docx with a password in its old container; the name of a stream tells them apart.
        if "EncryptedPackage".encode("utf-16-le") in file.read(1_048_576):
            raise Encrypted("The Word document has a password. Remove it in Word and upload it again.")
        raise WrongType("This is an old Office file (.doc, .xls, .ppt). Save it as .docx or PDF and upload that.")
    for signature, name in FOREIGN:
        # "MZ" and "II*" could start a sentence; a program or a picture has NUL bytes, text has none.
        if head.startswith(signature) and (len(signature) > 4 or b"\0" in head or not head.isascii()):
            raise WrongType(f"This is {name}, which holds no text we can read. {ACCEPTED}")
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:15].lower()
    if start.startswith((b"<!doctype html", b"<html")):
        raise WrongType(f"This is a web page. Print it to PDF or copy its text. {ACCEPTED}")
    return Kind.TEXT
