"""Markdown and plain text, in whatever encoding they come."""

import re
import unicodedata
from typing import BinaryIO

from .content import MAX_CHARS, Kind, Section
from .detect import ACCEPTED
from .errors import TooLarge, WrongType

HEADING = re.compile(r"^ {0,3}(#{1,6})[ \t]+(.*?)[ \t#]*$")
FENCE = re.compile(r"^ {0,3}(```|~~~)")
RULE = re.compile(r"^ {0,3}([-*_=])(?:[ \t]*\1){2,}[ \t]*$")
BULLET = re.compile(r"^\s*(?:[-*+]|\d{1,9}[.)])\s+(?:\[[ xX]\]\s+)?")
QUOTE = re.compile(r"^(?:\s{0,3}>\s?)+")
INLINE: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"<!--[^>]{0,2000}-->"), ""),
    (re.compile(r"!\[([^\[\]]{0,500})\]\([^()\s]{0,2000}[^()]{0,200}\)"), r"\1"),
    (re.compile(r"\[([^\[\]]{1,500})\]\([^()\s]{0,2000}[^()]{0,200}\)"), r"\1"),
    (re.compile(r"\[([^\[\]]{1,500})\]\[[^\[\]]{0,200}\]"), r"\1"),
    (re.compile(r"`([^`]{1,500})`"), r"\1"),
    (re.compile(r"(\*\*|__)(?=\S)([^*_]{1,500})(?<=\S)\1"), r"\2"),
    (re.compile(r"(?<!\w)([*_])(?=\S)([^*_]{1,500})(?<=\S)\1(?!\w)"), r"\2"),
)


def read(file: BinaryIO) -> tuple[Kind, str, list[Section]]:
    # Four bytes per character at most: anything longer is over the limit in every encoding.
    raw = file.read(4 * MAX_CHARS + 1)
    text = _decode(raw) if len(raw) <= 4 * MAX_CHARS else ""
    if len(raw) > 4 * MAX_CHARS or len(text) > MAX_CHARS:
        raise TooLarge(f"The file holds more than {MAX_CHARS:,} characters of text. Split it into parts.")
    lines = text.splitlines()
    if not _looks_like_markdown(lines):
        return Kind.TEXT, "", [Section("", _join_wrapped(lines))]
    sections = _markdown(lines)
    return Kind.MARKDOWN, next((section.heading for section in sections if section.heading), ""), sections


def _decode(raw: bytes) -> str:
    for bom, encoding in ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if raw.startswith(bom):
            return _checked(raw.decode(encoding, errors="replace"))
    try:
        return _checked(raw.decode("utf-8"))
    except UnicodeDecodeError:
        pass
    try:
        # What old Windows editors mean by "ANSI"; latin-1 plus curly quotes.
        return _checked(raw.decode("cp1252"))
    except UnicodeDecodeError:
        return _checked(raw.decode("latin-1"))


def _checked(text: str) -> str:
    """Refuse what decodes but is not prose: every byte is a character in latin-1."""
    sample = text[:100_000]
    odd = sum(1 for c in sample if c == "\ufffd" or (unicodedata.category(c) == "Cc" and c not in "\t\n\r\f"))
    if "\0" in sample or odd > len(sample) * 0.01:
        raise WrongType(f"This file is not text and not a type we know. {ACCEPTED}")
    return text


def _looks_like_markdown(lines: list[str]) -> bool:
    headings = links = lists = fences = setext = 0
    for previous, line in zip(["", *lines[:1999]], lines[:2000], strict=False):
        headings += bool(HEADING.match(line))
        fences += bool(FENCE.match(line))
        links += "](" in line
        lists += bool(re.match(r"^\s*[-*+] \S", line))
        setext += bool(re.match(r"^(=|-){3,}\s*$", line)) and bool(previous.strip())
    return headings >= 1 or fences >= 2 or (links + setext >= 1 and links + lists + setext >= 2)


def _markdown(lines: list[str]) -> list[Section]:
    sections: list[Section] = []
    heading, body = "", list[str]()
    fenced = False
    lines = _without_front_matter(lines)
    for index, line in enumerate(lines):
        if FENCE.match(line):
            fenced = not fenced
            continue
        if fenced:
            body.append(line)
            continue
        following = lines[index + 1] if index + 1 < len(lines) else ""
        match = HEADING.match(line)
        underlined = bool(re.match(r"^(=|-){3,}\s*$", following)) and bool(line.strip()) and not BULLET.match(line)
        if match or underlined:
            sections.append(Section(heading, _join_wrapped(body)))
            heading, body = _inline(match.group(2) if match else line), []
        elif not RULE.match(line):
            quoted = QUOTE.sub("", line)
            bullet = BULLET.match(quoted)
            if bullet:
                body.append("")  # an item is a paragraph of its own, not the end of the line before it
            body.append(_inline(quoted[bullet.end() :] if bullet else quoted))
    sections.append(Section(heading, _join_wrapped(body)))
    return sections


def _without_front_matter(lines: list[str]) -> list[str]:
    if lines and lines[0].strip() == "---":
        for index, line in enumerate(lines[1:200], start=1):
            if line.strip() in ("---", "..."):
                return lines[index + 1 :]
    return lines


def _inline(line: str) -> str:
    # Patterns are bounded and bracket classes exclude each other, so a line of a million "[" stays linear.
    if len(line) > 20_000:
        return line
    for pattern, replacement in INLINE:
        line = pattern.sub(replacement, line)
    return line


def _join_wrapped(lines: list[str]) -> str:
    """Hard-wrapped lines back into paragraphs, so that a sentence is on one line."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line.strip())
        elif paragraphs[-1]:
            paragraphs.append([])
    return "\n\n".join(" ".join(paragraph) for paragraph in paragraphs if paragraph)
