"""`queuesmith add celery-inbox | sqs-jobs | table-worker | bullmq-ts | asynq`: the modules of reference/stacks.

Nothing is written before everything is decided, and a file that differs is never overwritten unasked.
"""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .catalogue import ROOT
from .record import Refused

SERVICES = ROOT / "reference" / "stacks"


@dataclass(frozen=True, slots=True)
class Stack:
    """`patterns`: what its modules import; these are Python, and copied beside them."""

    folder: str
    files: tuple[str, ...]
    install: str
    patterns: tuple[str, ...] = ()


STACKS = {
    "celery-inbox": Stack(
        "celery", ("celery_jobs.py",), "pip install 'celery[redis]>=5.5'", ("sync-inbox", "outside-call")
    ),
    "sqs-jobs": Stack("sqs", ("sqs_jobs.py",), "pip install boto3", ("sync-inbox", "outside-call")),
    "table-worker": Stack("table", ("table_worker.py",), "no package", ("sync-inbox", "outside-call.http")),
    "bullmq-ts": Stack("bullmq-ts", ("inbox.ts", "reliable.ts", "sqlite.ts"), "npm install bullmq@6 ioredis@5 pg zod"),
    "asynq": Stack("asynq", ("reliable/reliable.go",), "go get github.com/hibiken/asynq@v0.26.0"),
}


def copy(stack: Stack, into: Path, *, force: bool = False, dry_run: bool = False) -> list[Path]:
    """What was written, or would be. Files that are the same already are left out."""
    if not into.is_dir():
        raise Refused(f"{into} is not a folder; name one for the modules")
    files = {}
    for name in stack.files:
        text = (SERVICES / stack.folder / name).read_text(encoding="utf-8")
        path = into / PurePosixPath(name)
        if stack.patterns:
            path = into / "patterns" / name
            text = text.replace("from studyhall.patterns import", "from . import")
            text = text.replace("from studyhall.patterns.", "from .")
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            files[path] = text
    edited = [str(path) for path in files if path.exists()]
    if edited and not force and not dry_run:
        raise Refused(f"{', '.join(edited)} differ from ours. Nothing was written; --force overwrites them")
    for path, text in files.items():
        if not dry_run:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return list(files)
