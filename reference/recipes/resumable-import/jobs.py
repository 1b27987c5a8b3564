"""What this service takes: imported by senders and by the worker."""

import os
from pathlib import Path
from urllib.parse import quote

from patterns.typed_jobs import Payload

QUEUE = "imports"


class Task(Payload):
    upload: str
    note: str


def key_of(task: Task) -> str:
    return str(task.upload)


def path_of(task: Task) -> Path:
    """A safe file name, whatever the key: a slash in it leads nowhere."""
    return Path(os.environ["UPLOADS"], quote(key_of(task), safe="") + ".csv")
