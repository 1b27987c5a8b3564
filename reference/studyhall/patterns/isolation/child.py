"""The child of `isolation.SubprocessPool`: serves calls over its stdin and stdout, one at a time.

A module of its own, so that a child starts without importing what only the parent needs.
"""

import contextlib
import importlib
import inspect
import os
import pickle
import queue
import signal
import struct
import threading
import traceback
from collections.abc import Iterator
from typing import Any, BinaryIO

from ..core.failures import Permanent
from ..parent_death import die_with_parent

__all__ = ["HEADER", "OUT_OF_MEMORY", "serve"]

HEADER = struct.Struct("!Q")  # length of the message that follows
OUT_OF_MEMORY = 112  # our exit code for "over the memory limit"


def serve(parent: int) -> None:
    die_with_parent(parent, signal.SIGKILL)  # tied to the thread that started us: the event loop's
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the function may read stdin and print:
    os.dup2(2, 1)  # neither may touch our pipes
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests, inbox), daemon=True).start()
    _send(answers, b"ready")
    while True:
        _send(answers, _execute(inbox.get()))


def _receive(requests: BinaryIO, inbox: queue.SimpleQueue[bytes]) -> None:
    """A thread of its own, because the end of this pipe is how other systems learn that the parent died."""
    while len(header := requests.read(HEADER.size)) == HEADER.size:
        inbox.put(requests.read(*HEADER.unpack(header)))
    os._exit(0)


def _send(answers: BinaryIO, message: bytes) -> None:
    answers.write(HEADER.pack(len(message)) + message)
    answers.flush()


def _execute(request: bytes) -> bytes:
    name = "?"
    try:
        module, name, args, memory_limit = pickle.loads(request)  # noqa: S301
        with _limited(memory_limit):
            result = getattr(importlib.import_module(module), name)(*args)
            if inspect.iscoroutine(result):
                import asyncio

                result = asyncio.run(result)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # the heap may be in pieces: a fresh process is the only clean state
    except Exception as error:
        return _failure(error)
    try:
        return pickle.dumps(("result", pickle.dumps(result), ""))
    except Exception as error:
        return _failure(Permanent(f"the result of {name} cannot be sent back: {type(error).__name__}"))


def _failure(error: Exception) -> bytes:
    kind = f"{type(error).__name__}: {error}"
    where = "".join(traceback.format_exception(error)[-20:])
    try:
        content = pickle.dumps(error)
        pickle.loads(content)  # noqa: S301  not all that pickles unpickles
    except Exception:
        try:
            content = pickle.dumps(_Rebuilt(error))
        except Exception:
            content = b""
    return pickle.dumps((kind if kind != "result" else "error", content, where))


class _Rebuilt:
    """Pickles an error by its state. Its __init__ may want keywords, as that of RateLimited does."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self.error), self.error.args, self.error.__dict__)


def _rebuild(cls: type[Exception], args: tuple[Any, ...], state: dict[str, Any]) -> Exception:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


@contextlib.contextmanager
def _limited(memory: int | None) -> Iterator[None]:
    if memory is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (memory, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
