"""Text of a Word document: a zip of XML, both from strangers.

A 42 kB zip can unpack to gigabytes and a one-kilobyte XML to billions of entities. So every size is checked
in the directory of the zip before anything is unpacked (zipfile never returns more than the directory says),
and the XML is read as a stream by a parser that refuses DTDs. Expat before 2.6 reads an unfinished token from its
beginning with every chunk, which takes hours for one huge start tag: tokens have a limit before it sees them.
"""

import posixpath
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, BinaryIO, ClassVar
from xml.etree.ElementTree import Element, ParseError

from defusedxml import DefusedXmlException
from defusedxml.ElementTree import iterparse

from .content import MAX_CHARS, Section
from .detect import ACCEPTED
from .errors import Corrupt, DocumentRejected, Encrypted, TooLarge, WrongType

MAX_ENTRIES = 5_000
MAX_UNPACKED = 300 * 1024 * 1024
MAX_XML = 64 * 1024 * 1024
MAX_TOKEN = 1024 * 1024  # of a tag, a comment or a stretch of text; Word's longest are a few kilobytes
MAX_RATIO = 200  # real Word XML packs 5 to 20 times; a run of zeros packs 1,000 times
RATIO_FROM = 1024 * 1024  # below this the ratio says nothing
BROKEN = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    ParseError,
    EOFError,
    LookupError,  # a part that is not there, an XML encoding that does not exist
    ValueError,
    NotImplementedError,  # what zipfile raises for a compression it does not know
)
DAMAGED = "The Word document is damaged. Open it in Word, save it under a new name and upload that."


def read(file: BinaryIO) -> tuple[str, list[Section]]:
    try:
        with zipfile.ZipFile(file) as archive:
            _check(archive)
            main = _main_part(archive)
            sections = _sections(archive, main, _heading_styles(archive, main))
            return _title(archive), sections
    except DocumentRejected:
        raise
    except DefusedXmlException as error:
        raise Corrupt(
            "The document declares XML entities, which Word never does. Save it again in Word and upload it."
        ) from error
    except BROKEN as error:
        raise Corrupt(DAMAGED) from error
    except RuntimeError as error:  # zipfile: an entry needs a password
        if isinstance(error, RecursionError):
            raise
        raise Encrypted("The document is in a password-protected zip. Unpack it and upload what is inside.") from error


def _check(archive: zipfile.ZipFile) -> None:
    entries = archive.infolist()
    if len(entries) > MAX_ENTRIES:
        raise TooLarge(f"The file has {len(entries):,} parts, the limit is {MAX_ENTRIES:,}. {ACCEPTED}")
    if sum(entry.file_size for entry in entries) > MAX_UNPACKED:
        raise TooLarge("The Word document unpacks to far more than it should. Remove its pictures and upload it again.")
    for entry in entries:
        # Word packs with deflate. zipfile unpacks bzip2 and LZMA by whole blocks, past every limit of ours.
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise Corrupt(DAMAGED)
        if entry.file_size > RATIO_FROM and entry.file_size > MAX_RATIO * max(entry.compress_size, 1):
            raise TooLarge("The Word document unpacks to far more than it should. Save it again in Word and upload it.")


def _main_part(archive: zipfile.ZipFile) -> str:
    """The part the package names as its document: word/document.xml, but Word also writes document2.xml."""
    names = set(archive.namelist())
    if "_rels/.rels" not in names:
        raise WrongType(f"This is a zip archive. Unpack it and upload what is inside. {ACCEPTED}")
    for element in _elements(archive, "_rels/.rels"):
        if _local(element) == "Relationship" and element.get("Type", "").endswith("/officeDocument"):
            target = element.get("Target", "").lstrip("/")
            if target.startswith(("xl/", "ppt/", "visio/")):
                raise WrongType(f"This is an Office file, but not a Word document. Save it as PDF. {ACCEPTED}")
            if target in names:
                return target
    raise Corrupt(DAMAGED)


def _heading_styles(archive: zipfile.ZipFile, main: str) -> frozenset[str]:
    """Style ids of headings. Ids are translated ("berschrift1" in German Word), names are not."""
    part = posixpath.join(posixpath.dirname(main), "styles.xml")
    styles = {f"Heading{level}" for level in range(1, 10)} | {"Title"}
    if part in archive.namelist():
        style = ""
        for element in _elements(archive, part, starts=True):
            if _local(element) == "style":
                style = _attribute(element, "styleId")
            elif _local(element) == "name" and style:
                if _attribute(element, "val").lower().startswith(("heading ", "title")):
                    styles.add(style)
                style = ""
    return frozenset(styles)


