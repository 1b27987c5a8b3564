"""Reading code by pattern: comments, brackets, arguments, functions."""

import re
from collections.abc import Iterator

SECRET = (
    r"password|passwd|secret|client_?secret|api_?key|access_?token|refresh_?token|auth_?token|bearer_?token|authorization"
    r"|private_?key|card_?number|cvv|cvc|iban|ssn|email|e_mail|email_?address"
)
# Failed jobs that nobody overlooks.
MANY = 10_000
# SET NX that limits calls, not one that detects duplicates.
THROTTLE = re.compile(r"throttle|cool_?down|rate_?limit|debounce", re.IGNORECASE)
# Tables in which the last writer may win.
CACHES = r"cache|kv|setting|config|checkpoint|cursor|progress|offset|lease|lock|session|stat|metric|heartbeat|snapshot"
REPLACE = re.compile(r"\b(?:INSERT\s+OR\s+REPLACE|REPLACE)\s+INTO\s+[\"`\[]?([\w.]+)", re.IGNORECASE)


def line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


def calls(text: str, pattern: str) -> Iterator[tuple[re.Match[str], str]]:
    """(match, "(arguments)") of every call whose name matches; `pattern` ends before the bracket."""
    for match in re.finditer(pattern + r"\s*\(", text):
        yield match, text[match.end() - 1 : closing(text, match.end() - 1)]


# A table of markers or events, or a row that cannot be there twice.
KEYED = re.compile(
    r"\bonce\s*\(|inbox|IntegrityError|UniqueViolation|\bUNIQUE\b|PRIMARY KEY|dedup|idempoten(?!cy[_-]?key)|already_|is_processed",
    re.IGNORECASE,
)
INSERT = re.compile(r"\bINSERT\s+INTO\s+[\"`]?(\w+)", re.IGNORECASE)
TRAILS = r"outbox|inbox|log|audit|event|metric|history|attempt|dead_?letter|slot"


def plain_inserts(text: str) -> Iterator[int]:
    """Positions of inserts that a second run repeats."""
    for match in INSERT.finditer(text):
        statement = re.split(r";|\bINSERT\b", text[match.end() : match.end() + 400], maxsplit=1)[0]
        guarded = re.search(r"ON CONFLICT|ON DUPLICATE|NOT EXISTS", statement, re.IGNORECASE)
        if not guarded and not re.search(TRAILS, match[1], re.IGNORECASE):
            yield match.start()


def replaced_rows(text: str) -> Iterator[int]:
    for match in REPLACE.finditer(text):
        if not re.search(CACHES, match[1], re.IGNORECASE):
            yield line_at(text, match.start())


def masked(text: str) -> str:
    """Comments as spaces; strings and line numbers stay."""
    keep = r"'(?:\\.|[^'\\\n])*'|\"(?:\\.|[^\"\\\n])*\"|`(?:\\.|[^`\\])*`"
    blank = r"//[^\n]*|/\*.*?\*/"

    def change(match: re.Match[str]) -> str:
        literal = match[0]
        if literal.startswith(("//", "/*")) and "queuesmith: ignore" not in literal:
            return re.sub(r"[^\n]", " ", literal)
        return literal

    return re.sub(f"{keep}|{blank}", change, text, flags=re.DOTALL)


def closing(text: str, opening: int) -> int:
    """Position after the bracket that closes the one at `opening`; strings are skipped."""
    depth, position = 0, opening
    while position < len(text):
        char = text[position]
        if char in "'\"`":
            end = position + 1
            while end < len(text) and text[end] != char:
                end += 2 if text[end] == "\\" else 1
            position = end
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    return len(text)


def arguments(call: str) -> list[str]:
    """The top-level arguments of `(…)`."""
    parts, depth, start, position = [], 0, 1, 0
    while position < len(call):
        char = call[position]
        if char in "'\"`":
            end = position + 1
            while end < len(call) and call[end] != char:
                end += 2 if call[end] == "\\" else 1
            position = end
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 1:
            parts.append(call[start:position].strip())
            start = position + 1
        position += 1
    last = call[start:-1].strip()
    return [*parts, last] if last else parts