def _sections(archive: zipfile.ZipFile, main: str, heading_styles: frozenset[str]) -> list[Section]:
    sections: list[Section] = []
    heading, paragraphs = "", list[str]()
    length = 0
    for text, style in _paragraphs(archive, main):
        length += len(text)
        if length > MAX_CHARS:
            raise TooLarge(f"The document holds more than {MAX_CHARS:,} characters of text. Split it into parts.")
        if style in heading_styles and text.strip():
            sections.append(Section(heading, "\n\n".join(paragraphs)))
            heading, paragraphs = text, []
        elif text.strip():
            paragraphs.append(text)
    sections.append(Section(heading, "\n\n".join(paragraphs)))
    return sections


def _paragraphs(archive: zipfile.ZipFile, part: str) -> Iterator[tuple[str, str]]:
    """(text, style id) of each paragraph. Deleted text and the old-Word copy of a text box are left out."""
    open_paragraphs: list[list[str]] = []
    styles: list[str] = []
    in_fallback = 0
    for event, element in _events(archive, part):
        name = _local(element)
        if event == "start":
            if name == "p":
                open_paragraphs.append([])
                styles.append("")
            elif name == "Fallback":
                in_fallback += 1
            continue
        if name == "Fallback":
            in_fallback -= 1
        elif name == "p" and open_paragraphs:
            pieces, style = open_paragraphs.pop(), styles.pop()
            if not in_fallback:
                yield "".join(pieces), style
        elif open_paragraphs:
            if name == "t":
                open_paragraphs[-1].append(element.text or "")
            elif name == "tab":
                open_paragraphs[-1].append(" ")
            elif name in ("br", "cr"):
                open_paragraphs[-1].append("\n")
            elif name == "pStyle":
                styles[-1] = _attribute(element, "val")
        element.clear()  # a 60 MB XML would otherwise become a tree of ten times its size


def _title(archive: zipfile.ZipFile) -> str:
    if "docProps/core.xml" in archive.namelist():
        for element in _elements(archive, "docProps/core.xml"):
            if _local(element) == "title":
                return element.text or ""
    return ""


def _elements(archive: zipfile.ZipFile, part: str, *, starts: bool = False) -> Iterator[Element]:
    wanted = "start" if starts else "end"
    return (element for event, element in _events(archive, part) if event == wanted)


def _events(archive: zipfile.ZipFile, part: str) -> Iterator[tuple[str, Element]]:
    if archive.getinfo(part).file_size > MAX_XML:
        raise TooLarge("The Word document holds too much text to read at once. Split it into parts.")
    with archive.open(part) as stream:
        yield from iterparse(_ShortTokens(stream), events=("start", "end"), forbid_dtd=True)


class _ShortTokens:
    """Hands the XML on to the parser as long as no token is longer than the limit.

    A tag has no `<` inside, so it is shorter than the gap from one `<` to the next. Comments and instructions may
    hold any number, so they are followed to their end; so is CDATA, for what looks like a comment in it.
    """

    OPENS = re.compile(rb"<!--|<\?|<!\[CDATA\[")
    CLOSES: ClassVar = {b"<!--": b"-->", b"<?": b"?>", b"<![CDATA[": b"]]>"}

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._gap = 0  # since the last `<`
        self._unread = b""  # may begin an opening or closing mark
        self._closing = b""
        self._inside = 0  # bytes of the comment or instruction that is open
        self._first = True

    def read(self, size: int = -1) -> bytes:
        chunk = self._stream.read(size)
        if self._first and (b"\0" in chunk[:4] or chunk[:2] in (b"\xff\xfe", b"\xfe\xff")):
            raise Corrupt(DAMAGED)  # UTF-16: Word writes UTF-8, and only there is the byte `<` always a `<`
        self._first = False
        before, *gaps = map(len, chunk.split(b"<"))
        self._check(max(self._gap + before, *gaps, 0))
        self._gap = gaps[-1] if gaps else self._gap + before
        self._follow(self._unread + chunk)
        self._check(self._inside)
        return chunk

    def _follow(self, data: bytes) -> None:
        at, began = 0, 0 if self._closing else len(data)
        while True:
            if self._closing:
                end = data.find(self._closing, at)
                if end < 0:
                    break
                at, self._closing, self._inside, began = end + len(self._closing), b"", 0, len(data)
            elif match := self.OPENS.search(data, at):
                self._closing, at = self.CLOSES[match[0]], match.end()
                began = at
            else:
                break
        if self._closing != b"]]>":
            self._inside += len(data) - began
        self._unread = data[max(at, len(data) - 8) :]

    def _check(self, length: int) -> None:
        if length > MAX_TOKEN:
            raise Corrupt(DAMAGED)


def _local(element: Element) -> str:
    """Tag without its namespace, because "strict" documents use another namespace for the same tags."""
    return element.tag.rpartition("}")[2]


def _attribute(element: Element, name: str) -> str:
    return next((value for key, value in element.attrib.items() if key.rpartition("}")[2] == name), "")
